"""Useful steps under a kill every M seconds, against what the recovery time alone would leave.

    python -m tests.benchmarks.goodput [--every-s 30] [--kills 4] [--ranks 2] [--json OUT]

A training of timed steps on this machine's processes, of which one, at random, gets SIGKILL every M seconds.
Goodput is the time that the steps which count took, as a share of all time; the recovery time R runs from a
kill to the end of the first step after it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import raytrainer
from raytrainer.task import Task
from tests.benchmarks.table import Report, parser
from tests.test_resize import ranks_of_this_process
from tests.training import config

GOAL = 0.97


class TimedTask(Task):
    """A step lasts `step_s` at least, most of it asleep, so that two cores serve any number of ranks."""

    def __init__(self, step_s: float):
        self.step_s = step_s

    def training_step(self, batch: Any) -> Any:
        time.sleep(self.step_s)
        return super().training_step(batch)


class Killer:
    """An observer: kills a rank every `every_s` seconds, `num_kills` times, and in the end stops the run.

    steps: (step, when it was done); recoveries_s: from each kill to the first step of the ranks started after
    it; usual_s: of the steps that nothing disturbed.
    """

    def __init__(self, every_s: float, num_kills: int, seed: int):
        self._every_s, self._left, self._draw = every_s, num_kills, random.Random(seed)
        self._next_s: float | None = None
        self._killed_s: float | None = None
        self._resumed = False
        self.steps: list[tuple[int, float]] = []
        self.recoveries_s: list[float] = []
        self.usual_s: list[float] = []

    def __call__(self, record: dict) -> None:
        self._resumed |= record.get("event") == "resumed"
        if "loss" not in record:
            return
        now_s = time.time()
        self._note(record["step"], now_s)
        if self._next_s is None:
            self._next_s = now_s + self._every_s
        elif now_s >= self._next_s and self._killed_s is None:
            self._next_s += self._every_s
            self._act(now_s)

    def _note(self, step: int, now_s: float) -> None:
        if self._killed_s is None and self.steps:
            self.usual_s.append(now_s - self.steps[-1][1])
        elif self._resumed and self._killed_s is not None:
            self.recoveries_s.append(now_s - self._killed_s)
            self._killed_s = None
        self.steps.append((step, now_s))

    def _act(self, now_s: float) -> None:
        if self._left == 0:
            self._next_s = float("inf")
            signal.raise_signal(signal.SIGTERM)
            return
        self._left -= 1
        self._killed_s, self._resumed = now_s, False
        os.kill(self._draw.choice(list(ranks_of_this_process().values())), signal.SIGKILL)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    report = Report("goodput", options.json)
    killer = Killer(options.every_s, options.kills, options.seed)
    with tempfile.TemporaryDirectory(prefix="raytrainer-bench-") as folder:
        result = raytrainer.run(_config(folder, options), local=True, observer=killer)
    (first, first_s), (last, last_s) = killer.steps[0], killer.steps[-1]
    recovery_s = fmean(killer.recoveries_s)
    goodput = (last - first) * fmean(killer.usual_s) / (last_s - first_s)
    at_least = GOAL * (1 - recovery_s / options.every_s)
    report.table(
        f"{options.ranks} ranks, a kill every {options.every_s:g} s",
        [
            {
                "kills": len(killer.recoveries_s),
                "steps": last - first,
                "lost steps": result.lost_steps,
                "recovery, s": recovery_s,
                "goodput": goodput,
                "at least": at_least,
                "reached": goodput >= at_least,
            }
        ],
    )
    report.keep("recoveries_s", killer.recoveries_s)
    report.close()


def _config(folder: str, options: argparse.Namespace) -> Any:
    return config(
        Path(folder),
        f"scaling.num_workers={options.ranks}",
        "training={max_epochs: null, max_steps: 1000000}",
        "checkpoint.every={steps: 1000000}",
        "failure.max_failures=-1",
        f"task={{_target_: tests.benchmarks.goodput.TimedTask, step_s: {options.step_s}}}",
    )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--every-s", type=float, default=30.0)
    made.add_argument("--kills", type=int, default=4)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--step-s", type=float, default=0.1)
    made.add_argument("--seed", type=int, default=0)
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
