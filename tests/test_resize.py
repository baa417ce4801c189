"""The number of workers changes during a run: no step is lost, and no sample."""

import os
import signal
from pathlib import Path

import pytest
import torch

from raytrainer.audit import audit_run
from raytrainer.cluster import local, sizes
from raytrainer.cluster.run import run as run_config
from raytrainer.cluster.signals import RESIZE, StopSignal
from raytrainer.cluster.sizes import Bounds, Resizing, Slots
from tests.test_crash import HARD, events, run, weights_of
from tests.training import config


def ranks_of_this_process():
    """{rank: process id} of the group that runs now."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        ranks = [word for word in words if word.startswith(b"--rank=")]
        if parent == os.getpid() and ranks:
            found[int(ranks[0].removeprefix(b"--rank="))] = pid
    return found


class KillAt:
    """An observer that kills ranks once, when `step` is logged."""

    def __init__(self, step, *ranks):
        self.step, self.ranks, self.done = step, ranks, False

    def __call__(self, record):
        if record.get("step") == self.step and "loss" in record and not self.done:
            self.done = True
            pids = ranks_of_this_process()
            for rank in self.ranks:
                os.kill(pids[rank], signal.SIGKILL)


class At:
    """An observer that does something once for each of some steps, when it is logged."""

    def __init__(self, **actions):
        self.actions = {int(name.removeprefix("step_")): action for name, action in actions.items()}

    def __call__(self, record):
        if "loss" in record and record.get("step") in self.actions:
            self.actions.pop(record["step"])(record)


@pytest.fixture
def opened(monkeypatch):
    """Gates to open as soon as a resize was asked for; restarts cost nothing to the policy."""
    gates = []
    apply_size = local._Group._apply_size

    def apply_and_open(group):
        apply_size(group)
        if group._resize_sent and gates:
            gates.pop().write_text("open")

    monkeypatch.setattr(local._Group, "_apply_size", apply_and_open)
    monkeypatch.setattr(sizes, "DEFAULT_RESTART_S", 0.0)
    return gates


def elastic(tmp_path, name, slots, observer, *overrides):
    task = f"task={{_target_: tests.training.GatedTask, folder: {tmp_path}}}"
    wanted = [task, "scaling.num_workers={min: 1, max: 3}", f"name={name}", *HARD, *overrides]
    return run_config(config(tmp_path, *wanted), local=True, observer=observer, sizes=slots)


def assert_close(result, other):
    mine, theirs = weights_of(result), weights_of(other)
    for name, value in theirs.items():
        # BatchNorm takes the bias out again: its gradient is noise, which AdamW scales up.
        if name in ("first.bias", "norm.running_mean"):
            continue
        torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-4)


def test_growing_and_shrinking_lose_no_step_and_no_sample(tmp_path, opened):
    """1, then 3, then 2 ranks in the middle of epochs."""
    slots = Slots(1)

    def room_for(count):
        def act(record):
            slots.set(count)
            opened.append(tmp_path / f"gate_{record['step'] + 1}")

        return act

    for step in (4, 10):
        os.mkfifo(tmp_path / f"gate_{step}")
    observer = At(step_3=room_for(5), step_9=room_for(2))
    result = elastic(tmp_path, "elastic", slots, observer)
    assert (result.status, result.steps, result.samples_seen) == ("finished", 15, 210)
    assert (result.world_sizes, result.lost_steps, result.restarts) == ([1, 3, 2], 0, 0)
    grown, shrunk = events(result.run_dir, "resized")
    assert (grown["from"], grown["to"], grown["lost_steps"]) == (1, 3, 0)
    assert (shrunk["from"], shrunk["to"], shrunk["why"]) == (3, 2, "room for 2 is left")
    assert not events(result.run_dir, "stopped")
    found = audit_run(result.run_dir)
    assert found.exact, str(found)
    assert_close(result, run(tmp_path, 1, "alone", *HARD))


def test_a_lost_slot_is_left_without_trying_the_old_size(tmp_path):
    slots = Slots(3)
    kill, gate = KillAt(7, 1), tmp_path / "gate_8"
    os.mkfifo(gate)

    def lose(record):
        if record.get("step") == 7 and "loss" in record:
            with open(gate, "w") as opening:  # once rank 0 is there, which needs rank 1 until then
                slots.set(2)
                kill(record)
                opening.write("open")

    result = elastic(tmp_path, "lost", slots, lose)
    assert (result.status, result.world_sizes) == ("finished", [3, 2])
    assert result.lost_steps <= 1
    (resized,) = events(result.run_dir, "resized")
    assert (resized["from"], resized["to"]) == (3, 2)
    found = audit_run(result.run_dir)
    assert found.exact, str(found)


def test_a_signal_overrides_a_resize():
    stop = StopSignal()
    stop.request(RESIZE)
    assert stop.exit_code == 0
    stop.request("SIGTERM")
    stop.request(RESIZE)
    assert (stop.requested, stop.exit_code) == ("SIGTERM", 143)


def test_the_event_tells_sizes_steps_and_why():
    resizing = Resizing(Bounds(1, 4, 8))
    resizing.started(2)
    assert resizing.observe({"event": "started", "step": 0}) is None
    resizing.ended("room for 4")
    resizing.started(4)
    event = resizing.observe({"event": "resumed", "step": 7, "lost_steps": 0})
    assert event.pop("seconds") >= 0
    assert event == {
        "event": "resized",
        "from": 2,
        "to": 4,
        "step": 7,
        "lost_steps": 0,
        "why": "room for 4",
    }
    resizing.ended("worker 1 was lost")
    resizing.started(4)
    assert resizing.observe({"event": "resumed", "step": 9, "lost_steps": 1}) is None
