"""A task as start.sh starts it: three of these on one card, each with its part of the work.

What it prints as a line of JSON, with numbers, are its metrics.
"""

import argparse
import json

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--process_index", type=int, default=0)
parser.add_argument("--process_num", type=int, default=1)
args = parser.parse_args()

# The part of the work of this process: every process_num-th item.
items = range(args.process_index, 30, args.process_num)
weight = 0.0
for step, item in enumerate(items, 1):
    weight -= args.lr * (weight - item / 30)
    print(json.dumps({"step": step, "loss": (weight - 0.5) ** 2}), flush=True)
