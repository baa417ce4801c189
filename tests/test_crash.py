"""What a crash costs: the survivors save the last finished step, whatever the checkpoint interval."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raytrainer
from raytrainer.audit import audit_run
from raytrainer.checkpoint import CheckpointWriter, Snapshot, save
from raytrainer.cluster.survivor import choose_survivor
from raytrainer.errors import ConfigError
from raytrainer.manifest import list_checkpoints
from raytrainer.rundir import RunDirectory
from raytrainer.snapshots import MAX_SHARE, SnapshotPace, recover, snapshot_folder
from raytrainer.storage import open_storage
from tests.training import config, killed_once

HARD = [
    "optimizer={_target_: torch.optim.AdamW, lr: 0.01}",
    "scheduler={_target_: raytrainer.optim.warmup_cosine, warmup_steps: 4}",
    "training.gradient_clip_norm=0.5",
    "training.ema.decay=0.9",
    "checkpoint.every={steps: 1000}",
    "logging.ledger=true",
]


def events(run_dir, name):
    lines = Path(run_dir, "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def weights_of(result):
    return torch.load(f"{result.run_dir}/{result.checkpoint}/model.pt", weights_only=True)


def run(tmp_path, num_workers, name, *overrides, observer=None, **sections):
    wanted = [f"scaling.num_workers={num_workers}", f"name={name}", *overrides]
    return raytrainer.run(config(tmp_path, *wanted, **sections), local=True, observer=observer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three ranks, never disturbed."""
    return run(tmp_path_factory.mktemp("whole"), 3, "whole", *HARD)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_lost_rank_costs_at_most_one_step_at_any_checkpoint_interval(tmp_path, whole, rank):
    """Killed rank 0 too: the others know BatchNorm's statistics, which only its microbatch changes."""
    result = run(tmp_path, 3, "killed", *HARD, **killed_once(tmp_path, 9, rank))
    assert (result.status, result.restarts, result.steps) == ("finished", 1, 15)
    assert result.lost_steps <= 1
    (resumed,) = events(result.run_dir, "resumed")
    assert resumed["step"] >= 8
    (failed,) = events(result.run_dir, "worker_failed")
    assert failed["step"] == resumed["step"]
    assert (result.weights_sha256, result.state_sha256) == (whole.weights_sha256, whole.state_sha256)
    found = audit_run(result.run_dir)
    assert found.exact, str(found)
    assert found.num_attempts == 2


def test_a_closed_writer_still_commits_what_a_survivor_holds(tmp_path):
    """The training thread closes its writer when it fails, and only then is rank 0 asked to save."""
    told = []
    with RunDirectory.open(config(tmp_path)) as run_dir:
        writer = CheckpointWriter(run_dir, num_to_keep=3, monitor=None, mode="min", on_commit=told.append)
        writer.submit(Snapshot(3, 0, {}, {}))
        writer.close()
        writer.close_with(Snapshot(4, 0, {}, {}))
        assert [info.step for info in list_checkpoints(run_dir.storage)] == [3, 4]
    assert [info.step for info in told] == [3, 4]


@given(st.dictionaries(st.integers(0, 7), st.none() | st.integers(0, 9)), st.none() | st.integers(0, 9))
def test_the_lowest_rank_with_the_highest_step_saves(offers, committed):
    chosen = choose_survivor(offers, committed)
    steps = [step for step in offers.values() if step is not None]
    if not steps or max(steps) <= (committed or 0):
        assert chosen is None
    else:
        assert offers[chosen] == max(steps)
        assert all(rank >= chosen for rank, step in offers.items() if step == max(steps))


SNAPSHOT = "checkpoint={every: {steps: 1000}, snapshot: {steps: 2}}"


def test_where_no_rank_survives_the_last_snapshot_does(tmp_path):
    wanted = [*HARD[:4], "logging.ledger=true", SNAPSHOT]
    undisturbed = run(tmp_path, 1, "whole", *wanted)
    result = run(tmp_path, 1, "killed", *wanted, **killed_once(tmp_path, 9, 0, with_snapshots=True))
    assert (result.status, result.restarts, result.steps) == ("finished", 1, 15)
    assert result.lost_steps == 0
    assert events(result.run_dir, "resumed")[0]["step"] == 8
    assert events(result.run_dir, "snapshots")
    assert (result.weights_sha256, result.state_sha256) == (
        undisturbed.weights_sha256,
        undisturbed.state_sha256,
    )
    found = audit_run(result.run_dir)
    assert found.exact, str(found)
    assert not Path(snapshot_folder(result.run_dir)).exists()


def test_a_deleted_runs_snapshot_is_not_taken_for_the_next_ones(tmp_path):
    """The folder in memory outlives `rm -rf` of the run directory, whose name it goes by."""
    run_dir = tmp_path / "run"
    folder = snapshot_folder(str(run_dir))
    try:
        with RunDirectory.open(config(tmp_path)) as before:
            Path(folder).mkdir()
            old_id = before.run_id
            (Path(folder) / "run_id").write_text(old_id)
            save(before, Snapshot(9, 1, {}, {}), open_storage(folder))
            assert recover(folder, before) == 9
        shutil.rmtree(run_dir)
        with RunDirectory.open(config(tmp_path)) as after:
            assert after.run_id != old_id
            assert recover(folder, after) is None
            assert list_checkpoints(after.storage) == []
        assert run(tmp_path, 1, "run").lost_steps == 0
        assert not Path(folder).exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=20))
def test_snapshots_take_a_bounded_share_of_the_time(costs_s):
    """Steps of no length, snapshots whenever one is due."""
    now_s, pace = 0.0, SnapshotPace(None, 0.0)
    spent_s = 0.0
    for cost_s in costs_s:
        while not pace.is_due(1, now_s):
            now_s += 0.01 + pace._due_s - now_s
        now_s += cost_s
        spent_s += cost_s
        pace.paid(cost_s, now_s)
    assert spent_s / (now_s + costs_s[-1] / MAX_SHARE) <= MAX_SHARE


@pytest.mark.parametrize("value", ["0", "{steps: 0}", "always", "{epochs: 1}", "{steps: 2, epochs: 1}"])
def test_a_snapshot_interval_that_is_none_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match=r"checkpoint\.snapshot(.|\n)*auto, off or"):
        config(tmp_path, f"checkpoint.snapshot={value}")
    assert config(tmp_path, "checkpoint.snapshot=off").checkpoint.snapshot == "off"
