"""`raytrainer pack`: eight trials, four of them with faults, again and again; and what packing costs in time
and CPU against starting the same processes by hand.

Run as `python -m tests.benchmarks.pack [--rounds N] [--pairs N] [--seconds S] [--ray]` from the repository.
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
from typing import Any

from raytrainer.table import as_table

ROOT = Path(__file__).parents[2]
ACT = ROOT / "tests" / "pack_scripts" / "act.py"
KINDS = ("train", "memory", "train", "kill", "exit3", "train", "hang", "train")
CAUSES = {
    "train": "finished",
    "memory": "memory_error",
    "kill": "signal",
    "exit3": "exit_code",
    "hang": "timeout",
}
SLEEP = "import sys, time; time.sleep(float(sys.argv[1]))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of eight trials")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of packed and by hand")
    parser.add_argument("--trials", type=int, default=3, help="trials of each pair")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each of these sleeps")
    parser.add_argument("--ray", action="store_true", help="on Ray, not --local")
    parser.add_argument("--json", help="also write the numbers here")
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores")
    where = [] if args.ray else ["--local"]
    numbers = {"faults": measure_faults(args.rounds, where)}
    numbers["overhead"] = measure_overhead(args.pairs, args.trials, args.seconds, where)
    if args.json:
        Path(args.json).write_text(json.dumps(numbers, indent=2))


def pack(folder: Path, *arguments: str) -> int:
    command = [sys.executable, "-m", "raytrainer", "pack", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False
    ).returncode


def weights(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("weights ")]


def measure_faults(rounds: int, where: list[str]) -> dict[str, Any]:
    """In how many rounds the exit code, the causes and the healthy trials' weights were right."""
    alone = {}
    for seed, kind in enumerate(KINDS if rounds else ()):
        if kind == "train":
            command = [sys.executable, str(ACT), "--kind", "train", "--seed", str(seed)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            alone[seed] = weights(done.stdout)
    right = {"non-zero exit": 0, "causes": 0, "weights as alone": 0}
    took_s = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="raytrainer-pack-") as name:
            folder = Path(name)
            trials = [{"kind": kind, "seed": seed} for seed, kind in enumerate(KINDS)]
            trials[KINDS.index("hang")]["_timeout_s"] = 5.0
            content = {"name": "faults", "command": [sys.executable, str(ACT)], "trials": trials}
            content |= {"per_gpu": 8, "threads": 1}
            (folder / "t.yaml").write_text(json.dumps(content))
            began_s = time.monotonic()
            right["non-zero exit"] += pack(folder, "t.yaml", *where) != 0
            took_s.append(time.monotonic() - began_s)
            places = [folder / "runs" / "faults" / f"trial_{number:03d}" for number in range(8)]
            causes = [json.loads((place / "status.json").read_text())["cause"] for place in places]
            right["causes"] += causes == [CAUSES[kind] for kind in KINDS]
            logs = {seed: weights((places[seed] / "stdout.log").read_text()) for seed in alone}
            right["weights as alone"] += all(alone.values()) and logs == alone
    if rounds:
        rows = [[what, f"{count} of {rounds}"] for what, count in right.items()]
        print(as_table(("EIGHT TRIALS, FOUR WITH FAULTS", "RIGHT"), rows))
        print(f"{sum(took_s) / rounds:.1f} s a round\n")
    return {"rounds": rounds, "right": right, "took_s": took_s}


def measure_overhead(pairs: int, num_trials: int, seconds: float, where: list[str]) -> list[dict[str, float]]:
    """Wall time and CPU-seconds of both, in turn; every other pair begins with the other side."""
    found = []
    for pair in range(pairs):
        sides = [("by hand", _by_hand), ("packed", lambda n, s: _packed(n, s, where))]
        took = {}
        for side, run in sides if pair % 2 == 0 else reversed(sides):
            before_s, cpu_s = time.monotonic(), _children_cpu_s()
            run(num_trials, seconds)
            took[side] = time.monotonic() - before_s
            took[f"{side} cpu"] = _children_cpu_s() - cpu_s
        found.append(took)
    if pairs:
        rows = [
            [
                str(number),
                *(f"{took[key]:.2f} s" for key in ("by hand", "packed", "by hand cpu", "packed cpu")),
                f"{100 * (took['packed'] / took['by hand'] - 1):+.2f}%",
            ]
            for number, took in enumerate(found, 1)
        ]
        print(as_table(("PAIR", "BY HAND", "PACKED", "CPU BY HAND", "CPU PACKED", "OVERHEAD"), rows))
    return found


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _by_hand(num_trials: int, seconds: float) -> None:
    started = [subprocess.Popen([sys.executable, "-c", SLEEP, str(seconds)]) for _ in range(num_trials)]
    for process in started:
        if process.wait() != 0:
            raise SystemExit("a trial by hand failed")


def _packed(num_trials: int, seconds: float, where: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="raytrainer-pack-") as name:
        command = [sys.executable, "-c", SLEEP, str(seconds)]
        if pack(Path(name), "-n", str(num_trials), *where, "--", *command) != 0:
            raise SystemExit("a packed trial failed")


if __name__ == "__main__":
    main()
