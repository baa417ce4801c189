"""A trial that does what --kind says. It notes its process, and those it starts, in its directory."""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--kind", default="ok")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--mib", type=int, default=0)
parser.add_argument("--score", type=float, default=1.0)
parser.add_argument("--reports", type=int, default=4)
parser.add_argument("--wait", action="store_true")
parser.add_argument("--process_index", type=int, default=0)
parser.add_argument("--process_num", type=int, default=1)
args = parser.parse_args()

HERE = Path(os.environ.get("RAYTRAINER_TRIAL_DIR", "."))


def note(pid):
    if "RAYTRAINER_TRIAL_DIR" in os.environ:
        (HERE / f"pid_{pid}").touch()


def train():
    import torch

    torch.manual_seed(args.seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 64)
    for _ in range(20):
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raw = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print("weights", hashlib.sha256(raw).hexdigest())
    print(json.dumps({"step": 20, "loss": loss.item()}))


def leave():
    """Two processes that go on: a child, and one that has left the process group."""
    for session in (False, True):
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session
        )
        note(child.pid)


def wait_for_go():
    while not Path("go").exists():
        time.sleep(0.02)


print(
    f"process {args.process_index} of {args.process_num}, threads {os.environ.get('OMP_NUM_THREADS')}, "
    f"cards {os.environ.get('CUDA_VISIBLE_DEVICES')!r}",
    flush=True,
)
random.seed(args.seed)
if args.kind == "train":
    train()
elif args.kind == "ok":
    print(json.dumps({"step": 1, "loss": 0.5 + args.process_index}))
elif args.kind == "memory":
    raise MemoryError("no more")
elif args.kind == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif args.kind == "exit3":
    sys.exit(3)
elif args.kind == "hang":
    time.sleep(600)
elif args.kind == "eat":
    # Held until it has been looked at; alone on the card there is room for it.
    block = bytearray(os.urandom(1 << 20)) * args.mib
    time.sleep(2)
elif args.kind == "leave":
    leave()
elif args.kind == "leave_and_wait":
    leave()
    note(os.getpid())
    wait_for_go()
elif args.kind == "flood":
    for number in range(200_000):
        print("a line of a flood", number)
    print("the end")
elif args.kind == "until":
    note(os.getpid())
    wait_for_go()
elif args.kind == "stubborn":
    signal.signal(signal.SIGTERM, lambda number, frame: (HERE / "told").touch())
    note(os.getpid())
    while True:
        time.sleep(0.1)
elif args.kind == "improve":
    # Reports --reports values, then waits to be told to stop, or ends.
    for number in range(1, args.reports + 1):
        print(json.dumps({"step": number, "score": args.score * number}), flush=True)
    if args.wait:
        note(os.getpid())
        wait_for_go()
elif args.kind == "use_gpu":
    # What the CUDA library does: it becomes a client where a daemon's pipe is named.
    if args.wait and "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"], f"client_{os.getpid()}").touch()
    print(json.dumps({"step": 1, "loss": 0.5}), flush=True)
    wait_for_go()
elif args.kind == "diverge":
    print('{"step": 1, "score": NaN}', flush=True)
    signal.pause()
