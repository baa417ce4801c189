"""The ledger and its audit, and runs that go on elsewhere: a moved directory, another run's checkpoint."""

import json
import shutil
from collections import Counter

import pytest

import raytrainer
from raytrainer.__main__ import main
from raytrainer.audit import Expected, audit_run, judge
from raytrainer.errors import CheckpointError, ResumeError, UsageError
from raytrainer.ledger_files import LedgerLine, delete_after, read_ledger, write_lines
from raytrainer.storage import open_storage
from tests.training import config, train

LEDGER = "logging.ledger=true"


def lines_of(run_dir, until=10**6):
    return list(read_ledger(open_storage(str(run_dir)), until))


def run(tmp_path, num_workers, *overrides, **options):
    wanted = [f"scaling.num_workers={num_workers}", LEDGER, *overrides]
    return raytrainer.run(config(tmp_path, *wanted), local=True, **options)


# What the audit says of a ledger


def ledger(num_steps=6, attempt=0):
    """Six samples in steps of two, two microbatches a step: two epochs of three steps."""
    return [
        LedgerLine(step, (step - 1) // 3, number, 0, attempt, [((step - 1) % 3) * 2 + number])
        for step in range(1, num_steps + 1)
        for number in (0, 1)
    ]


def expected(last_step=6, begun_at=(0,), first_step=1):
    return Expected(3, (2, 2), first_step, last_step, begun_at, {0: Counter(range(6)), 1: Counter(range(6))})


def test_each_sample_once_is_exact():
    found = judge(ledger(), expected())
    assert found.exact
    assert [epoch.num_samples for epoch in found.epochs] == [6, 6]


def test_an_epoch_that_is_not_finished_may_lack_samples():
    found = judge(ledger(5), expected(5))
    assert found.exact
    assert [epoch.finished for epoch in found.epochs] == [True, False]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda lines: lines[:4] + lines[6:], "steps that the ledger lacks: 3"),
        (lambda lines: lines[:-1], "microbatch missing, double"),
        (lambda lines: [*lines, lines[0]], "microbatch missing, double"),
        (lambda lines: [LedgerLine(1, 0, 0, 0, 0, [1]), *lines[1:]], "epoch 0 is not exact"),
        (lambda lines: [*lines[:-1], LedgerLine(6, 1, 1, 0, 1, [5])], "of two attempts"),
    ],
    ids=["step", "microbatch", "double", "repeated sample", "two attempts"],
)
def test_what_is_not_exact_is_said(change, word):
    found = judge(change(ledger()), expected())
    assert not found.exact
    assert word in str(found)


def test_steps_of_a_lost_attempt_must_not_count():
    lines = ledger(4) + ledger(6, attempt=1)[8:]
    assert judge(lines, expected(begun_at=(0, 4))).exact
    found = judge(lines, expected(begun_at=(0, 2)))
    assert found.num_lost_lines == 4
    assert "attempt was lost: 3, 4" in str(found)


def test_a_skipped_sample_is_named_and_no_fault():
    lines = [*ledger()[:-1], LedgerLine(6, 1, 1, 0, 0, [], [5])]
    found = judge(lines, expected())
    assert found.exact
    assert found.epochs[1].skipped == (5,)


def test_files_beyond_the_step_resumed_from_go(tmp_path):
    storage = open_storage(str(tmp_path))
    write_lines(storage, ledger()[:4])
    write_lines(storage, ledger()[4:])
    delete_after(storage, 3)
    assert [line.step for line in read_ledger(storage, 9)] == [1, 1, 2, 2]
    assert [line.step for line in read_ledger(storage, 1)] == [1, 1]


# Real runs


@pytest.mark.parametrize("storage_path", ["{tmp}", "memory://ledger"])
def test_a_stopped_and_resumed_run_is_exact_on_any_storage(tmp_path, storage_path):
    wanted = [f"storage_path={storage_path.format(tmp=tmp_path)}", LEDGER]
    train(config(tmp_path, *wanted), stop_at=7)
    result = train(config(tmp_path, *wanted))
    found = audit_run(result.run_dir)
    assert found.exact, str(found)
    assert (found.num_steps, found.num_attempts) == (15, 2)
    assert [epoch.num_samples for epoch in found.epochs] == [70, 70, 70]


def test_drop_last_and_an_order_of_ones_own_are_judged_by_what_they_say(tmp_path, monkeypatch):
    result = train(config(tmp_path, "data.drop_last=true", LEDGER))
    assert [epoch.num_samples for epoch in audit_run(result.run_dir).epochs] == [64, 64, 64]
    weights = [1.0] * 35 + [3.0] * 35
    order = f"data.order={{_target_: raytrainer.data.WeightedOrder, weights: {weights}}}"
    weighted = train(config(tmp_path, order, LEDGER, "name=weighted"))
    assert audit_run(weighted.run_dir).exact


def test_the_command_prints_the_verdict_and_fails_when_it_is_not_exact(tmp_path, capsys):
    result = train(config(tmp_path, LEDGER))
    assert main(["audit", result.run_dir]) == 0
    assert "exact: each sample exactly once" in capsys.readouterr().out
    path = next((tmp_path / "run/ledger").iterdir())
    text = path.read_text().splitlines()
    path.write_text("\n".join(text[:-1]))
    assert main(["audit", result.run_dir]) == 1
    assert "NOT EXACT" in capsys.readouterr().out


def test_without_a_ledger_nothing_is_written_and_the_audit_says_how_to_get_one(tmp_path):
    result = train(config(tmp_path))
    assert not (tmp_path / "run/ledger").exists()
    with pytest.raises(UsageError, match="logging\\.ledger: true"):
        audit_run(result.run_dir)


def test_a_moved_run_goes_on_with_another_number_of_workers(tmp_path):
    """Two ranks, stopped in mid-epoch, moved, three ranks; the samples are those of one undisturbed rank."""

    def stop(record):
        if record.get("step") == 7 and "loss" in record:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "here", 2, "checkpoint.every={steps: 2}", observer=stop)
    shutil.move(tmp_path / "here", tmp_path / "there")
    result = run(tmp_path / "there", 3)
    assert (result.status, result.steps, result.samples_seen) == ("finished", 15, 210)
    assert result.world_sizes == [2, 3]
    found = audit_run(result.run_dir)
    assert found.exact, str(found)
    train(config(tmp_path, LEDGER, "name=alone"))
    consumed = {(line.step, line.microbatch): line.indices for line in lines_of(result.run_dir)}
    assert consumed == {(x.step, x.microbatch): x.indices for x in lines_of(tmp_path / "alone")}


# From another run's checkpoint


def test_a_new_run_from_a_checkpoint_ends_like_the_old_one(tmp_path):
    whole = run(tmp_path, 1, "checkpoint={every: {steps: 4}, num_to_keep: null}")
    old = f"{whole.run_dir}/checkpoints/step_00000008"
    shutil.copytree(tmp_path / "run", tmp_path / "before")
    new = run(tmp_path, 1, "name=new", resume_from=old)
    assert (new.weights_sha256, new.state_sha256) == (whole.weights_sha256, whole.state_sha256)
    assert (new.steps, new.lost_steps) == (15, 0)
    events = [json.loads(line) for line in (tmp_path / "new/events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events[:2]] == [("branched", 8), ("resumed", 8)]
    found = audit_run(new.run_dir)
    assert found.exact, str(found)
    assert [epoch.number for epoch in found.epochs] == [0, 1, 2]
    # A checkpoint that lies alone brings no ledger.
    shutil.copytree(old, tmp_path / "alone")
    lone = run(tmp_path, 1, "name=lone", resume_from=str(tmp_path / "alone"))
    found = audit_run(lone.run_dir)
    assert found.exact, str(found)
    assert [epoch.number for epoch in found.epochs] == [2]


def test_a_line_that_a_full_disk_has_torn_is_no_traceback(tmp_path, capsys):
    run_dir = tmp_path / "run"
    train(config(tmp_path, LEDGER))
    (file, *_) = sorted(run_dir.glob("ledger/*"))
    whole = file.read_text()
    file.write_text(whole[: whole.rindex("\n", 0, -1) + 9])
    assert main(["audit", str(run_dir)]) == 1
    told = capsys.readouterr().out
    assert f"{file}:{len(whole.splitlines())} is damaged" in told
    assert "NOT EXACT" in told
    with pytest.raises(CheckpointError, match="is damaged: no line of a ledger"):
        lines_of(run_dir)


def test_a_checkpoint_of_something_else_is_refused_with_the_difference(tmp_path):
    old = train(config(tmp_path)).run_dir
    with pytest.raises(ResumeError, match=r"seed: 0 -> 3(.|\n)*init_from"):
        run(tmp_path, 1, "name=new", "seed=3", resume_from=old)
    with pytest.raises(UsageError, match="leave --resume-from out"):
        run(tmp_path, 1, resume_from=f"{old}/checkpoints/step_00000005")
    with pytest.raises(UsageError, match="no committed checkpoint"):
        run(tmp_path, 1, "name=new", resume_from=str(tmp_path / "nowhere"))
    assert not (tmp_path / "new").exists()


def test_a_damaged_checkpoint_is_no_beginning(tmp_path):
    result = train(config(tmp_path))
    model = tmp_path / "run" / result.checkpoint / "model.pt"
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"model\.pt is damaged"):
        run(tmp_path, 1, "name=new", resume_from=result.run_dir)
    assert not list((tmp_path / "new").glob("checkpoints/*"))


def test_the_same_command_again_goes_on_from_the_new_runs_own_checkpoints(tmp_path, capsys):
    old = train(config(tmp_path), stop_at=3).run_dir
    first = run(tmp_path, 1, "name=new", "training.max_steps=6", resume_from=old)
    assert first.steps == 6
    again = run(tmp_path, 1, "name=new", "training.max_steps=9", resume_from=old)
    assert again.steps == 9
    assert "has checkpoints of its own" in capsys.readouterr().out
