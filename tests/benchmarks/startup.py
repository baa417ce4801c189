"""Time and CPU-seconds from the command to the first optimizer step, and to the exit of its last process.

    python -m tests.benchmarks.startup [--json OUT]

The commands take turns, in another order each round; one round before these fills the caches. CPU time is
that of every process that the command started, daemons and those that have ended included (see measure.py).
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from statistics import median

from tests.benchmarks.measure import Measured, measure
from tests.benchmarks.stats import ratio_of
from tests.benchmarks.table import Report, parser
from tests.benchmarks.throughput import OURS, THEIRS, command_of, environment_of
from tests.benchmarks.workload import Workload

# (ours, theirs, at most this many times their time to the first step)
GOALS = [("raytrainer_ray", "bare_ray", 0.6), ("raytrainer", "hand_written", 1.0)]
CONTENDERS = ["raytrainer_ray", "raytrainer", "hand_written", "bare_ray"]
TASK = "tests.benchmarks.contenders.ours.MarkingTask"


def run_once(name: str, workload: Workload, folder: Path) -> Measured:
    """One run of a contender, in an empty folder."""
    folder.mkdir(parents=True)
    environment = environment_of(workload, folder)
    environment.pop("BENCH_FOLDER")  # no weights are compared, so none are saved
    return measure(command_of(name, workload, folder, task=TASK), folder, environment)


def run_rounds(names: list[str], workload: Workload, num_rounds: int) -> dict[str, list[Measured]]:
    """Every contender once a round, in random order; by round, without the one that warms up."""
    measured: dict[str, list[Measured]] = {name: [] for name in names}
    order = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="raytrainer-bench-") as folder:
        for round_number in range(num_rounds + 1):
            for name in order.sample(names, len(names)):
                result = run_once(name, workload, Path(folder, f"{round_number}-{name}"))
                if round_number > 0:
                    measured[name].append(result)
    return measured


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    report = Report("startup", options.json)
    workload = Workload(num_steps=options.steps)
    measured = run_rounds(options.contenders, workload, options.rounds)
    names = {**OURS, **THEIRS}
    rows = [{"command": names[name], **_row(runs)} for name, runs in measured.items()]
    report.table(f"Medians of {options.rounds} rounds, {options.steps} steps each", rows)
    rows = []
    for ours, theirs, goal in GOALS:
        if ours in measured and theirs in measured:
            first = ratio_of(_first(measured[ours]), _first(measured[theirs]))
            gone = ratio_of([m.gone_s for m in measured[ours]], [m.gone_s for m in measured[theirs]])
            cpu = ratio_of([m.cpu_s for m in measured[ours]], [m.cpu_s for m in measured[theirs]])
            rows.append(
                {
                    "ours": names[ours],
                    "against": names[theirs],
                    "first step": first.mean,
                    "its 90% interval": f"{first.low:.2f}-{first.high:.2f}",
                    "goal": f"at most {goal}",
                    "reached": first.mean <= goal,
                    "last exit": gone.mean,
                    "CPU": cpu.mean,
                }
            )
    report.table("Ratios, ours to theirs, by round", rows)
    for name, runs in measured.items():
        left = sorted({process for run in runs for process in run.left_behind})
        if left:
            report.note(f"{names[name]} left processes behind, which were killed: {', '.join(left)}")
    report.close()


def _first(runs: list[Measured]) -> list[float]:
    return [run.first_s("first_step") for run in runs]


def _row(runs: list[Measured]) -> dict[str, float]:
    return {
        "first step, s": median(_first(runs)),
        "exit, s": median(run.exit_s for run in runs),
        "last exit, s": median(run.gone_s for run in runs),
        "CPU-s to first step": median(run.cpu_s_at(run.first_s("first_step")) for run in runs),
        "CPU-s in all": median(run.cpu_s for run in runs),
    }


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, metavar="NAME")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--steps", type=int, default=20)
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
