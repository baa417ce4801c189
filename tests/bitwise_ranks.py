"""Ranks for the tests of `determinism: bitwise`: started once, they go through a list of trainings."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from raytrainer import tree_reduction
from raytrainer.deferred import defer_compiler
from raytrainer.distributed import Process
from raytrainer.result import Result
from raytrainer.task import StepOutput, Task
from raytrainer.trainer import Trainer
from tests.training import Blobs, StopAtStep, config


class Hard(nn.Module):
    """BatchNorm, dropout, a buffer that a forward pass changes and reads, and a layer without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.2)
        self.middle = spectral_norm(nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.relu(self.norm(self.first(inputs))))
        return self.head(torch.relu(self.middle(hidden)))


class TwoOptimizers(Task):
    """Each with a weighted loss of its own."""

    def configure_optimizers(self, parameters: Any, build: Any) -> dict[str, torch.optim.Optimizer]:
        body = [p for name, p in self.model.named_parameters() if not name.startswith("head")]
        return {"body": build(body), "head": build(list(self.model.head.parameters()))}

    def training_step(self, batch: Any, optimizer: str) -> StepOutput:
        inputs, targets = batch
        losses = nn.functional.cross_entropy(self.model(inputs), targets, reduction="none") * (targets != 0)
        weight = (targets != 0).sum()
        return StepOutput(losses.sum() / weight.clamp_min(1), weight)


class Torn(Blobs):
    """All of the second microbatch of an epoch, and a sample of the third, cannot be read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index in (3, 4, 5, 8):
            raise OSError(f"sample {index} is torn")
        return super().__getitem__(index)


# Steps of 15, 15, 15, 15 and 6 samples in microbatches of 3: on 3 ranks the last step leaves one idle.
SECTIONS = {
    "data": {
        "train": {"_target_": "tests.training.Blobs", "size": 66},
        "eval": {"_target_": "tests.training.Blobs", "size": 37},
        "global_batch_size": 15,
        "micro_batch_size": 3,
        # A rank is spawned here, and would spawn its loader workers, each with an import of torch.
        "loader": {"num_workers": 1, "multiprocessing_context": "fork"},
    },
    "model": {"_target_": "tests.bitwise_ranks.Hard"},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01},
    "scheduler": {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.02},
    "metrics": {
        "accuracy": {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 4},
        "hinge": {"_target_": "torchmetrics.classification.MulticlassHingeLoss", "num_classes": 4},
    },
    "logging": {"every_n_steps": 4, "sinks": ["jsonl"]},  # a mean over steps before and after a stop
    "training": {"max_epochs": 2, "gradient_clip_norm": 0.5, "ema": {"decay": 0.9}},
}


@dataclass(frozen=True)
class Job:
    """A training of run `name` on `world_size` ranks, until a wish to stop in its `stop_at`-th step.

    bucket_bytes: of a bucket of gradients; None for the usual, into which all of this model's fit.
    """

    name: str
    world_size: int
    overrides: list[str] = field(default_factory=list)
    stop_at: int | None = None
    bucket_bytes: int | None = None


def train(job: Job, folder: Path, rank: int = 0) -> Result:
    run = config(folder, f"name={job.name}", *job.overrides, **SECTIONS)
    stop = None if job.stop_at is None else StopAtStep(job.stop_at)
    return Trainer(run, process=Process(rank, job.world_size), stop=stop).train()


def train_all(jobs: list[Job], folder: Path) -> list[Result]:
    """The results of the jobs, one after another, each on as many of the same processes as it asks for."""
    torch.multiprocessing.spawn(
        _rank, ([asdict(job) for job in jobs], str(folder)), nprocs=max(job.world_size for job in jobs)
    )
    lines = (folder / "results.jsonl").read_text().splitlines()
    return [Result.from_mapping(json.loads(line)) for line in lines]


def _rank(rank: int, jobs: list[dict[str, Any]], folder: str) -> None:
    defer_compiler()
    usual = tree_reduction._FIRST_BUCKET_BYTES, tree_reduction._BUCKET_BYTES
    for number, job in enumerate(Job(**values) for values in jobs):
        if rank >= job.world_size:
            continue
        sizes = usual if job.bucket_bytes is None else (job.bucket_bytes, job.bucket_bytes)
        tree_reduction._FIRST_BUCKET_BYTES, tree_reduction._BUCKET_BYTES = sizes
        if job.world_size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store{number}", rank=rank, world_size=job.world_size
            )
        result = train(job, Path(folder), rank)
        if job.world_size > 1:
            dist.destroy_process_group()
        if rank == 0:
            with open(os.path.join(folder, "results.jsonl"), "a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
