"""What the ranks of the tests do: small entries for `run_rank`, none of which needs torch."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def note(payload, process, text):
    """Leave `text` in a file of this rank, for the test to read."""
    path = Path(payload["folder"]) / f"rank_{process.rank}.txt"
    with open(path, "a") as file:
        file.write(f"{text}\n")


def read_line_of(payload, name):
    """Wait for the file (a FIFO) `name` to say something."""
    with open(Path(payload["folder"]) / name) as file:
        return file.readline().strip()


def finish(payload, process, observer, stop):
    observer({"event": "started", "step": 0})
    observer({"step": 1, "loss": 0.5})
    note(payload, process, os.getpid())
    return {"status": "finished", "rank": process.rank, "steps": 1, "attempt": payload["attempt"]}


def show_environment(payload, process, observer, stop):
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "EXTRA",
    ]
    observer({"event": "environment", **{name: os.environ.get(name) for name in names}})
    observer({"event": "path", "path": sys.path, "place": list(process)})
    return {"status": "finished", "torch": "torch" in sys.modules}


def print_things(payload, process, observer, stop):
    for number in range(3):
        print(f"rank {process.rank} out {number}")
        print(f"rank {process.rank} err {number}", file=sys.stderr)
    os.write(1, b"native output\n")
    print("bar 10%\rbar 20%\rbar 100%", end="")
    return {"status": "finished"}


def _begin(payload, process, observer):
    note(payload, process, os.getpid())
    if process.rank == 0:
        observer({"event": "started", "step": 0})


def hang(payload, process, observer, stop):
    """As one stuck in a collective: it never ends by itself."""
    _begin(payload, process, observer)
    signal.pause()


def hang_with_the_interpreter_held(payload, process, observer, stop):
    """A native call that does not give the interpreter back: no Python thread of this process runs again."""
    child = start_sleeper()
    note(payload, process, child)
    observer({"event": "started", "step": 0, "pids": [os.getpid(), child]})
    ctypes.PyDLL(None).sleep(1000)


def start_sleeper():
    """A process of the user's own, as a loader worker is: a copy of this one that waits."""
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    return child


def hang_with_children(payload, process, observer, stop):
    forked = start_sleeper()
    spawned = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    observer({"event": "started", "step": 0, "pids": [os.getpid(), forked, spawned.pid]})
    signal.pause()


def finish_but_leave_a_child(payload, process, observer, stop):
    note(payload, process, start_sleeper())
    return {"status": "finished"}


def finish_but_never_exit(payload, process, observer, stop):
    import atexit

    note(payload, process, os.getpid())
    atexit.register(signal.pause)
    return {"status": "finished"}


def raise_on_one(payload, process, observer, stop):
    _begin(payload, process, observer)
    if process.rank == payload["bad_rank"]:
        users_model(payload)
    signal.pause()


def users_model(payload):
    raise ValueError("shapes do not match")


def usage_on_all(payload, process, observer, stop):
    from raytrainer.errors import DataError

    raise DataError("the data set is empty")


def collateral_first(payload, process, observer, stop):
    """The others notice a broken connection before the rank that broke it says why."""
    _begin(payload, process, observer)
    if process.rank == 0:
        Path(payload["folder"], "go").write_text("now\n")
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    read_line_of(payload, "go")
    raise ValueError("the real cause")


def exit_on_one(payload, process, observer, stop):
    _begin(payload, process, observer)
    if process.rank == payload["bad_rank"]:
        sys.exit(3)
    signal.pause()


def leave_on_one(payload, process, observer, stop):
    _begin(payload, process, observer)
    if process.rank == payload["bad_rank"]:
        os._exit(7)
    signal.pause()


def die_until(payload, process, observer, stop):
    """Rank 1 is killed in each of the first `num_deaths` starts; each start commits a step if told to."""
    _begin(payload, process, observer)
    if process.rank == 0 and payload.get("commit") and payload["attempt"] < payload["num_deaths"]:
        Path(payload["folder"], "committed").write_text(str(payload["attempt"] + 1))
        Path(payload["folder"], "go").write_text("now\n")
    if payload["attempt"] < payload["num_deaths"]:
        if process.rank == 1:
            if payload.get("commit"):
                read_line_of(payload, "go")
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    return {"status": "finished", "attempt": payload["attempt"]}


def train_until_stopped(payload, process, observer, stop):
    step = 0
    while not stop.requested:
        step += 1
        if process.rank == 0:
            observer({"step": step})
        time.sleep(0.01)  # the step's work
    return {"status": "stopped", "stop_reason": stop.requested, "steps": step}


def start_slowly(payload, process, observer, stop):
    """Never gets to the first step."""
    print("importing")
    if process.rank == 0:
        observer({"event": "loading"})
    signal.pause()


def flood(payload, process, observer, stop):
    for step in range(20_000):
        observer({"step": step, "text": "x" * 200})
    observer({"event": "flooded"})
    Path(payload["folder"], "go").write_text("done\n")
    return {"status": "finished"}


def use_torch_store(payload, process, observer, stop):
    from raytrainer.cluster.worker import host_store

    store = host_store(payload["store_fd"]) if process.rank == 0 else None
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=process.rank, world_size=process.world_size)
    total = torch.ones(1) * (process.rank + payload["base"])
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    del store
    return {"status": "finished", "total": total}
