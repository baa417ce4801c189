"""Step time of `determinism: bitwise` against `order`, a microbatch of 64 samples a rank, gloo.

    python -m tests.benchmarks.bitwise_step [--json OUT]

Both are raytrainer's own loop under torchrun; they take turns in random order (see turns.py), one thread a
rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean, median

from tests.benchmarks.stats import ratio_of
from tests.benchmarks.table import Report, parser
from tests.benchmarks.throughput import TASK, environment_of
from tests.benchmarks.turns import Block, Coordinator, num_steps_of, torchrun
from tests.benchmarks.workload import Workload

GOAL = 1.15
MODES = ["order", "bitwise"]
MICROBATCH = 64
_WARM_UP_STEPS = 5


def interleave(workload: Workload, num_rounds: int, block_steps: int) -> dict[str, list[Block]]:
    """Both modes' blocks by round."""
    with tempfile.TemporaryDirectory(prefix="raytrainer-bench-") as name:
        folder = Path(name)
        with Coordinator(folder) as coordinator:
            for mode in MODES:
                config = workload.config(mode, str(folder / "runs"), TASK)
                config["training"]["determinism"] = mode
                path = folder / f"{mode}.json"  # JSON is YAML
                path.write_text(json.dumps(config, indent=1))
                command = torchrun("tests.benchmarks.contenders.ours", workload.num_ranks, str(path))
                coordinator.start(mode, command, workload.num_ranks, environment_of(workload, folder))
            return coordinator.rounds(MODES, num_rounds, block_steps, _WARM_UP_STEPS)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    report = Report("bitwise_step", options.json)
    report.note(f"{options.rounds} rounds of blocks of a second or so, in random order")
    rows = []
    for model in options.models:
        for num_ranks in options.ranks:
            block_steps = options.block_steps or (2 if model == "resnet18" else 40)
            workload = Workload(
                num_steps=num_steps_of(options.rounds, block_steps, _WARM_UP_STEPS),
                model=model,
                global_batch_size=MICROBATCH * num_ranks,
                num_ranks=num_ranks,
            )
            blocks = interleave(workload, options.rounds, block_steps)
            rows.append(_row(model, num_ranks, blocks))
            report.keep(f"{model}, {num_ranks} ranks", {m: [b.wall_s for b in blocks[m]] for m in MODES})
    report.table("Step time of bitwise against order", rows)
    report.close()


def _row(model: str, num_ranks: int, blocks: dict[str, list[Block]]) -> dict[str, object]:
    wall = ratio_of(*([block.wall_s for block in blocks[mode]] for mode in reversed(MODES)))
    cpu = ratio_of(*([block.cpu_s for block in blocks[mode]] for mode in reversed(MODES)))
    steps = blocks[MODES[0]][0].num_steps
    return {
        "model": model,
        "ranks": num_ranks,
        **{f"{m}, ms a step": 1e3 * median(b.wall_s / steps for b in blocks[m]) for m in MODES},
        "ratio": wall.mean,
        "median": wall.median,
        "95% upper bound": wall.high,
        f"at most {GOAL}": wall.high <= GOAL,
        **{f"{m}, CPU ms a step, all ranks": 1e3 * fmean(b.cpu_s / steps for b in blocks[m]) for m in MODES},
        "CPU ratio": cpu.mean,
    }


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    models = ["small_cnn", "resnet18"]
    made.add_argument("--models", nargs="+", choices=models, default=models)
    made.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    made.add_argument("--rounds", type=int, default=30)
    made.add_argument("--block-steps", type=int, help="default: as many as take a second or so")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
