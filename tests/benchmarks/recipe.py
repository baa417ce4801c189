"""Samples/s of raytrainer against PyTorch's usual MNIST recipe, one process each: same digits, batch, model.

    python -m tests.benchmarks.recipe [--json OUT]

The recipe is a torchvision data set with per-sample transforms and one loader worker. How much it loses
depends on how long the step is, so several models are shown, and the two loaders alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.stats import ratio_of
from tests.benchmarks.table import Report, parser
from tests.benchmarks.throughput import command_of, environment_of, samples_per_s, warm_up_steps
from tests.benchmarks.turns import Block, Coordinator, num_steps_of
from tests.benchmarks.workload import Workload

GOAL = 5.0
MODELS = ["small_cnn", "mlp", "linear"]


def compare(
    workload: Workload, ours: str, num_rounds: int, block_steps: int
) -> tuple[list[Block], list[Block]]:
    """Blocks of ours and of the recipe, by round."""
    with (
        tempfile.TemporaryDirectory(prefix="raytrainer-bench-") as name,
        Coordinator(Path(name)) as coordinator,
    ):
        folder = Path(name)
        commands = {
            ours: command_of(ours, workload, folder),
            "recipe": [sys.executable, "-m", "tests.benchmarks.contenders.mnist_recipe"],
        }
        for contender, command in commands.items():
            coordinator.start(contender, command, 1, environment_of(workload, folder))
        warm_up = warm_up_steps(block_steps, workload.every_n_steps)
        blocks = coordinator.rounds(list(commands), num_rounds, block_steps, warm_up)
    return blocks[ours], blocks["recipe"]


def loaders_alone(workload: Workload, num_passes: int) -> tuple[list[float], list[float]]:
    """Samples/s of each loader with nobody computing, by pass: ours in this process, the recipe's worker."""
    from tests.benchmarks.contenders.mnist_recipe import build_loader

    ours, recipe = workload.build_loader(rank=0), build_loader(workload)
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_passes):
        rates[0].append(_rate(iter(ours), workload))
        rates[1].append(_rate(iter(recipe), workload))
    return rates


def _rate(batches: Iterator[Any], workload: Workload) -> float:
    next(batches)  # the worker's start is not part of it
    started = time.perf_counter()
    count = sum(1 for _ in batches)
    return count * workload.global_batch_size / (time.perf_counter() - started)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    report = Report("recipe", options.json)
    rows = []
    for model in options.models:
        workload = Workload(
            num_steps=num_steps_of(
                options.rounds, options.block_steps, warm_up_steps(options.block_steps, 50)
            ),
            model=model,
            global_batch_size=options.batch,
            num_ranks=1,
        )
        ours, theirs = compare(workload, options.ours, options.rounds, options.block_steps)
        rates = [[samples_per_s(block, workload) for block in blocks] for blocks in (ours, theirs)]
        rows.append(_row(model, *rates))
    workload = Workload(num_steps=1, global_batch_size=options.batch, num_ranks=1)
    rows.append(_row("(loaders alone)", *loaders_alone(workload, max(2, options.rounds // 4))))
    report.table(f"Samples/s, one process each, batch {options.batch}", rows)
    report.close()


def _row(model: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    ratio = ratio_of(ours, theirs)
    return {
        "model": model,
        "raytrainer": median(ours),
        "recipe": median(theirs),
        "ratio": ratio.mean,
        "95% lower bound": ratio.low,
        f"at least {GOAL:.0f}": ratio.low >= GOAL,
    }


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    made.add_argument("--ours", choices=["raytrainer", "trainer"], default="raytrainer")
    made.add_argument("--rounds", type=int, default=20)
    made.add_argument("--block-steps", type=int, default=60)
    made.add_argument("--batch", type=int, default=64)
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
