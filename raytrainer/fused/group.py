"""The steps of a group of fused trials, all of which stand at the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from raytrainer.errors import RaytrainerError, UsageError
from raytrainer.fused.stack import Stack
from raytrainer.fused.trial import FusedTrial

# Told of a trial that has ended: its status, or the error that ended it.
Ended = Callable[[FusedTrial, str | RaytrainerError], None]


class Group:
    """trials: opened, at the same step, with more to do. Raises UsageError for what cannot be fused, before
    anything is written or changed."""

    def __init__(self, trials: Sequence[FusedTrial], ended: Ended):
        self._trials, self._ended = list(trials), ended
        refuse(trials[0].state.model)
        self._stack = self._stacked()
        sample = trials[0].first_samples()
        try:
            self._gradients([[sample]] * len(trials), sample.num_samples)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            # vmap's word for it, or the user's own mistake: run alone, the trials will say which.
            raise UsageError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error

    def train(self) -> None:
        """Until every trial has ended; what goes wrong in one ends that one."""
        for trial in self._trials:
            trial.begin()
        while True:
            for trial in list(self._trials):
                self._attend(trial)
            if not self._trials:
                return
            if self._stack.size != len(self._trials):
                self._stack = self._stacked()
            losses, norms = self._step(self._collect())
            for index, trial in enumerate(list(self._trials)):
                try:
                    trial.finish(losses[index], None if norms is None else norms[index])
                except RaytrainerError as error:
                    self._leave(trial, error)

    def _attend(self, trial: FusedTrial) -> None:
        """What is due between two steps."""
        try:
            status = trial.between_steps(trial.stopping)
        except RaytrainerError as error:
            status = error
        if status is not None:
            self._leave(trial, status)

    def _leave(self, trial: FusedTrial, how: str | RaytrainerError) -> None:
        self._trials.remove(trial)
        self._ended(trial, how)

    def _stacked(self) -> Stack:
        optimizers = [trial.state.optimizers[""] for trial in self._trials]
        return Stack([trial.state.model for trial in self._trials], optimizers)

    def _collect(self) -> list[list[Any]]:
        """The microbatches by trial. Trials of one seed have the same, and share them."""
        read: dict[int, list[Any]] = {}
        for trial in self._trials:
            seed = trial.config.seed
            read[seed] = trial.collect(read.get(seed))
        return [read[trial.config.seed] for trial in self._trials]

    def _step(self, batches: list[list[Any]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients and update of all trials; their losses and norms before clipping, [N]."""
        grads, losses = self._gradients(batches, self._trials[0].num_samples)
        return losses, self._stack.step(grads, self._trials[0].config.training.gradient_clip_norm)

    def _gradients(
        self, batches: list[list[Any]], num_samples: int
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """By name [N, ...], of each trial's mean loss over the step's samples; and those losses, [N]."""
        stack, first = self._stack, self._trials[0]
        sums: dict[str, torch.Tensor] = {}
        losses = torch.zeros((), device=first.device)
        for parts in zip(*batches, strict=True):
            share = parts[0].num_samples / num_samples
            inputs, targets, dim = _together(parts)
            step = _step_of(stack.module, first.state.task.loss, share)
            grads, values = vmap(step, in_dims=(0, 0, dim, dim), randomness="error")(
                stack.trained, stack.fixed, inputs, targets
            )
            sums = {name: sums[name] + grad for name, grad in grads.items()} if sums else grads
            losses = losses + values.detach()
        return sums, losses


def refuse(model: nn.Module) -> None:
    """Raises UsageError for modules whose training is more than a function of parameters and batch."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise UsageError(f"{name} is a {kind}, with running statistics")
        rate = getattr(module, "p", getattr(module, "dropout", 0.0))
        draws = isinstance(module, nn.modules.dropout._DropoutNd | nn.RNNBase | nn.MultiheadAttention)
        if draws and rate:
            raise UsageError(f"{name} is a {kind}: what it drops could not be that of the trial run alone")


def _together(parts: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """(inputs, targets, the dimension of the trials in them, None when all have the same)."""
    for part in parts:
        batch = part.batch
        is_pair = isinstance(batch, list | tuple) and len(batch) == 2
        if not is_pair or not all(isinstance(each, torch.Tensor) for each in batch):
            raise UsageError("a batch is not a pair of tensors (inputs, targets)")
    if all(part is parts[0] for part in parts):
        return parts[0].batch[0], parts[0].batch[1], None
    return torch.stack([p.batch[0] for p in parts]), torch.stack([p.batch[1] for p in parts]), 0


def _step_of(module: nn.Module, loss: Callable[..., torch.Tensor], share: float) -> Callable[..., Any]:
    def share_of_loss(trained: Any, fixed: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(functional_call(module, {**trained, **fixed}, (inputs,)), targets) * share

    return grad_and_value(share_of_loss)
