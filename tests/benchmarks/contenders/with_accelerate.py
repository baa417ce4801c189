"""The hand-written loop with Accelerate in DDP's place, started by torchrun."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from torch import nn

from tests.benchmarks.result import save_result
from tests.benchmarks.turns import join_turns
from tests.benchmarks.workload import Workload


def main() -> None:
    workload = Workload.from_environment()
    accelerator = Accelerator(cpu=True)
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    # The loader is not handed over: it gives each rank its own part already.
    model, optimizer = accelerator.prepare(model, optimizer)
    criterion = nn.CrossEntropyLoss()
    loader = workload.build_loader(int(os.environ["RANK"]))
    turns, step, epoch = join_turns(), 0, 0
    while step < workload.num_steps:
        loader.batch_sampler.set_epoch(epoch)
        for loaded in loader:
            turns.step()
            images, labels = loaded.batch
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % workload.every_n_steps == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if step == workload.num_steps:
                break
        epoch += 1
    if accelerator.is_main_process:
        save_result(accelerator.unwrap_model(model))
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
