"""What every contender trains: the same model, samples, order, batch and seed.

It reaches the contenders' processes as JSON in an environment variable, so that each builds it by itself.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

VARIABLE = "BENCH_WORKLOAD"
FASHION_ROOT = "/usr/share/datasets/fashion-mnist"

_DATASETS = {
    "mnist": {"_target_": "raytrainer.data.MnistSubset", "split": "train", "augment": None},
    "fashion": {"_target_": "raytrainer.data.FashionMnist", "split": "train", "augment": None},
}
_MODELS = {
    # Without dropout, whose draws no two loops make alike: then equal weights prove equal work.
    "small_cnn": {"_target_": "raytrainer.models.SmallCnn", "dropout": 0.0},
    "mlp": {"_target_": "tests.benchmarks.models.mlp"},
    "resnet18": {"_target_": "tests.benchmarks.models.resnet18"},
    "linear": {"_target_": "tests.benchmarks.models.linear"},
}


@dataclass(frozen=True)
class Workload:
    """num_steps: optimizer steps in all; global_batch_size: samples a step, each rank having an equal part;
    width: channels of the first convolution; loader_workers: processes a rank that load data; snapshot: of
    raytrainer's runs, off by default, since the others keep nothing for the case of a crash."""

    num_steps: int
    data: str = "mnist"
    model: str = "small_cnn"
    width: int = 16
    augment: bool = False
    global_batch_size: int = 128
    num_ranks: int = 2
    loader_workers: int = 0
    every_n_steps: int = 50
    lr: float = 1e-3
    seed: int = 0
    snapshot: str = "off"

    @property
    def micro_batch_size(self) -> int:
        return self.global_batch_size // self.num_ranks

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Workload:
        return cls(**json.loads(os.environ[VARIABLE]))

    def data_target(self) -> dict[str, Any]:
        return {**_DATASETS[self.data], "augment": "shift" if self.augment else None}

    def model_target(self) -> dict[str, Any]:
        width = {"width": self.width} if self.model == "small_cnn" else {}
        return {**_MODELS[self.model], **width}

    def build_dataset(self) -> Any:
        return _build(self.data_target())

    def build_model(self) -> Any:
        """The model with the weights that `raytrainer` gives it for this seed."""
        import torch

        torch.manual_seed(self.seed)
        return _build(self.model_target())

    def build_optimizer(self, model: Any) -> Any:
        import torch

        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def build_loader(self, rank: int) -> Any:
        """raytrainer's own loader; its batch_sampler takes `set_epoch`."""
        from raytrainer.data import ElasticBatchSampler, build_loader

        dataset = self.build_dataset()
        sampler = ElasticBatchSampler(
            len(dataset),
            self.global_batch_size,
            self.micro_batch_size,
            rank=rank,
            world_size=self.num_ranks,
            seed=self.seed,
            drop_last=True,
        )
        settings = SimpleNamespace(
            num_workers=self.loader_workers,
            prefetch_factor=None,
            pin_memory="auto",
            persistent_workers=True,
            multiprocessing_context=None,
            timeout_s=0,
        )
        return build_loader(dataset, sampler, settings, seed=self.seed)

    def build_plain_loader(self, rank: int) -> Any:
        """torch's DataLoader with its DistributedSampler, over the same data set; another order."""
        from torch.utils.data import DataLoader, DistributedSampler

        dataset = self.build_dataset()
        sampler = DistributedSampler(
            dataset, num_replicas=self.num_ranks, rank=rank, seed=self.seed, drop_last=True
        )
        return DataLoader(
            dataset,
            batch_size=self.micro_batch_size,
            sampler=sampler,
            num_workers=self.loader_workers,
            collate_fn=_as_it_is,
            drop_last=True,
            persistent_workers=self.loader_workers > 0,
        )

    def config(self, name: str, storage_path: str, task: str, elastic: bool = False) -> dict[str, Any]:
        """The same as a config of raytrainer's; task: dotted name of the Task that reports to us. elastic:
        the number of workers may change, though here it does not."""
        num_workers = {"min": 1, "max": self.num_ranks} if elastic else self.num_ranks
        return {
            "name": name,
            "storage_path": storage_path,
            "seed": self.seed,
            "scaling": {"num_workers": num_workers, "gpus_per_worker": 0},
            "data": {
                "train": self.data_target(),
                "global_batch_size": self.global_batch_size,
                "micro_batch_size": self.micro_batch_size,
                "drop_last": True,
                "loader": {"num_workers": self.loader_workers},
            },
            "model": self.model_target(),
            "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
            "task": {"_target_": task},
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": self.lr},
            "training": {"max_steps": self.num_steps, "max_epochs": None},
            "checkpoint": {"every": {"steps": 10**9}, "snapshot": self.snapshot},
            "logging": {"every_n_steps": self.every_n_steps},
        }


def _build(target: dict[str, Any]) -> Any:
    module, _, name = target["_target_"].rpartition(".")
    keywords = {key: value for key, value in target.items() if key != "_target_"}
    return getattr(importlib.import_module(module), name)(**keywords)


def _as_it_is(batch: Any) -> Any:
    return batch
