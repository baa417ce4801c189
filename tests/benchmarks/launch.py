"""A script under torchrun and under raytrainer launch: exit codes, time to the first line, steps a second.

Run as `python -m tests.benchmarks.launch [--ray] [--repeats N]` from the repository. Both sides are run in
turn, `repeats` times, and medians are compared; each side's result is the same, which is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "launch_scripts"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LOOP = """
import json, os, time
started = time.time()
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(64, 64)
def step():
    optimizer.zero_grad()
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    return loss
for _ in range(20):
    step()
begun = time.perf_counter()
for _ in range(STEPS):
    loss = step()
took = time.perf_counter() - begun
if dist.get_rank() == 0:
    print(json.dumps({"started": started, "steps_per_s": STEPS / took, "loss": loss.item()}), flush=True)
del model, step, loss
dist.destroy_process_group()
"""
KINDS = {
    "arguments, paths, environment": ["show.py", "{folder}", "--epochs", "3"],
    "reads a file of its folder": ["exec_relative.py"],
    "DDP over env://, snapshot, @record": ["ddp.py"],
    "exits with 3 on rank 1": ["act.py", "{folder}", "1=exit_3"],
    "killed by SIGKILL on rank 1": ["act.py", "{folder}", "1=killed"],
    "raises on rank 1": ["act.py", "{folder}", "1=raise"],
    "starts processes of its own": ["spawn.py", "{folder}"],
    "calls ray.init itself": ["ray_inside.py"],
}


def run(command: list[str], folder: Path) -> tuple[int, str, float]:
    """Exit code, standard output, Unix time of the start."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    begun = time.time()
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, begun


def compare_kinds(launch: list[str]) -> None:
    print(f"{'script':38}{'torchrun':>10}{'raytrainer':>12}")
    for kind, arguments in KINDS.items():
        codes = []
        for launcher in (TORCHRUN, launch):
            with tempfile.TemporaryDirectory() as folder:
                for name in ("exec_relative.py", "part.py"):
                    (Path(folder) / name).write_text((SCRIPTS / name).read_text())
                script, *rest = [each.format(folder=folder) for each in arguments]
                script = script if script == "exec_relative.py" else str(SCRIPTS / script)
                codes.append(run([*launcher, script, *rest], Path(folder))[0])
        print(f"{kind:38}{codes[0]:>10}{codes[1]:>12}", flush=True)


def compare_speed(launch: list[str], repeats: int, num_steps: int) -> None:
    starts: dict[str, list[float]] = {"torchrun": [], "raytrainer": []}
    speeds: dict[str, list[float]] = {"torchrun": [], "raytrainer": []}
    losses = set()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "loop.py"
        script.write_text(LOOP.replace("STEPS", str(num_steps)))
        for _ in range(repeats):
            for name, launcher in (("torchrun", TORCHRUN), ("raytrainer", launch)):
                code, out, begun = run([*launcher, str(script)], Path(folder))
                assert code == 0, out
                seen = json.loads(out.strip().splitlines()[-1])
                starts[name].append(seen["started"] - begun)
                speeds[name].append(seen["steps_per_s"])
                losses.add(seen["loss"])
    assert len(losses) == 1, losses
    print(f"{'':12}{'start, s':>10}{'steps/s':>10}   (the same loss on both sides: {losses.pop():.6g})")
    for name in starts:
        print(f"{name:12}{statistics.median(starts[name]):>10.2f}{statistics.median(speeds[name]):>10.1f}")
    ratios = [
        statistics.median(values["raytrainer"]) / statistics.median(values["torchrun"])
        for values in (starts, speeds)
    ]
    print(f"{'ratio':12}{ratios[0]:>10.2f}{ratios[1]:>10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ray", action="store_true", help="on Ray (RAY_ADDRESS: a warm one), not --local")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only-speed", action="store_true")
    options = parser.parse_args()
    launch = ["-m", "raytrainer", "launch", "-n", "2", *([] if options.ray else ["--local"])]
    if not options.only_speed:
        compare_kinds(launch)
    if options.repeats:
        compare_speed(launch, options.repeats, options.steps)


if __name__ == "__main__":
    main()
