"""Peak resident memory a worker, against the hand-written loop and bare Ray Train.

    python -m tests.benchmarks.memory [--json OUT]

The peak is the kernel's own (VmHWM), last read before the process ended. Much of it is the libraries' code,
shared by all processes: the proportional size (PSS) is shown beside it.
"""

from __future__ import annotations

import argparse
from statistics import fmean

from tests.benchmarks.measure import Measured
from tests.benchmarks.startup import CONTENDERS, run_rounds
from tests.benchmarks.table import Report, parser
from tests.benchmarks.throughput import OURS, THEIRS
from tests.benchmarks.workload import Workload

GOAL = 1.1


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    report = Report("memory", options.json)
    workload = Workload(num_steps=options.steps, data=options.data)
    measured = run_rounds(options.contenders, workload, options.rounds)
    peaks = {name: _mean_mib(runs, "peak") for name, runs in measured.items()}
    rows = []
    for name, runs in measured.items():
        ratios = {
            f"times {other}": peaks[name] / peaks[other]
            for other in ("hand_written", "bare_ray")
            if other in peaks
        }
        rows.append(
            {
                "command": {**OURS, **THEIRS}[name],
                "peak a rank, MiB": peaks[name],
                "PSS a rank, MiB": _mean_mib(runs, "pss"),
                **ratios,
                f"at most {GOAL}": next(iter(ratios.values()), 0.0) <= GOAL,
            }
        )
    report.table(f"Means over ranks and {options.rounds} rounds, {options.steps} steps each", rows)
    report.close()


def _mean_mib(runs: list[Measured], key: str) -> float:
    """Of the ranks; their last readings."""
    return fmean(memory[key] / 1024 for run in runs for memory in run.memory.values() if key in memory)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, metavar="NAME")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--steps", type=int, default=200)
    made.add_argument("--data", choices=["mnist", "fashion"], default="mnist")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
