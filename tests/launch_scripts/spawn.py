"""Not distributed itself: starts processes of its own with torch.multiprocessing.spawn."""

import torch.multiprocessing as mp


def work(index, folder):
    with open(f"{folder}/spawned_{index}", "w") as file:
        file.write(__name__)


if __name__ == "__main__":
    import sys

    mp.spawn(work, args=(sys.argv[1],), nprocs=2)
