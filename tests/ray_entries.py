"""What ranks do in the tests of the Ray backend, in place of a training; imported by the workers."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path


def _join(payload, process):
    import torch.distributed as dist

    from raytrainer.cluster.worker import host_store

    store = host_store(payload["store_fd"]) if process.rank == 0 else None
    dist.init_process_group(
        "gloo", rank=process.rank, world_size=process.world_size, timeout=timedelta(seconds=60)
    )
    return dist, store


def add_up(payload, process, observer, stop):
    """An all-reduce, a few records, a line on each rank's stdout."""
    import torch

    dist, _store = _join(payload, process)
    total = torch.tensor([process.rank + 1.0])
    dist.all_reduce(total)
    observer({"event": "started"})
    for step in range(payload.get("num_steps", 3)):
        observer({"step": step})
    print(f"rank {process.rank} says hello")
    dist.barrier()
    dist.destroy_process_group()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    return {
        "status": "finished",
        "total": total.item(),
        "environment": {name: os.environ.get(name) for name in names},
        "directory": os.getcwd(),
        "pid": os.getpid(),
        "ray_train_imported": "ray.train" in sys.modules,
    }


def fail_on_rank_1(payload, process, observer, stop):
    """Rank 1 raises while rank 0 waits for it."""
    dist, _store = _join(payload, process)
    observer({"event": "started"})
    if process.rank == 1:
        raise ValueError("the label of sample 7 is -1")
    dist.barrier()
    return {}


def killed_on_rank_1(payload, process, observer, stop):
    """Rank 1 is killed in the first `num_deaths` starts while rank 0 waits for it."""
    dist, _store = _join(payload, process)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    observer({"event": "started", "attempt": attempt})
    if process.rank == 1 and attempt < payload["num_deaths"]:
        # As long as a rank takes to tell its size.
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()
    return {"status": "finished", "attempt": attempt}


def wait_for_stop(payload, process, observer, stop):
    """Steps until rank 0 is asked to stop, which it tells the others in the next collective."""
    import torch

    dist, _store = _join(payload, process)
    if "pid_dir" in payload:
        (Path(payload["pid_dir"]) / str(os.getpid())).touch()
    observer({"event": "started"})
    step, wish = 0, torch.zeros(1)
    while not wish.item():
        wish[0] = stop.requested is not None
        dist.all_reduce(wish)
        step += 1
        observer({"step": step})
        time.sleep(0.02)
    dist.destroy_process_group()
    return {"status": "stopped", "stop_reason": stop.requested}


def ignore_stop(payload, process, observer, stop):
    """Is asked to stop, leaves the file `asked`, and goes on."""
    observer({"event": "started"})
    while stop.requested is None:
        time.sleep(0.02)
    Path(payload["asked"]).touch()
    time.sleep(600)


def follow_the_cluster(payload, process, observer, stop):
    """Runs until it is asked to resize; the group's start number `last_attempt` finishes."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    ended = Path(payload["folder"]) / f"ended_{attempt}"
    observer({"event": "resumed", "step": attempt, "lost_steps": 0})
    if attempt == payload["last_attempt"]:
        return {"status": "finished", "world_size": process.world_size}
    if process.rank == 0:
        while stop.requested is None:
            time.sleep(0.05)
        ended.touch()
    while not ended.exists():
        time.sleep(0.05)
    return {"status": "resized" if stop.requested == "resize" or process.rank else "stopped"}
