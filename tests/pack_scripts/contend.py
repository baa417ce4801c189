"""A trial whose steps take longer the more of its kind run: --curve has how many times as long a step takes
with 1, 2, 3 ... at once, by a clock of its own. They find each other by locked files in --peers."""

import argparse
import fcntl
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--curve", required=True)
parser.add_argument("--peers", required=True)
parser.add_argument("--steps", type=int, default=10**6)
args = parser.parse_args()
curve = [float(each) for each in args.curve.split(",")]
mine = open(Path(args.peers, str(os.getpid())), "w")  # noqa: SIM115 - locked until the process ends
time_s = 0.0
fcntl.flock(mine, fcntl.LOCK_EX)


def runs(path):
    """Whether its process holds the lock still."""
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


for step in range(1, args.steps + 1):
    others = [path for path in Path(args.peers).iterdir() if path.name != str(os.getpid())]
    time_s += 0.05 * curve[sum(map(runs, others))]
    time.sleep(0.005)
    print(json.dumps({"step": step, "time_s": time_s}), flush=True)
