"""What a step computes: override `Task` for everything that is not plain supervised learning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from raytrainer.data.checks import label_range_error
from raytrainer.errors import ConfigError, Problem


@dataclass(frozen=True)
class StepOutput:
    """What `training_step` returns when a plain loss does not say enough.

    loss: 0-d tensor, the mean over the microbatch.
    weight: how much this microbatch counts in the mean over the step, a number or 0-d tensor (tokens, say);
    None is the number of samples. metrics: numbers or 0-d tensors to log, from the first rank's last
    microbatch.
    """

    loss: torch.Tensor
    weight: torch.Tensor | float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationOutput:
    """loss and weight as in StepOutput; predictions and targets go to every configured metric's `update`."""

    loss: torch.Tensor | None
    weight: torch.Tensor | float | None = None
    predictions: Any = None
    targets: Any = None


class Task:
    """Supervised learning on batches of (inputs, targets); subclass it for anything else.

    The trainer sets `model`, `loss` (None when the config has none), `device` and `seed` before the first
    call, `step` (the number of finished steps) and `indices` (the batch's samples in the data set) before
    each. `model` here is the bare module: the trainer does what several ranks need around the call. Both step
    methods are called once a microbatch, on any rank, so they must not communicate; on more than two ranks
    `training_step` also runs once before the first step with its results thrown away. A loss that couples
    samples (contrastive, say) sees one microbatch.
    """

    model: nn.Module
    loss: Callable[..., torch.Tensor] | None = None
    device: torch.device = torch.device("cpu")
    seed: int = 0
    step: int = 0
    indices: Sequence[int] | None = None

    def training_step(self, batch: Any) -> torch.Tensor | StepOutput:
        """The mean loss of one microbatch, on the device already. With several optimizers (see
        `configure_optimizers`) it is called once for each, with `optimizer="<name>"` as a keyword."""
        inputs, targets = self._split(batch)
        return self._compute_loss(self.model(inputs), targets)

    def evaluation_step(self, batch: Any) -> EvaluationOutput:
        """One microbatch of the evaluation data, in eval mode and without gradients."""
        inputs, targets = self._split(batch)
        outputs = self.model(inputs)
        return EvaluationOutput(self._compute_loss(outputs, targets), None, outputs, targets)

    def predict_step(self, inputs: Any) -> Any:
        """The model's answer to inputs alone, in eval mode and without gradients."""
        return self.model(inputs)

    def configure_optimizers(
        self, parameters: list[dict[str, Any]], build: Callable[..., torch.optim.Optimizer]
    ) -> torch.optim.Optimizer | dict[str, torch.optim.Optimizer]:
        """The optimizer, or several by name, each for parameters of its own.

        parameters: the groups that the config's `parameters` section makes; build(parameters, **overrides)
        makes the config's `optimizer` for whatever parameters it is given.
        """
        return build(parameters)

    def state_dict(self) -> dict[str, Any]:
        """State of the task's own that a checkpoint must hold: plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""

    def _split(self, batch: Any) -> tuple[Any, Any]:
        if isinstance(batch, list | tuple) and len(batch) == 2:
            return batch[0], batch[1]
        kind = type(batch).__name__
        size = f" of {len(batch)}" if isinstance(batch, list | tuple | Mapping) else ""
        raise TypeError(
            "without a `task`, a batch must be a pair (inputs, targets), "
            f"and the data set gives a {kind}{size}; "
            "write a Task with a training_step of your own"
        )

    def _compute_loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        if self.loss is None:
            raise ConfigError(
                Problem(
                    "config",
                    "loss",
                    "there is no loss",
                    fix="write: loss: {_target_: torch.nn.CrossEntropyLoss}",
                )
            )
        try:
            return self.loss(outputs, targets)
        except (IndexError, RuntimeError) as error:
            if _are_class_labels(outputs, targets):
                wrong_label = label_range_error(targets, outputs.shape[1], self.indices)
                if wrong_label is not None:
                    raise wrong_label from error
            raise


def _are_class_labels(outputs: Any, targets: Any) -> bool:
    tensors = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)
    return tensors and outputs.dim() > 1 and targets.dim() > 0 and not targets.is_floating_point()


def as_step_output(value: Any) -> StepOutput:
    """Checks what a `training_step` returned. Raises TypeError."""
    if isinstance(value, torch.Tensor):
        value = StepOutput(value)
    if not isinstance(value, StepOutput) or not isinstance(value.loss, torch.Tensor) or value.loss.dim() != 0:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if isinstance(value, StepOutput):
            shape = (
                tuple(value.loss.shape) if isinstance(value.loss, torch.Tensor) else type(value.loss).__name__
            )
        raise TypeError(f"training_step must return a 0-d loss tensor or a StepOutput with one, not {shape}")
    return value


def takes_optimizer_name(task: Task) -> bool:
    """Whether `training_step` has the keyword that tells it which optimizer's turn it is."""
    return "optimizer" in inspect.signature(task.training_step).parameters
