"""Trials of a small MLP as one vmapped model against a process for each, by CPU-seconds; and equal results.

    python -m tests.benchmarks.fused [--trials 32] [--epochs 5] [--double] [--json OUT]

The digits of the subset of MNIST that comes with raytrainer. Both are the same `raytrainer pack --local` but
for `mode`; CPU-seconds are those of all processes that the command starts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.table import Report, parser

ROOT = Path(__file__).resolve().parents[2]
GOAL = 2.0


def build_mlp(width: int, double: bool):
    from torch import nn

    class Double(nn.Module):
        def forward(self, images):
            return images.double()

    layers = [nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(Double(), *layers).double() if double else nn.Sequential(*layers)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    report = Report("fused", options.json)
    rows, weights = [], {}
    with tempfile.TemporaryDirectory(prefix="raytrainer-bench-") as folder:
        _write(Path(folder), options)
        for mode in ("fused", "processes"):
            cpu_s, wall_s = _run(folder, mode)
            weights[mode] = _weights(Path(folder, "runs", mode))
            rows.append({"mode": mode, "trials": len(weights[mode]), "CPU-s": cpu_s, "wall s": wall_s})
    ratio = rows[1]["CPU-s"] / rows[0]["CPU-s"]
    report.table(f"{options.trials} trials of an MLP of width {options.width}", rows)
    largest = max(
        float((weights["fused"][trial][name] - value).abs().max())
        for trial, own in weights["processes"].items()
        for name, value in own.items()
    )
    report.table(
        "Fused against processes",
        [{"CPU ratio": ratio, f"at least {GOAL}": ratio >= GOAL, "largest difference of weights": largest}],
    )
    report.close()


def _write(folder: Path, options: argparse.Namespace) -> None:
    data = {"_target_": "raytrainer.data.MnistSubset"}
    config = {
        "name": "base",
        "data": {
            "train": {**data, "split": "train"},
            "eval": {**data, "split": "eval"},
            "global_batch_size": 128,
        },
        "model": {
            "_target_": "tests.benchmarks.fused.build_mlp",
            "width": options.width,
            "double": options.double,
        },
        "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
        "training": {"max_epochs": options.epochs},
        "logging": {"sinks": ["jsonl"]},
    }
    folder.joinpath("base.json").write_text(json.dumps(config))
    rates = {"logspace": [1e-4, 1e-2, options.trials // 2]}
    for mode in ("fused", "processes"):
        content = {"name": mode, "config": "base.json", "mode": mode, "metric": "eval/loss"}
        grid = {"optimizer.lr": rates, "seed": [0, 1]}
        folder.joinpath(f"{mode}.yaml").write_text(json.dumps({**content, "grid": grid, "threads": 1}))


def _run(folder: str, mode: str) -> tuple[float, float]:
    """(CPU-seconds, seconds) of the command and all that it started."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "raytrainer", "pack", f"{mode}.yaml", "--local"]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, time.perf_counter() - began_s


def _weights(search: Path) -> dict:
    from raytrainer.checkpoint import read_weights

    return {path.parent.name: read_weights(str(path)) for path in sorted(search.glob("trial_*/run"))}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--trials", type=int, default=32)
    made.add_argument("--epochs", type=int, default=5)
    made.add_argument("--width", type=int, default=64)
    made.add_argument("--double", action="store_true", help="in float64, which shows that results are equal")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
