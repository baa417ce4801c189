"""A bare Ray Train script with Ray's default settings: TorchTrainer around a hand-written loop."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from tests.benchmarks.measure import mark
from tests.benchmarks.result import save_result
from tests.benchmarks.turns import join_turns
from tests.benchmarks.workload import Workload


def train_loop(config: dict[str, Any]) -> None:
    mark("rank")
    workload = Workload.from_environment()
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(workload.build_model())
    optimizer = workload.build_optimizer(model)
    criterion = nn.CrossEntropyLoss()
    loader = workload.build_loader(rank)
    turns, step, epoch = join_turns(), 0, 0
    while step < workload.num_steps:
        loader.batch_sampler.set_epoch(epoch)
        for loaded in loader:
            turns.step()
            images, labels = loaded.batch
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
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
        save_result(model.module)
    ray.train.report({"loss": loss.item()})


def main() -> None:
    workload = Workload.from_environment()
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as storage:
        TorchTrainer(
            train_loop,
            train_loop_config={},
            scaling_config=ScalingConfig(num_workers=workload.num_ranks),
            run_config=RunConfig(name="bare", storage_path=storage),
        ).fit()


if __name__ == "__main__":
    main()
