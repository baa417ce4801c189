"""Evaluates the model during training, and decides what follows: a new best, an early stop, a lower rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from raytrainer.build import Data
from raytrainer.data import EvalBatches
from raytrainer.distributed import Process, broadcast_tensors
from raytrainer.errors import ResumeError
from raytrainer.evaluation import evaluate
from raytrainer.policy import improves
from raytrainer.randomness import StepRandomness
from raytrainer.state import TrainState
from raytrainer.training_input import configured_loader
from raytrainer.transfer import ahead_of_use
from raytrainer.updates import advance_schedules

if TYPE_CHECKING:
    from raytrainer.config import Config


class Evaluator:
    """metrics: torchmetrics by name; autocast: gives the context in which the model computes."""

    def __init__(
        self,
        config: Config,
        data: Data,
        state: TrainState,
        metrics: dict[str, Any],
        process: Process,
        device: torch.device,
        randomness: StepRandomness,
        autocast: Callable[[], Any],
    ):
        self._config, self._data, self._state, self._metrics = config, data, state, metrics
        self._process, self._device = process, device
        self._randomness, self._autocast = randomness, autocast
        self._loader: Any = None

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def evaluate(self) -> dict[str, float]:
        """The mean loss and the metrics by name, the same on every rank; changes nothing that is saved."""
        state, process = self._state, self._process
        if state.ema is not None:
            broadcast_tensors(state.ema.buffers(), process.world_size)
        task, model = state.task, state.evaluated_model
        task.model, trained = model, task.model
        try:
            return evaluate(
                model,
                task,
                ahead_of_use(iter(self._batches()), self._device),
                self._metrics,
                process,
                self._device,
                self._autocast,
                seed=self._randomness.for_evaluation,
                bitwise=self._config.training.determinism == "bitwise",
            )
        finally:
            task.model = trained

    def _batches(self) -> Any:
        if self._loader is None:
            config, data, process = self._config, self._data, self._process
            size = config.eval.batch_size or config.data.micro_batch_size
            batches = EvalBatches(len(data.eval), size, process.rank, process.world_size)
            self._loader = configured_loader(config, data, data.eval, batches, self._device, "data.eval")
        return self._loader

    def take_in(self, values: dict[str, float]) -> bool:
        """Enters what `evaluate` gave into the progress; returns whether the monitored value is a new best.

        Raises ResumeError when a monitored value is not among them.
        """
        progress, config = self._state.progress, self._config
        progress.metrics.update({f"eval/{name}": value for name, value in values.items()})
        progress.last_evaluation_step = progress.step
        stopping = config.training.early_stopping
        if stopping is not None:
            value = self._monitored(stopping.monitor, "training.early_stopping.monitor")
            if improves(value, progress.stop_best, stopping.mode, stopping.min_delta):
                progress.stop_best, progress.evaluations_without_gain = value, 0
            else:
                progress.evaluations_without_gain += 1
            progress.stopped_early = progress.evaluations_without_gain >= stopping.patience
        monitor = config.checkpoint.monitor
        if monitor is None:
            advance_schedules(self._state, "eval", values.get("loss"))
            return False
        value = self._monitored(monitor, "checkpoint.monitor")
        advance_schedules(self._state, "eval", value)
        if not improves(value, progress.best_value, config.checkpoint.mode):
            return False
        progress.best_value, progress.best_step = value, progress.step
        return True

    def _monitored(self, name: str, key: str) -> float:
        if name not in self._state.progress.metrics:
            known = ", ".join(sorted(self._state.progress.metrics)) or "none"
            raise ResumeError(f"{key} = {name}\n  the evaluation gives no such number; it gives: {known}")
        return float(self._state.progress.metrics[name])
