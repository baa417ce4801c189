"""`python -m tests.chaos --seed N --events 5 [--ray]`: a small training under a seeded schedule of faults.

Resizes, and SIGKILLs of a worker, of rank 0, of all workers and of the driver, each at a step of its own, on
this machine's processes; with --ray on a local Ray cluster of several nodes, where nodes also join, are
drained and are killed. Afterwards it prints the lost steps and the down time of each event, that time in
units of the session's first start of a worker group, the ledger's verdict, and whether the weights are those
of an undisturbed run. Exits with 1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from raytrainer import elastic
from raytrainer.audit import audit_run
from raytrainer.cluster import local, sizes
from raytrainer.cluster.run import run as run_config
from raytrainer.errors import ConfigError
from raytrainer.rundir import read_result
from raytrainer.table import as_table
from tests.test_resize import ranks_of_this_process
from tests.training import config

MAX_WORKERS = 4
STEPS = 40
KINDS = ("resize", "kill a worker", "kill rank 0", "kill all workers", "kill the driver")
KINDS_ON_RAY = (
    "a node joins",
    "a node is drained",
    "kill a node",
    "kill a worker",
    "kill rank 0",
    "kill the driver",
)
# Lost steps that each kind may cost; all that came after the last snapshot, where no rank survives.
SNAPSHOT_STEPS = 2
MAX_STARTS = 20
ALLOWED = {
    "resize": 0,
    "a node joins": 0,
    "a node is drained": 0,
    "kill a node": 1,
    "kill a worker": 1,
    "kill rank 0": 1,
}


@dataclass(frozen=True)
class Event:
    """kind: one of KINDS or KINDS_ON_RAY; step: after which finished step; size: the number of workers from
    then on."""

    kind: str
    step: int
    size: int

    def __str__(self) -> str:
        return f"resize to {self.size}" if self.kind == "resize" else self.kind


def schedule(seed: int, num_events: int, resize: bool = True) -> tuple[int, list[Event]]:
    """(the number of workers to start with, the events in the order of their steps)."""
    draw = random.Random(seed)
    first = size = draw.randint(2, MAX_WORKERS)
    kinds = KINDS if resize else KINDS[1:]
    events = []
    for step in sorted(draw.sample(range(3, STEPS - 2, 3), num_events)):
        kind = draw.choice(kinds)
        if kind == "resize":
            size = draw.choice([other for other in range(1, MAX_WORKERS + 1) if other != size])
        if kind == "kill a worker" and size == 1:
            kind = "kill rank 0"
        events.append(Event("kill all workers" if kind == "kill rank 0" and size == 1 else kind, step, size))
    return first, events


def schedule_on_ray(seed: int, num_events: int) -> tuple[int, list[Event]]:
    """As `schedule`, with a worker a node."""
    draw = random.Random(seed)
    first = size = draw.randint(2, MAX_WORKERS)
    events = []
    for step in sorted(draw.sample(range(3, STEPS - 2, 3), num_events)):
        kinds = set(KINDS_ON_RAY)
        if size == MAX_WORKERS:
            kinds.remove("a node joins")
        if size == 1:
            # Of one worker nothing is left; and where its node is gone, there is nowhere to go on.
            kinds -= {"a node is drained", "kill a node", "kill a worker", "kill rank 0"}
        kind = draw.choice(sorted(kinds))
        size += {"a node joins": 1, "a node is drained": -1, "kill a node": -1}.get(kind, 0)
        events.append(Event(kind, step, size))
    return first, events


def build(folder: Path, name: str, num_workers: object, *more: str):
    """The run's config: dropout, BatchNorm, AdamW, a schedule, clipping, random data in loader workers."""
    wanted = [
        f"name={name}",
        f"scaling.num_workers={num_workers}",
        "data.micro_batch_size=2",
        f"training={{max_epochs: null, max_steps: {STEPS}, gradient_clip_norm: 0.5}}",
        "optimizer={_target_: torch.optim.AdamW, lr: 0.01}",
        "scheduler={_target_: raytrainer.optim.warmup_cosine, warmup_steps: 4}",
        f"checkpoint={{every: {{steps: 100000}}, snapshot: {{steps: {SNAPSHOT_STEPS}}}}}",
        "failure.max_failures=-1",
        "logging.ledger=true",
        f"task={{_target_: tests.training.GatedTask, folder: {folder}}}",
        *more,
    ]
    try:
        return config(folder, *wanted, "training.determinism=bitwise")
    except ConfigError:
        return config(folder, *wanted)


# The driver's process ---------------------------------------------------------------------------------------


class Disturbance:
    """An observer that carries out the events that are due; what it has done survives it in a file.

    gate: of an event that asks for a resize, until `open_gate`, as soon as the ranks are asked to make way.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.events = [Event(**each) for each in json.loads((folder / "plan.json").read_text())]
        self.gate: Path | None = None
        self._log = folder / "done.jsonl"
        self._num_done = len(self._log.read_text().splitlines()) if self._log.exists() else 0

    def __call__(self, record: dict) -> None:
        due = self.events[self._num_done] if self._num_done < len(self.events) else None
        if due is None or "loss" not in record or record["step"] < due.step:
            return
        self._num_done += 1
        with open(self._log, "a") as log:
            log.write(json.dumps({"time_s": record["time_s"], "step": record["step"]}) + "\n")
        self.carry_out(due, self.folder / f"gate_{due.step}", record)

    def carry_out(self, due: Event, gate: Path, record: dict) -> None:
        raise NotImplementedError

    def open_gate(self) -> None:
        if self.gate is not None:
            gate, self.gate = self.gate, None
            gate.write_text("resize")


class LocalDisturbance(Disturbance):
    """On this machine's processes, which are children of this one."""

    def __init__(self, folder: Path, slots: sizes.Slots):
        super().__init__(folder)
        self.slots = slots

    def carry_out(self, due: Event, gate: Path, record: dict) -> None:
        if due.kind == "resize":
            self.gate = gate
            self.slots.set(due.size)
            return
        if due.kind == "kill the driver":
            gate.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        ranks = ranks_of_this_process()
        chosen = {"kill a worker": [max(ranks)], "kill rank 0": [0]}.get(due.kind, list(ranks))
        for rank in chosen:
            os.kill(ranks[rank], signal.SIGKILL)
        gate.unlink()


def drive(folder: Path) -> None:
    """Runs the training in this process, which may be one of those that are killed."""
    slots = sizes.Slots(int((folder / "size").read_text()))
    disturb = LocalDisturbance(folder, slots)
    apply_size = local._Group._apply_size

    def apply_and_open(group) -> None:
        apply_size(group)
        if group._resize_sent and disturb.gate is not None:
            (folder / "size").write_text(str(slots.available()))
            disturb.open_gate()

    local._Group._apply_size = apply_and_open
    # A restart of seconds never pays for a training of seconds.
    sizes.decide = lambda now: elastic.decide(replace(now, restart_s=0.0))
    elastic_size = f"{{min: 1, max: {MAX_WORKERS}}}"
    note_begin(folder)
    run_config(build(folder, "disturbed", elastic_size), local=True, observer=disturb, sizes=slots)


def note_begin(folder: Path) -> None:
    """Keeps when the first driver asked for its ranks: ways back are compared with that start."""
    if not (folder / "began").exists():
        (folder / "began").write_text(str(time.time()))


# The command ------------------------------------------------------------------------------------------------


def run_seed(folder: Path, seed: int, num_events: int, resize: bool = True) -> tuple[str, bool]:
    """(the table and the verdicts, whether all is as it should be) of one seed."""
    first, events = schedule(seed, num_events, resize)
    (folder / "plan.json").write_text(json.dumps([asdict(event) for event in events]))
    (folder / "size").write_text(str(first))
    for event in events:
        os.mkfifo(folder / f"gate_{event.step}")
    command = [sys.executable, "-m", "tests.chaos", "--drive", str(folder)]
    wrong = drive_to_the_end(folder, lambda: subprocess.run(command, check=False).returncode)
    if wrong:
        return f"seed {seed}: {wrong}", False
    alone = run_config(build(folder, "undisturbed", first), local=True)
    return judge(folder, seed, first, events, alone)


def drive_to_the_end(folder: Path, run_driver: Callable[[], int]) -> str | None:
    """Runs drivers, one after the other was killed, until the run has a result; else what went wrong."""
    num_starts = 0
    while read_result(str(folder / "disturbed")) is None:
        num_starts += 1
        returncode = run_driver()
        if returncode not in (0, -signal.SIGKILL) or num_starts > MAX_STARTS:
            return f"the run failed with {returncode}"
    return None


def judge(folder: Path, seed: int, first: int, events: list[Event], alone) -> tuple[str, bool]:
    run_dir = folder / "disturbed"
    result, audit = read_result(str(run_dir)), audit_run(str(run_dir))
    told = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    done = [json.loads(line) for line in (folder / "done.jsonl").read_text().splitlines()]
    resumed = [record for record in told if record["event"] == "resumed"]
    started = next(record for record in told if record["event"] == "started")
    fresh_s = started["time_s"] - float((folder / "began").read_text())
    rows, fine = [], len(resumed) == len(events) == len(done) and audit.exact
    for event, at, after in zip(events, done, resumed, strict=False):
        lost, allowed = after["lost_steps"], ALLOWED.get(event.kind, SNAPSHOT_STEPS + 2)
        fine = fine and lost <= allowed
        down_s = after["time_s"] - at["time_s"]
        down = [f"{down_s:.1f}", f"{down_s / fresh_s:.2f}"]
        rows.append([str(at["step"]), str(event), str(after["world_size"]), str(lost), *down])
    same = (result.weights_sha256, result.state_sha256) == (alone.weights_sha256, alone.state_sha256)
    must_be_same = len({first, *(event.size for event in events)}) == 1 or _is_bitwise(folder)
    loss, other = result.metrics["train/loss"], alone.metrics["train/loss"]
    close = abs(loss - other) <= 0.02 * max(1.0, abs(other))
    fine = fine and (same if must_be_same else close) and result.steps == STEPS
    remark = f" (the size changed, and not bitwise; loss {loss:.4f}, there {other:.4f})"
    lines = [
        f"seed {seed}: from {first} workers, {STEPS} steps; the first start took {fresh_s:.1f} s",
        as_table(["STEP", "EVENT", "WORKERS", "LOST STEPS", "DOWN S", "OF A START"], rows),
        f"ledger: {'exact' if audit.exact else audit}",
        f"weights and state equal to the undisturbed run's: {'yes' if same else 'no'}"
        + ("" if must_be_same else remark),
        "PASSED" if fine else "FAILED",
    ]
    return "\n".join(lines), fine


def _is_bitwise(folder: Path) -> bool:
    return "determinism: bitwise" in (folder / "disturbed/config.yaml").read_text()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="this many seeds from --seed on")
    parser.add_argument("--events", type=int, default=5)
    parser.add_argument("--no-resize", action="store_true", help="SIGKILLs alone")
    parser.add_argument("--ray", action="store_true", help="on a local Ray cluster of several nodes")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--drive", metavar="FOLDER", help=argparse.SUPPRESS)
    given = parser.parse_args()
    from tests import chaos_cluster

    if given.drive:
        folder = Path(given.drive)
        chaos_cluster.drive(folder, given.address) if given.address else drive(folder)
        return 0
    all_fine = True
    for seed in range(given.seed, given.seed + given.seeds):
        with tempfile.TemporaryDirectory(prefix="raytrainer-chaos-") as folder:
            if given.ray:
                text, fine = chaos_cluster.run_seed(Path(folder), seed, given.events)
            else:
                text, fine = run_seed(Path(folder), seed, given.events, not given.no_resize)
        print(text, flush=True)
        all_fine = all_fine and fine
    return 0 if all_fine else 1


if __name__ == "__main__":
    sys.exit(main())
