"""CPU time that metrics and logging add to a step, as a share of a step of 10 ms.

    python -m tests.benchmarks.logging_cost [--json OUT]

The real Trainer runs a step that waits 10 ms and computes almost nothing, with logging off, every 50 steps
and every step; the arms take turns, and what they use more than "off" is the cost, the logging thread
included. What "off" still does (StepTimer, the votes that carry the loss) is timed by itself and added.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from tests.benchmarks.table import Report, parser
from tests.benchmarks.throughput import environment_of
from tests.benchmarks.turns import Block, Coordinator, num_steps_of
from tests.benchmarks.workload import Workload

STEP_S = 0.010
GOAL_PCT = 1.0
TASK = "tests.benchmarks.contenders.logged.PacedTask"
NEVER = 10**9
SINKS = {"all sinks": ["console", "jsonl", "tensorboard"], "jsonl alone": ["jsonl"]}
ARMS = {
    "off": (NEVER, "jsonl alone"),
    "every 50 steps, all sinks": (50, "all sinks"),
    "every step, all sinks": (1, "all sinks"),
}


def interleave(num_rounds: int, block_steps: int, step_s: float) -> dict[str, list[Block]]:
    """Blocks of each arm by round."""
    warm_up_steps = 50 + block_steps
    num_steps = num_steps_of(num_rounds, block_steps, warm_up_steps)
    base = Workload(num_steps=num_steps, model="linear", global_batch_size=2, num_ranks=1)
    with (
        tempfile.TemporaryDirectory(prefix="raytrainer-bench-") as name,
        Coordinator(Path(name)) as coordinator,
    ):
        folder = Path(name)
        for number, (arm, (every_n_steps, sinks)) in enumerate(ARMS.items()):
            workload = replace(base, every_n_steps=every_n_steps)
            config = workload.config(f"arm_{number}", str(folder / "runs"), TASK)
            config["task"]["step_s"] = step_s
            config["logging"]["sinks"] = SINKS[sinks]
            path = folder / f"arm_{number}.json"
            path.write_text(json.dumps(config))
            command = [sys.executable, "-m", "tests.benchmarks.contenders.logged", str(path)]
            coordinator.start(arm, command, 1, environment_of(workload, folder))
        return coordinator.rounds(list(ARMS), num_rounds, block_steps, warm_up_steps)


def always_there_us(num_steps: int) -> float:
    """CPU microseconds a step of StepTimer and VoteReader, which work at every step whatever is logged."""
    import torch

    from raytrainer.timing import StepTimer
    from raytrainer.voting import VoteReader

    votes, reader, timer = torch.zeros(4), VoteReader(torch.device("cpu")), StepTimer()

    def with_them() -> None:
        batches = timer.timed(iter(range(num_steps)))
        for step in range(num_steps):
            next(batches)
            reader.push(step, votes)
            for read in reader.read():
                assert not read.stop
            timer.step(128)

    def without() -> None:
        batches = iter(range(num_steps))
        for _ in range(num_steps):
            next(batches)

    torch.set_num_threads(1)
    return median(_cpu_us(with_them, num_steps) - _cpu_us(without, num_steps) for _ in range(7))


def _cpu_us(work: Callable[[], None], num_steps: int) -> float:
    started = time.process_time()
    work()
    return 1e6 * (time.process_time() - started) / num_steps


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    report = Report("logging_cost", options.json)
    blocks = interleave(options.rounds, options.block_steps, options.step_s)
    fixed_us = always_there_us(num_steps=20 * options.block_steps)
    cpu_us = {arm: [1e6 * block.cpu_s / block.num_steps for block in blocks[arm]] for arm in ARMS}
    rows = []
    for arm in ARMS:
        added_us = fmean(a - b for a, b in zip(cpu_us[arm], cpu_us["off"], strict=True))
        total_us = fixed_us + added_us
        rows.append(
            {
                "logging": arm,
                "loop's CPU us a step": median(cpu_us[arm]),
                "more than off": added_us,
                "with StepTimer and votes": total_us,
                "% of 10 ms": total_us / (STEP_S * 1e4),
                f"at most {GOAL_PCT:.0f}": total_us / (STEP_S * 1e4) <= GOAL_PCT,
            }
        )
    report.table(f"{options.rounds} rounds of {options.block_steps} steps, one process", rows)
    report.note(f"StepTimer and the votes: {fixed_us:.1f} us a step")
    report.close()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=10)
    made.add_argument("--block-steps", type=int, default=200)
    made.add_argument("--step-s", type=float, default=STEP_S)
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
