"""Everything that a checkpoint must hold to continue to the bit, kept in one place."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from raytrainer.build import Schedule
from raytrainer.checkpoint import Snapshot, copy_to_host
from raytrainer.errors import ResumeError
from raytrainer.fingerprint import state_sha256, weights_sha256
from raytrainer.ledger_files import LedgerLine
from raytrainer.task import Task


@dataclass
class Progress:
    """Where the run stands: plain numbers, the same on every rank.

    step, samples_seen: of finished steps since the start of the run; epoch: finished epochs; step_in_epoch:
    of the current one, equal to the steps an epoch when its end (schedule, evaluation) is still to be
    attended to; loss_sum, loss_steps: of the steps since the last that was logged, whose mean is train/loss.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples_seen: int = 0
    skipped_updates: int = 0
    skipped_samples: int = 0
    last_evaluation_step: int = -1
    best_value: float | None = None
    best_step: int | None = None
    stop_best: float | None = None
    evaluations_without_gain: int = 0
    stopped_early: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    loss_sum: Any = 0.0
    loss_steps: int = 0

    def load(self, state: dict[str, Any]) -> None:
        for entry in fields(self):
            if entry.name in state:
                setattr(self, entry.name, state[entry.name])


class TrainState:
    """The model, its optimizers, schedules, scaler, EMA, the task's own state, and the progress."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizers: dict[str, torch.optim.Optimizer],
        schedules: dict[str, Schedule],
        scaler: torch.amp.GradScaler | None,
        ema_decay: float | None,
    ):
        self.model = model
        self.task = task
        self.optimizers = optimizers
        self.schedules = schedules
        self.scaler = scaler
        self.ema: AveragedModel | None = None
        if ema_decay is not None:
            self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema_decay))
        self.progress = Progress()

    @property
    def evaluated_model(self) -> nn.Module:
        """The model that evaluation, prediction and export use: the EMA where there is one."""
        return self.model if self.ema is None else self.ema.module

    def training_state(self) -> dict[str, Any]:
        """All but the model's own state dict, not copied."""
        return {
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "schedules": {
                name: _plain(schedule.scheduler.state_dict()) for name, schedule in self.schedules.items()
            },
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "task": self.task.state_dict(),
            "progress": asdict(self.progress),
        }

    def snapshot(self, meaning: dict[str, Any], ledger: list[LedgerLine] | None = None) -> Snapshot:
        """A copy in host memory. ledger: what the steps since the checkpoint before consumed."""
        progress = self.progress
        progress.metrics = {name: float(value) for name, value in progress.metrics.items()}
        progress.loss_sum = float(progress.loss_sum)
        return Snapshot(
            step=progress.step,
            epoch=progress.epoch,
            model=copy_to_host(self.model.state_dict()),
            training=copy_to_host(self.training_state()),
            meaning=meaning,
            metrics=dict(progress.metrics),
            ledger=ledger or [],
        )

    def load(self, model_state: dict[str, Any], training: dict[str, Any]) -> None:
        """Takes back what a checkpoint held. Raises ResumeError when it is another model's or optimizer's."""
        try:
            self.model.load_state_dict(model_state)
            for name, optimizer in self.optimizers.items():
                optimizer.load_state_dict(training["optimizers"][name])
            for name, schedule in self.schedules.items():
                _refuse_other_length(schedule.scheduler, training["schedules"][name])
                schedule.scheduler.load_state_dict(training["schedules"][name])
            if self.scaler is not None and training["scaler"] is not None:
                self.scaler.load_state_dict(training["scaler"])
            if self.ema is not None and training["ema"] is not None:
                self.ema.load_state_dict(training["ema"])
            self.task.load_state_dict(training["task"])
            self.progress.load(training["progress"])
        except (RuntimeError, KeyError, ValueError) as error:
            raise ResumeError(
                f"the checkpoint does not fit this config: {error}\n"
                "  start over with --fresh, which keeps the old directory, or give the run another name"
            ) from error

    def fingerprints(self) -> tuple[str, str]:
        """(weights_sha256, state_sha256) as result.json has them."""
        training = self.training_state()
        position = {
            name: training["progress"][name] for name in ("step", "epoch", "step_in_epoch", "samples_seen")
        }
        return weights_sha256(self.model.state_dict()), state_sha256({**training, "progress": position})


def _refuse_other_length(scheduler: Any, saved: dict[str, Any]) -> None:
    """A schedule made for a number of steps, such as OneCycleLR, cannot go on past them."""
    made_for, now = saved.get("total_steps"), getattr(scheduler, "total_steps", None)
    if made_for != now:
        raise ResumeError(
            f"the learning-rate schedule was made for {made_for} steps, and this config has {now}\n"
            "  set training.max_epochs and max_steps back, or begin a new run from these weights: "
            "name=..., init_from=..."
        )


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A schedule's state without what cannot be loaded safely: lambdas and methods are code, not state."""
    return {key: value for key, value in state.items() if not callable(value) and not _has_callables(value)}


def _has_callables(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(callable(item) for item in value)
