"""Samples/s and CPU-seconds a step of raytrainer's loop against other loops that train the same.

    python -m tests.benchmarks.throughput [--json OUT]

All contenders are started once and take turns in random order (see turns.py); each round gives one ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median

from tests.benchmarks.result import difference
from tests.benchmarks.stats import ratio_of
from tests.benchmarks.table import Report, parser
from tests.benchmarks.turns import Block, Coordinator, num_steps_of, torchrun
from tests.benchmarks.workload import Workload

_CONTENDERS = "tests.benchmarks.contenders"
TASK = f"{_CONTENDERS}.ours.TurnsTask"
OURS = {
    "raytrainer": "raytrainer run --local",
    "elastic": "the same, num_workers: {min, max}",
    "raytrainer_ray": "raytrainer run (Ray)",
    "trainer": "Trainer under torchrun",
}
THEIRS = {
    "hand_written": "hand-written DDP, torchrun",
    "plain_loader": "the same, torch's DataLoader",
    "bare_ray": "bare Ray TorchTrainer",
    "lightning": "Lightning, torchrun",
    "accelerate": "Accelerate, torchrun",
}
# Whoever else is compared with each of the above, besides THEIRS.
FIXED = {"elastic": "raytrainer"}
GOAL = 0.98


def command_of(name: str, workload: Workload, folder: Path, task: str = TASK) -> list[str]:
    """The command of a contender; for our own, its config, with the `task`, is written to `folder`."""
    ranks = workload.num_ranks
    if name in OURS:
        config = folder / f"{name}.json"  # JSON is YAML
        mapping = workload.config(name, str(folder / "runs"), task, elastic=name == "elastic")
        config.write_text(json.dumps(mapping, indent=1))
        if name == "trainer":
            return torchrun(f"{_CONTENDERS}.ours", ranks, str(config))
        local = [] if name == "raytrainer_ray" else ["--local"]
        return [sys.executable, "-m", "raytrainer", "run", *local, str(config)]
    if name == "bare_ray":
        return [sys.executable, "-m", f"{_CONTENDERS}.bare_ray"]
    if name in ("lightning", "accelerate"):
        return torchrun(f"{_CONTENDERS}.with_{name}", ranks)
    return torchrun(f"{_CONTENDERS}.hand_written", ranks, *(["plain"] if name == "plain_loader" else []))


def installed(names: list[str]) -> list[str]:
    """Without those whose package is missing, and says so."""
    for name in ("lightning", "accelerate"):
        if name in names and find_spec(name) is None:
            print(f"{name}: left out, it is not installed (pip install '.[bench]')")
            names = [other for other in names if other != name]
    return names


def environment_of(workload: Workload, folder: Path) -> dict[str, str]:
    """What all contenders get: one thread a rank, no progress bars, the workload."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "BENCH_FOLDER": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "RAY_ADDRESS": "local",  # else a script joins whatever cluster it finds on this machine
        **workload.to_environment(),
    }


def interleave(
    names: list[str], workload: Workload, folder: Path, num_rounds: int, block_steps: int
) -> dict[str, list[Block]]:
    """Runs all contenders to their end; their blocks by round."""
    with Coordinator(folder) as coordinator:
        for name in names:
            command = command_of(name, workload, folder)
            coordinator.start(name, command, workload.num_ranks, environment_of(workload, folder))
        return coordinator.rounds(
            names, num_rounds, block_steps, warm_up_steps(block_steps, workload.every_n_steps)
        )


def warm_up_steps(block_steps: int, every_n_steps: int) -> int:
    """Past the first logged step, which imports what writes it."""
    return every_n_steps + block_steps


def compared(names: list[str]) -> list[tuple[str, str]]:
    """Which is compared with which."""
    return [(a, b) for a in names if a in OURS for b in names if b in THEIRS or b == FIXED.get(a)]


def samples_per_s(block: Block, workload: Workload) -> float:
    return block.num_steps * workload.global_batch_size / block.wall_s


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    workload = Workload(
        num_steps=num_steps_of(
            options.rounds, options.block_steps, warm_up_steps(options.block_steps, options.every_n_steps)
        ),
        data=options.data,
        model=options.model,
        width=options.width,
        augment=options.augment,
        global_batch_size=options.batch,
        num_ranks=options.ranks,
        loader_workers=options.loader_workers,
        every_n_steps=options.every_n_steps,
        snapshot=options.snapshot,
    )
    report = Report("throughput", options.json)
    names = installed(options.contenders)
    with tempfile.TemporaryDirectory(prefix="raytrainer-bench-") as folder:
        blocks = interleave(names, workload, Path(folder), options.rounds, options.block_steps)
        same = {(a, b): difference(Path(folder), a, b) for a, b in compared(names) if b != "plain_loader"}
    report.note(f"{workload}")
    report.note(f"{options.rounds} rounds of blocks of {options.block_steps} steps, in random order")
    _show(report, blocks, workload, same)
    report.keep("workload", workload.to_environment())
    report.keep("wall_s", {name: [block.wall_s for block in blocks[name]] for name in names})
    report.keep("cpu_s", {name: [block.cpu_s for block in blocks[name]] for name in names})
    report.close()


def _show(report: Report, blocks: dict[str, list[Block]], workload: Workload, same: dict) -> None:
    names = {**OURS, **THEIRS}
    rows = []
    for name, done in blocks.items():
        steps = done[0].num_steps
        rows.append(
            {
                "contender": names[name],
                "samples/s": median(samples_per_s(block, workload) for block in done),
                "ms a step": 1e3 * median(block.wall_s / steps for block in done),
                "CPU ms a step, all ranks": 1e3 * fmean(block.cpu_s / steps for block in done),
                "page faults a step": fmean(block.page_faults / steps for block in done),
            }
        )
    report.table("Speed (medians over the rounds; CPU: mean)", rows)
    rows = []
    for ours, theirs in compared(list(blocks)):
        rate = ratio_of(
            [samples_per_s(block, workload) for block in blocks[ours]],
            [samples_per_s(block, workload) for block in blocks[theirs]],
        )
        cpu = ratio_of([b.cpu_s for b in blocks[ours]], [b.cpu_s for b in blocks[theirs]])
        rows.append(
            {
                "ours": names[ours],
                "against": names[theirs],
                "samples/s ratio": rate.mean,
                "median": rate.median,
                "95% lower bound": rate.low,
                f"at least {GOAL}": rate.low >= GOAL,
                "CPU ratio": cpu.mean,
                "its 90% interval": f"{cpu.low:.3f}-{cpu.high:.3f}",
                "no more CPU": cpu.mean <= 1.0,
                "weights": _in_words(same.get((ours, theirs))),
            }
        )
    report.table("Ours against theirs, by round", rows)


def _in_words(weights: object) -> str:
    if weights is None:
        return "another order"
    return "equal to the bit" if weights.equal else f"differ by {weights.largest:.1g} at most"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    everyone = [*OURS, *THEIRS]
    made.add_argument("--contenders", nargs="+", choices=everyone, default=everyone, metavar="NAME")
    made.add_argument("--rounds", type=int, default=40)
    made.add_argument("--block-steps", type=int, default=60)
    made.add_argument("--data", choices=["mnist", "fashion"], default="mnist")
    made.add_argument("--model", choices=["small_cnn", "mlp", "linear"], default="small_cnn")
    made.add_argument("--width", type=int, default=16, help="of small_cnn")
    made.add_argument("--augment", action="store_true", help="shift each image at random")
    made.add_argument("--batch", type=int, default=128, help="samples a step, over all ranks")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--loader-workers", type=int, default=0, help="a rank")
    made.add_argument("--snapshot", choices=["off", "auto"], default="off", help="raytrainer's")
    made.add_argument("--every-n-steps", type=int, default=50, help="how often the loss is logged")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
