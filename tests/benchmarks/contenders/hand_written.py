"""A hand-written DDP loop, started by torchrun; with `plain`, with torch's own DataLoader and sampler."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.measure import mark
from tests.benchmarks.result import save_result
from tests.benchmarks.turns import join_turns
from tests.benchmarks.workload import Workload


def main(plain: bool) -> None:
    mark("rank")
    workload = Workload.from_environment()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    model = workload.build_model()
    ddp = DistributedDataParallel(model)
    optimizer = workload.build_optimizer(model)
    criterion = nn.CrossEntropyLoss()
    loader = workload.build_plain_loader(rank) if plain else workload.build_loader(rank)
    sampler = loader.sampler if plain else loader.batch_sampler
    turns, step, epoch = join_turns(), 0, 0
    while step < workload.num_steps:
        sampler.set_epoch(epoch)
        for loaded in loader:
            turns.step()
            images, labels = loaded if plain else loaded.batch
            optimizer.zero_grad()
            loss = criterion(ddp(images), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step == 1:
                mark("first_step")
            if rank == 0 and step % workload.every_n_steps == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if step == workload.num_steps:
                break
        epoch += 1
    if rank == 0:
        save_result(model)
    # A wrapper that outlives its group ends some processes with SIGABRT at their exit (torch 2.14, gloo).
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(plain="plain" in sys.argv)
