"""From summed gradients to new parameters: clipping, the scaler, the optimizer, its schedule, the average."""

from __future__ import annotations

import warnings

import torch

from raytrainer.state import TrainState


def update(state: TrainState, name: str, clip_norm: float | None) -> torch.Tensor | None:
    """One step of optimizer `name`; returns the norm of its gradients before clipping, if they are clipped.

    With fp16's scaler the optimizer leaves the step out where a gradient overflowed.
    """
    optimizer, scaler = state.optimizers[name], state.scaler
    norm = None
    if clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    advanced = True
    if scaler is None:
        optimizer.step()
    else:
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        advanced = scaler.get_scale() >= scale
        state.progress.skipped_updates += not advanced
    follow_update(state, name, advanced)
    return norm


def follow_update(state: TrainState, name: str, advanced: bool = True) -> None:
    """What follows a step of optimizer `name`: its schedule, and the average after the last optimizer."""
    schedule = state.schedules.get(name)
    if advanced and schedule is not None and schedule.interval == "step":
        schedule.scheduler.step()
    if state.ema is not None and name == list(state.optimizers)[-1]:
        state.ema.update_parameters(state.model)


def advance_schedules(state: TrainState, interval: str, value: float | None = None) -> None:
    """Advances the schedules that go by "epoch" or by "eval", the latter with the monitored value."""
    for schedule in state.schedules.values():
        if schedule.interval == interval:
            with warnings.catch_warnings():
                # True of this process alone, when the run was resumed right after an epoch's last step.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                schedule.scheduler.step(*(() if value is None else (value,)))
