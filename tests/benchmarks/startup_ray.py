"""From the command to the first step and the last process gone: on Ray, against a bare TorchTrainer.

    python tests/benchmarks/startup_ray.py [--pairs 3]

Both train the same tiny model on two CPU workers, interleaved. CPU seconds are those of the whole process
tree, from the processes' own counters, sampled until they end; they say more than wall time on a busy
machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil

ROOT = str(Path(__file__).parents[2])

STEP = """
import torch
def train(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(32, 784)), torch.randint(10, (32,)))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if step == 0 and rank == 0:
            import os, time
            with open(os.environ["FIRST_STEP"], "w") as file:
                file.write(str(time.time()))
    if rank == 0:
        with open(os.environ["FIRST_STEP"] + ".last", "w") as file:
            file.write(str(time.time()))
"""

BARE = """
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
def loop():
    import ray.train, startup_step
    startup_step.train(ray.train.get_context().get_world_rank())
TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2)).fit()
"""

OURS = """
from raytrainer.cluster.ray_run import run_on_ray
from raytrainer.cluster.signals import StopSignal
from raytrainer.config.connection import RaySection
from raytrainer.config.scaling import ScalingSection
import os
outcome = run_on_ray(
    {"entry": "startup_entry:entry", "import_paths": [os.getcwd()]},
    ScalingSection(num_workers=2), RaySection(), on_record=print, stop=StopSignal(), max_failures=0,
    storage_path="runs", name="startup", verbose=False, committed_step=lambda: None,
)
raise SystemExit(outcome.exit_code)
"""

ENTRY = """
def entry(payload, process, observer, stop):
    from raytrainer.cluster.worker import host_store
    store = host_store(payload["store_fd"]) if process.rank == 0 else None
    import torch
    from raytrainer.distributed import Process
    import startup_step
    with Process(*process).join(torch.device("cpu")):
        startup_step.train(process.rank)
    return {}
"""


def measure(script: str, folder: Path) -> dict[str, float]:
    """Seconds: to the first step, to the last exit, from the last step to that, and of CPU time."""
    marker = folder / "first_step"
    tag = f"startup-{time.time_ns()}"
    environment = {
        **os.environ,
        "FIRST_STEP": str(marker),
        "STARTUP_TAG": tag,
        "PYTHONPATH": os.pathsep.join([ROOT, str(folder)]),
        "OMP_NUM_THREADS": "1",
    }
    for path in folder.glob("first_step*"):
        path.unlink()
    start = time.time()
    process = subprocess.Popen(
        [sys.executable, script],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    cpu_s: dict[tuple[int, float], float] = {}
    while sample(tag, cpu_s) or process.poll() is None:
        time.sleep(0.2)
    end = time.time()
    if process.returncode != 0:
        raise SystemExit(f"{script} ended with exit code {process.returncode}")
    first, last = (float(Path(f"{marker}{suffix}").read_text()) for suffix in ("", ".last"))
    return {
        "first_step_s": first - start,
        "total_s": end - start,
        "exit_s": end - last,
        "cpu_s": sum(cpu_s.values()),
        "processes": len(cpu_s),
    }


def sample(tag: str, cpu_s: dict[tuple[int, float], float]) -> bool:
    """Notes the CPU time of each live process that inherited the tag; whether there is one."""
    found = False
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.environ().get("STARTUP_TAG") != tag:
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            times = process.cpu_times()
            cpu_s[process.pid, process.create_time()] = times.user + times.system
            found = True
        except psutil.Error:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", choices=["bare", "ours"])
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {"bare": [], "ours": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {
            "startup_step": STEP,
            "startup_entry": ENTRY,
            "bare": BARE,
            "ours": OURS,
        }
        for stem, text in files.items():
            (folder / f"{stem}.py").write_text(textwrap.dedent(text))
        for _ in range(arguments.pairs):
            for side in [arguments.only] if arguments.only else ["bare", "ours"]:
                results[side].append(measure(str(folder / f"{side}.py"), folder))
                print(side, {key: round(value, 2) for key, value in results[side][-1].items()}, flush=True)
    for key in ("first_step_s", "total_s", "exit_s", "cpu_s", "processes"):
        medians = {side: statistics.median(r[key] for r in rows) for side, rows in results.items() if rows}
        text = "  ".join(f"{side} {value:7.2f}" for side, value in medians.items())
        ratio = f"  ratio {medians['ours'] / medians['bare']:.2f}" if len(medians) == 2 else ""
        print(f"{key:13} {text}{ratio}")


if __name__ == "__main__":
    main()
