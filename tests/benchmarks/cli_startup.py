"""Time and CPU time of `raytrainer --help` and `raytrainer validate`, and whether they import torch or ray.

python -m tests.benchmarks.cli_startup [--json OUT]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from tests.benchmarks.table import Report, parser

ROOT = Path(__file__).resolve().parents[2]
GOAL_S = 1.0
COMMANDS = {
    "--help": ["--help"],
    "validate configs/mnist.yaml": ["validate", str(ROOT / "configs" / "mnist.yaml")],
    "schema": ["schema"],
}
# Runs the command as `python -m raytrainer` does, then says what it loaded.
_AND_LOADED = (
    "import sys; from raytrainer.__main__ import main; code = main(sys.argv[1:]); "
    "print([name for name in ('torch', 'ray') if name in sys.modules], file=sys.stderr); sys.exit(code)"
)


def timed(arguments: list[str]) -> tuple[float, float]:
    """Seconds and CPU-seconds of one `python -m raytrainer ...`."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    _run([sys.executable, "-m", "raytrainer", *arguments])
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def heavy_imports(arguments: list[str]) -> str:
    return _run([sys.executable, "-c", _AND_LOADED, *arguments]).stderr.decode().strip().splitlines()[-1]


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    report = Report("cli_startup", options.json)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds + 1):
        for name, command in COMMANDS.items():
            times[name].append(timed(command))
    rows = []
    for name, command in COMMANDS.items():
        wall_s, cpu_s = (median(values) for values in zip(*times[name][1:], strict=True))
        rows.append(
            {
                "command": f"raytrainer {name}",
                "s": wall_s,
                "CPU-s": cpu_s,
                f"under {GOAL_S:.0f} s": wall_s < GOAL_S,
                "loads of torch, ray": heavy_imports(command),
            }
        )
    report.table(f"Medians of {options.rounds} rounds", rows)
    report.close()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=5)
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
