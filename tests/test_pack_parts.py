"""What `raytrainer pack` decides, as pure functions: the trials, the plan, the shares, the causes."""

import io
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrainer.cluster.pack_process import BoundedLog, Records
from raytrainer.config.pack import load_pack_file, pack_file
from raytrainer.errors import ConfigError, UsageError
from raytrainer.pack import status as files
from raytrainer.pack import table
from raytrainer.pack.cause import TrialEnd, cause_of, is_retried
from raytrainer.pack.machines import MachineFacts, PackSettings, nodes_of, share_on
from raytrainer.pack.plan import Card, Node, Placement, Request, candidates, plan
from raytrainer.pack.share import Share, shm_notice, trial_environment, usable_cores
from raytrainer.pack.status import TrialStatus
from raytrainer.pack.trials import command_trials, expand, trials_of

SEARCH = Path(__file__).parent.parent / "examples" / "pack" / "mnist_search.yaml"
COMMAND = {"name": "s", "command": ["python3", "x.py"]}


def trials_file(**keys):
    return pack_file({**COMMAND, **keys})


# Trials


def test_a_grid_is_every_combination_and_ranges_are_ranges():
    grid = {"lr": [1e-3, 3e-4], "width": {"range": [8, 24, 8]}, "p": {"linspace": [0.0, 0.5, 2]}}
    values = expand(trials_file(grid=grid))
    assert len(values) == 2 * 3 * 2
    assert {each["width"] for each in values} == {8, 16, 24}
    assert {each["p"] for each in values} == {0.0, 0.5}
    logs = expand(trials_file(grid={"lr": {"logspace": [1e-4, 1e-1, 4]}}))
    assert [each["lr"] for each in logs] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])


@given(st.integers(0, 2**32), st.integers(1, 20))
def test_samples_are_within_their_bounds_and_a_longer_search_begins_with_the_shorter(seed, count):
    samples = {
        "lr": {"log_uniform": [1e-5, 1e-1]},
        "p": {"uniform": [0.1, 0.2]},
        "n": {"integer": [1, 3]},
        "act": {"choice": ["relu", "gelu"]},
    }
    drawn = expand(trials_file(samples=samples, num_samples=count, seed=seed))
    longer = expand(trials_file(samples=samples, num_samples=count + 3, seed=seed))
    assert longer[:count] == drawn
    for each in drawn:
        assert 1e-5 <= each["lr"] <= 1e-1 * (1 + 1e-9)
        assert 0.1 <= each["p"] <= 0.2
        assert each["n"] in (1, 2, 3)
        assert each["act"] in ("relu", "gelu")


def test_log_uniform_is_uniform_in_the_logarithm():
    file = trials_file(samples={"lr": {"log_uniform": [1e-4, 1.0]}}, num_samples=1000)
    below = sum(each["lr"] < 1e-2 for each in expand(file))
    assert 430 < below < 570


def test_a_huge_grid_is_refused_before_it_is_made():
    grid = {"a": list(range(100)), "b": list(range(100)), "c": list(range(10))}
    with pytest.raises(ConfigError, match=r"100,000 trials, and max_trials is 1,000(.|\n)*num_samples: 50"):
        expand(trials_file(grid=grid))
    assert len(expand(trials_file(grid={"a": list(range(1500))}, max_trials=1500))) == 1500


def test_arguments_of_a_command():
    values = {"lr": 0.1, "-v": True, "amp": False, "name": "a b", "sizes": [1, 2], "none": None}
    file = trials_file(trials=[values], process_args=True)
    [trial] = trials_of(file)
    arguments = ["--lr", "0.1", "-v", "--name", "a b", "--sizes", "1", "2"]
    assert list(trial.command) == [
        "python3",
        "x.py",
        *arguments,
        "--process_index",
        "0",
        "--process_num",
        "1",
    ]


def test_a_config_with_a_grid(tmp_path):
    trials = trials_of(load_pack_file(SEARCH))
    assert len(trials) == 6
    text = trials[5].config_yaml
    assert "num_workers: 1" in text
    assert f"lr: {trials[5].values['optimizer.lr']}" in text
    assert "storage_path: '{trial_dir}'" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grid: {optimizer.lrr: [1]}", ["s.yaml:3", "optimizer.lrr", "did you mean optimizer.lr?"]),
        ("grid: {learning_rate: [1]}", ["s.yaml:3", "did you mean optimizer.lr?"]),
        ("grid: {training.max_epochs: [0]}", ["s.yaml:3", "training.max_epochs = 0", "at least 1"]),
        ("grid: {storage_path: [a, b]}", ["s.yaml:3", "must not write to one"]),
        ("grid: {optimizer.lr: []}", ["s.yaml:3", "empty list"]),
        ("grid: {optimizer.lr: 1e-3}", ["s.yaml:3", "must be a list"]),
        ("samples: {optimizer.lr: {log_uniform: [0, 1]}}\nnum_samples: 2", ["above 0"]),
        ("samples: {optimizer.lr: {uniform: [0, 1]}}", ["needs num_samples"]),
        ("grids: {optimizer.lr: [1]}", ["s.yaml:3", "there is no such key", "grid"]),
        ("seed: 1", ["has no trials"]),
        ("command: [ls]\ngrid: {a: [1]}", ["one of config and command"]),
        ("grid: {optimizer.lr: [1]}\nper_gpu: 0.5", ["s.yaml:4", "whole number of trials"]),
        ("grid: {optimizer.lr: [1]}\ngpu_share: 1.5", ["s.yaml:4", "at most 1"]),
        ("grid: {optimizer.lr: [1]}\ngpu_share: 0.5\nper_gpu: 3", ["3 trials of 0.5 are 1.5 cards"]),
        ("grid: {optimizer.lr: [1]}\nname: a/b", ["no slash"]),
    ],
)
def test_mistakes_in_a_file_name_their_line(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    name = "" if "name:" in text else "name: s"
    Path("s.yaml").write_text(f"{name}\nconfig: {SEARCH.parent / 'mnist_small.yaml'}\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        trials_of(load_pack_file("s.yaml"))
    for part in said:
        assert part in str(caught.value)


def test_a_command_that_is_not_there_and_two_trials_in_one_directory():
    with pytest.raises(UsageError, match="there is no such command"):
        command_trials(["no-such-program"], [{}])
    with pytest.raises(UsageError, match=r"(?s)--out-dir x.*trial_000 and trial_001.*one directory"):
        command_trials(["python3", "a.py", "--out-dir", "x"], [{}, {}])
    with pytest.raises(UsageError, match="one directory"):
        command_trials(["python3", "a.py"], [{"save_dir": "x"}, {"save_dir": "./x"}])
    [first, second] = command_trials(["python3", "a.py", "--out", "{trial_dir}/x_{trial}"], [{}, {}])
    assert first.argv("/d")[-1] == "/d/x_0"
    assert second.argv("/e")[-1] == "/e/x_1"
    assert len(command_trials(["python3", "a.py", "--out=x"], [{}, {}], process_args=True)) == 2


# The plan


@st.composite
def clusters(draw):
    nodes = []
    for number in range(draw(st.integers(1, 3))):
        name, num_gpus = f"n{number}", draw(st.integers(0, 3))
        slots, memory = draw(st.integers(1, 4)), draw(st.sampled_from([4.0, 8.0, 10.0]))
        names = [f"cuda:{gpu}" for gpu in range(num_gpus)] or ["cpu"]
        cards = tuple(Card(name, card, "0", slots, memory) for card in names)
        nodes.append(Node(name, draw(st.integers(1, 16)), 16.0, cards, has_gpu=num_gpus > 0))
    return nodes


requests = st.builds(
    Request,
    st.just(0),
    st.sampled_from([None, None, 0.5, 2.0, 3.5]),
    st.sampled_from([None, None, 1, 2]),
    st.booleans(),
    st.just(None),
)


def check_limits(nodes, running):
    for node in nodes:
        here = [placed for placed in running if placed.node == node.name]
        assert sum(placed.threads for placed in here) <= max(node.cores, node.num_slots)
        for card in node.cards:
            on = [placed for placed in here if placed.card == card.name]
            assert len(on) <= card.slots
            assert len({placed.slot for placed in on}) == len(on)
            assert all(0 <= placed.slot < card.slots for placed in on)
            assert sum(placed.memory_gib for placed in on) <= card.memory_gib + 1e-5
            assert len(on) == 1 or not any(placed.alone for placed in on)


@settings(deadline=None)
@given(clusters(), st.lists(requests, max_size=25), st.sampled_from(["packed", "spread"]), st.data())
def test_no_card_is_overfilled_and_nobody_starves(nodes, asked, strategy, data):
    """Whatever ends when: each trial that could run at all does, and at most in the turn that is its."""
    waiting = [
        Request(number, each.memory_gib, each.threads, each.alone) for number, each in enumerate(asked)
    ]
    waiting = [each for each in waiting if candidates(nodes, each)]
    running, left = [], list(waiting)
    for _ in range(4 * len(waiting) + 4):
        started = plan(nodes, left, running, strategy)
        running += started
        check_limits(nodes, running)
        done = {placed.trial for placed in started}
        left = [each for each in left if each.trial not in done]
        if not left:
            break
        assert running, "room for everything, and nothing starts"
        running.pop(data.draw(st.integers(0, len(running) - 1)))
    assert not left


def test_the_first_in_the_queue_is_not_overtaken_for_ever():
    """A trial that wants a card alone gets it, although small ones keep coming."""
    node = Node("", 4, 16.0, (Card("", "cpu", "", 2, 8.0),))
    running = plan([node], [Request(0), Request(1)])
    big = Request(2, alone=True)
    for number in range(3, 10):
        started = plan([node], [big, Request(number)], running)
        running = running[1:] + started
        if started:
            assert [placed.trial for placed in started] == [2]
            break
    else:
        pytest.fail("the big one never started")


def test_packed_and_spread_and_cpu_trials_off_gpu_nodes():
    gpus = tuple(Card("a", f"cuda:{n}", str(n), 2, 8.0) for n in range(2))
    nodes = [Node("a", 8, 32.0, gpus, has_gpu=True), Node("b", 8, 32.0, (Card("b", "cpu", "", 2, 8.0),))]
    asked = [Request(0), Request(1)]
    assert [placed.card for placed in plan(nodes, asked)] == ["cuda:0", "cuda:0"]
    assert {placed.card for placed in plan(nodes, asked, strategy="spread")} == {"cuda:0", "cuda:1"}
    cpu = [Request(number, needs_gpu=False) for number in range(3)]
    assert [placed.node for placed in plan(nodes, cpu, avoid_gpu_nodes=True)] == ["b", "b"]


# Shares

GPU_MACHINE = MachineFacts(16, 100.0, 32.0, (("0", 80.0), ("1", 80.0)), "2.14.1")


def test_shares_of_a_gpu_machine():
    settings = PackSettings(per_gpu=4)
    nodes = nodes_of({"": GPU_MACHINE}, settings, 8)
    placements = plan(nodes, [Request(number) for number in range(9)])
    assert len(placements) == 8
    share = share_on(placements[0], nodes, {"": GPU_MACHINE})
    # 80 GiB less 4 contexts and the reserve, a quarter each, as a fraction of the whole card.
    assert placements[0].memory_gib == pytest.approx((80 - 4 * 0.5 - 0.5) / 4)
    assert share.cuda_fraction * 4 < 1
    assert share.rss_cap_gib == pytest.approx(90 / 8)
    assert placements[0].threads == 2
    environment = trial_environment(
        {"RANK": "3", "HOME": "/h", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        placements[5], share, {"X": "1"}, "/d",
    )  # fmt: skip
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["X"] == "1"
    assert "RANK" not in environment
    assert environment["PYTORCH_CUDA_ALLOC_CONF"].startswith(
        "expandable_segments:True,per_process_memory_fraction:0.24"
    )


def test_a_trial_without_a_gpu_sees_none_and_an_old_torch_gets_no_fraction():
    nodes = nodes_of({"": GPU_MACHINE}, PackSettings(gpus=0, per_gpu=4), 4)
    [placed] = plan(nodes, [Request(0, needs_gpu=False)])
    assert placed.device == ""
    share = share_on(placed, nodes, {"": GPU_MACHINE})
    assert share.cuda_fraction is None
    assert (
        trial_environment({"CUDA_VISIBLE_DEVICES": "0"}, placed, share, {}, "")["CUDA_VISIBLE_DEVICES"] == ""
    )
    old = MachineFacts(16, 100.0, None, (("0", 80.0),), "2.9.0")
    nodes = nodes_of({"": old}, PackSettings(per_gpu=2), 4)
    assert share_on(plan(nodes, [Request(0)])[0], nodes, {"": old}).cuda_fraction is None


def test_caps_that_sum_over_a_card_are_refused():
    with pytest.raises(UsageError, match=r"3 trials of 30 GiB are more than cuda:0 has"):
        nodes_of({"": GPU_MACHINE}, PackSettings(per_gpu=3, memory_gib=30.0), 4)
    with pytest.raises(UsageError, match="are more than"):
        nodes_of({"": GPU_MACHINE}, PackSettings(memory_gib=90.0), 4)


def test_small_shares():
    assert usable_cores("150000 100000") == 1
    assert usable_cores("max 100000") == len(os.sched_getaffinity(0))
    assert shm_notice(0.0625, 4, 2, None) is not None
    assert "0.06 GiB free" in shm_notice(0.0625, 1, 1, 0.2)
    assert shm_notice(8.0, 4, 2, None) is None
    assert shm_notice(None, 4, 2, None) is None


# Causes

TRACEBACK = "Traceback (most recent call last):\n  File 'x', line 1\n    boom()\n"


@pytest.mark.parametrize(
    ("end", "kind", "words", "code"),
    [
        (TrialEnd(0), "finished", "finished", 0),
        (TrialEnd(1, TRACEBACK + "ValueError: bad\n"), "exception", "ValueError: bad", 1),
        (TrialEnd(1, TRACEBACK + "my.pkg.Odd\n"), "exception", "my.pkg.Odd", 1),
        (TrialEnd(1, TRACEBACK + "MemoryError\n"), "memory_error", "MemoryError", 1),
        (
            TrialEnd(1, TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"),
            "cuda_oom", "Tried to allocate", 1,
        ),
        (TrialEnd(3, "step 1\ngiving up\n"), "exit_code", "exited with code 3: giving up", 3),
        (TrialEnd(3, TRACEBACK + "ValueError: caught\nsorry\n"), "exit_code", "code 3", 3),
        (TrialEnd(2, "error: runs/x is in use\n"), "exception", "runs/x is in use", 2),
        (TrialEnd(-9, oom_kills=0), "signal", "kill -9", 137),
        (TrialEnd(-9, oom_kills=1, peak_gib=3), "host_oom", "3.00 GiB", 137),
        (TrialEnd(-11), "signal", "SIGSEGV: a fault in native code", 139),
        (TrialEnd(-9, killed_for="timeout", timeout_s=5), "timeout", "within 5 s", 124),
        (TrialEnd(-9, killed_for="memory_cap", peak_gib=2, cap_gib=1), "memory_cap", "cap of 1.00", 137),
        (TrialEnd(130, killed_for="stopped"), "stopped", "stopped", 130),
        (TrialEnd(0, killed_for="stopped"), "finished", "finished", 0),
        (TrialEnd(-9, lost="node n1 is gone"), "lost_node", "node n1", 137),
        (TrialEnd(127, error="x: no such file"), "not_started", "x: no such file", 127),
    ],
)  # fmt: skip
def test_causes(end, kind, words, code):
    cause = cause_of(end)
    assert (cause.kind, cause.exit_code) == (kind, code)
    assert words in cause.message


def test_only_memory_and_lost_nodes_are_retried():
    oom, lost = cause_of(TrialEnd(1, "MemoryError")), cause_of(TrialEnd(-9, lost="x"))
    assert is_retried(oom, 0, 1, was_alone=False)
    assert not is_retried(oom, 1, 1, was_alone=False)
    assert not is_retried(oom, 0, 3, was_alone=True)
    assert is_retried(lost, 0, 1, was_alone=True)
    own = TrialEnd(1, TRACEBACK + "ValueError: x")
    for end in (own, TrialEnd(3), TrialEnd(-9), TrialEnd(-9, killed_for="timeout", timeout_s=1)):
        assert not is_retried(cause_of(end), 0, 3, was_alone=False)


# What is kept


def test_a_metric_keeps_its_own_step():
    status = TrialStatus(0).observed({"step": 10, "eval/accuracy": 0.5, "epoch": 1}, "eval/accuracy")
    status = status.observed({"step": 15, "loss": 0.2, "note": "x", "flag": True}, "eval/accuracy")
    assert status.metrics == {"eval/accuracy": 0.5, "loss": 0.2}
    assert status.metric_steps == {"eval/accuracy": 10, "loss": 15}
    assert (status.step, status.curve) == (15, ((10.0, 0.5),))
    assert TrialStatus.from_json(status.to_json()) == status


def test_results_are_sorted_and_nan_is_last():
    def ended(trial, state="finished", code=0, **metrics):
        return TrialStatus(trial, state, {"lr": 10.0**-trial}, metrics=metrics, exit_code=code)

    statuses = [ended(0, loss=0.5), ended(1, loss=math.nan), ended(2, loss=0.1), ended(3, "failed", 3)]
    metric = files.choose_metric(statuses, None)
    assert metric == "loss"
    assert [each.trial for each in files.ranked(statuses, metric, None)] == [2, 0, 1, 3]
    assert [each.trial for each in files.ranked(statuses, metric, "max")] == [0, 2, 1, 3]
    assert files.best_of(statuses, metric, None).trial == 2
    assert files.best_of(statuses[1:2], metric, None) is None
    assert files.worst_exit_code(statuses) == 3
    assert files.as_csv(statuses).splitlines()[0].endswith("lr,loss,message")


def test_the_picture(tmp_path):
    statuses = [
        TrialStatus(n, "finished", {"lr": 10.0**-n}, curve=((1, 0.5), (2, 0.4)), metrics={"loss": 0.4})
        for n in range(4)
    ]
    assert files.draw_results(tmp_path / "r.png", statuses, "loss", None)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert not files.draw_results(tmp_path / "s.png", [TrialStatus(0)], "loss", None)


def test_a_log_keeps_its_head_and_tail_within_the_bound(tmp_path):
    log = BoundedLog(tmp_path / "log", 10_000)
    for number in range(100_000):
        log.write(f"line {number}\n".encode())
    log.close()
    text = (tmp_path / "log").read_text()
    assert len(text) < 11_000
    assert text.startswith("line 0\n")
    assert text.endswith("line 99999\n")
    assert "bytes left out here" in text


def test_records_come_from_lines_of_json_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = Records(path)
    assert records.printed(b'hello\n{"step": 1, "loss"') == []
    assert records.printed(b": 0.5}\n{bad}\n[1]\n") == [{"step": 1, "loss": 0.5}]
    assert records.written() == []
    path.write_text('{"step": 1}\n{"step": 2')
    assert records.written() == [{"step": 1}]
    with open(path, "a") as file:
        file.write("}\n")
    assert records.written() == [{"step": 2}]
    assert Records(path).written() == []


def test_the_table_on_a_terminal_and_lines_elsewhere():
    statuses = [TrialStatus(n, "finished", metrics={"loss": 0.1}, peak_memory_gib=1.5) for n in range(40)]
    statuses[3] = TrialStatus(3, "running", place={"node": "", "card": "cuda:1", "slot": 2}, step=7)
    statuses[9] = TrialStatus(9, "failed", cause="timeout")
    kept = table.shown(statuses)
    assert len(kept) == table.MAX_ROWS
    assert {3, 9} <= {each.trial for each in kept}
    assert table.row(statuses[3], "loss", 61.0) == [
        "trial_003", "cuda:1 slot 2", "running", "7", "-", "-", "1:01",
    ]  # fmt: skip
    assert table.row(statuses[9], "loss", 0.0)[2] == "failed: timeout"
    assert table.counts(statuses) == "1 running, 38 finished, 1 failed"
    for interactive in (True, False):
        stream = io.StringIO()
        screen = table.Screen(stream, interactive)
        screen.say("trial_003 starts")
        screen.draw([table.row(each, "loss", 0.0) for each in kept], table.counts(statuses))
        screen.close()
        assert "trial_003 starts" in stream.getvalue()
        assert ("failed: timeout" in stream.getvalue()) == interactive


def test_a_long_curve_is_thinned():
    status = TrialStatus(0)
    for step in range(3 * files.MAX_POINTS):
        status = status.observed({"step": step, "loss": 1.0 / (step + 1)}, "loss")
    assert len(status.curve) < files.MAX_POINTS
    assert status.curve[0] == (0.0, 1.0)
    assert status.curve[-1][0] == 3 * files.MAX_POINTS - 1


def test_settings_for_a_resume_hold_no_values_of_the_environment():
    kept = PackSettings(env={"TOKEN": "secret"}, per_gpu=2).to_mapping()
    assert "secret" not in json.dumps(kept)
    again = PackSettings.from_mapping(json.loads(json.dumps(kept)), {"TOKEN": "secret"})
    assert again.env == {"TOKEN": "secret"}
    assert again.per_gpu == 2


def test_a_share_has_no_fraction_on_a_cpu():
    assert Share(1, 2.0).cuda_fraction is None
    assert Placement(0, "", "cpu", "", 0, 1.0, 1).key == ("", "cpu")
