"""Small trainings for the tests: synthetic data, a model with everything that makes a resume hard."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raytrainer.cluster.signals import RESIZE, StopSignal
from raytrainer.config import Config
from raytrainer.result import Result
from raytrainer.task import StepOutput, Task
from raytrainer.trainer import Trainer


class Blobs:
    """`size` points of `num_features` numbers around `num_classes` centres; noise drawn anew for
    every look."""

    def __init__(
        self, size: int = 70, num_features: int = 8, num_classes: int = 4, noise: float = 0.3, seed: int = 1
    ):
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(num_classes, num_features, generator=generator)
        self.targets = torch.arange(size) % num_classes
        self.points = centres[self.targets] + 0.1 * torch.randn(size, num_features, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index] + self.noise * torch.randn(self.points.shape[1]), self.targets[index]


class Net(nn.Module):
    """BatchNorm and dropout between two linear layers."""

    def __init__(self, num_features: int = 8, num_classes: int = 4, dropout: float = 0.2, norm: bool = True):
        super().__init__()
        self.first = nn.Linear(num_features, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.relu(self.norm(self.first(inputs)))))


class WeightedTask(Task):
    """Samples of class 0 do not count at all, as with ignored tokens."""

    def training_step(self, batch: Any) -> StepOutput:
        inputs, targets = batch
        counted = targets != 0
        losses = nn.functional.cross_entropy(self.model(inputs), targets, reduction="none") * counted
        weight = counted.sum()
        return StepOutput(losses.sum() / weight.clamp_min(1), weight, {"counted": weight})


class KilledOnce(Task):
    """The process of `rank` dies by SIGKILL in its step `step`, unless the file `told` is there already.

    others_hang: the others then come to no end with that step, as with NCCL. with_snapshots: each step waits
    until the snapshot before it is written.
    """

    def __init__(
        self, step: int, rank: int, told: str, others_hang: bool = False, with_snapshots: bool = False
    ):
        self._at, self._rank, self._told = step, rank, Path(told)
        self._others_hang = others_hang and not self._told.exists()
        self._with_snapshots = with_snapshots

    def training_step(self, batch: Any) -> Any:
        if self._with_snapshots:
            for thread in threading.enumerate():
                if thread.name == "snapshot-writer":
                    thread.join()
        if self.step == self._at - 1:
            if int(os.environ["RANK"]) == self._rank and not self._told.exists():
                self._told.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            elif self._others_hang:
                threading.Event().wait()
        return super().training_step(batch)


def killed_once(tmp_path: Path, step: int, rank: int, **more: Any) -> dict[str, Any]:
    """The section of a config that has a rank killed in a step."""
    told = str(tmp_path / "told")
    return {
        "task": {
            "_target_": "tests.training.KilledOnce",
            "step": step,
            "rank": rank,
            "told": told,
            **more,
        }
    }


def config(tmp_path: Path, *overrides: str, objects: dict[str, Any] | None = None, **sections: Any) -> Config:
    """70 samples in steps of 16 (the last of 6), microbatches of 4, five steps an epoch."""
    mapping: dict[str, Any] = {
        "name": "run",
        "storage_path": str(tmp_path),
        "data": {
            "train": {"_target_": "tests.training.Blobs"},
            "global_batch_size": 16,
            "micro_batch_size": 4,
        },
        "model": {"_target_": "tests.training.Net"},
        "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
        "training": {"max_epochs": 3},
        "logging": {"every_n_steps": 1, "sinks": ["jsonl"]},
    }
    return Config.from_mapping({**mapping, **sections}, overrides, objects=objects)


class StopAtStep:
    """A wish to stop that comes while step `step` is being computed."""

    def __init__(self, step: int):
        self._calls = 0
        self._step = step

    @property
    def requested(self) -> str | None:
        self._calls += 1
        return "test" if self._calls >= self._step else None


def train(config: Config, stop_at: int | None = None) -> Result:
    return Trainer(config, stop=None if stop_at is None else StopAtStep(stop_at)).train()


class GatedTask(Task):
    """Rank 0 waits in the step after `step` finished ones until the test opens the FIFO gate_<step>.

    Where it writes "resize" into that, rank 0 also waits until the wish for a resize has reached it. Each
    rank notes its process id in a file pid_<rank> of the same folder.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self._resize_is_asked = threading.Event()
        request, asked = StopSignal.request, self._resize_is_asked

        def request_and_tell(stop: StopSignal, reason: str) -> None:
            request(stop, reason)
            if reason == RESIZE:
                asked.set()

        StopSignal.request = request_and_tell
        Path(folder, f"pid_{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))

    def training_step(self, batch: Any) -> Any:
        gate = Path(self.folder, f"gate_{self.step}")
        if os.environ.get("RANK", "0") == "0" and gate.exists():
            if gate.read_text() == "resize":
                self._resize_is_asked.wait()
            gate.unlink()
        return super().training_step(batch)
