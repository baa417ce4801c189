"""Evaluation over exact shards: each sample once, sums merged in a fixed order in float64 on rank 0.

Every rank gets the same numbers back, so that all decide alike.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from raytrainer.distributed import Process, broadcast_object, gather_objects
from raytrainer.errors import DataError
from raytrainer.task import EvaluationOutput, Task

Metrics = dict[str, Any]


def evaluate(
    model: nn.Module,
    task: Task,
    batches: Iterable[Any],
    metrics: Metrics,
    process: Process,
    device: torch.device,
    autocast: Any = contextlib.nullcontext,
) -> dict[str, float]:
    """The mean loss (as "loss") and every metric over the whole evaluation data.

    batches: this rank's LoadedMicrobatches, in order and on the device; metrics: torchmetrics by name, reset
    here.
    """
    for metric in metrics.values():
        metric.reset()
    parts: list[tuple[int, Any, Any]] = []
    with _evaluating(model), torch.inference_mode(), autocast():
        for loaded in batches:
            if loaded.num_samples == 0:
                continue
            task.indices = loaded.indices
            output = task.evaluation_step(loaded.batch)
            if not isinstance(output, EvaluationOutput):
                raise TypeError(
                    f"evaluation_step must return an EvaluationOutput, not {type(output).__name__}"
                )
            if output.loss is not None:
                weight = loaded.num_samples if output.weight is None else output.weight
                parts.append((loaded.microbatch.number, output.loss.detach(), weight))
            if output.targets is not None:
                for metric in metrics.values():
                    metric.update(output.predictions, output.targets)
    numbers = [(number, float(loss), float(weight)) for number, loss, weight in parts]
    gathered = gather_objects((numbers, {name: _state(metric) for name, metric in metrics.items()}), process)
    return broadcast_object(_merge(gathered, metrics) if process.is_first else None, process.world_size)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _state(metric: Any) -> tuple[dict[str, Any], int]:
    """A metric's accumulated state, in host memory, and how often it was updated."""
    state = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        state[name] = [item.cpu() for item in value] if isinstance(value, list) else value.cpu()
    return state, metric._update_count


def _merge(
    gathered: list[tuple[list[tuple[int, float, float]], dict[str, Any]]], metrics: Metrics
) -> dict[str, float]:
    values: dict[str, float] = {}
    losses = sorted(part for numbers, _ in gathered for part in numbers)
    total = sum(weight for _, _, weight in losses)
    if total > 0:
        values["loss"] = sum(loss * weight for _, loss, weight in losses) / total
    for name, metric in metrics.items():
        merged = copy.deepcopy(metric).cpu()
        merged.reset()
        # The states are here already: a metric must not ask the other ranks for them once more.
        merged.sync_on_compute = merged._to_sync = False
        for _, states in gathered:
            state, num_updates = states[name]
            if num_updates:
                _add_state(merged, state, num_updates)
        if merged._update_count == 0:
            continue
        values.update(_as_numbers(name, merged.compute()))
    return values


def _add_state(merged: Any, state: dict[str, Any], num_updates: int) -> None:
    if merged._update_count == 0:
        for name, value in state.items():
            setattr(merged, name, value)
        merged._update_count = num_updates
        return
    incoming = copy.deepcopy(merged)
    incoming.reset()
    for name, value in state.items():
        setattr(incoming, name, value)
    incoming._update_count = num_updates
    merged.merge_state(incoming)
    merged._update_count += num_updates


def _as_numbers(name: str, value: Any) -> dict[str, float]:
    """A metric's answer as numbers: a mapping gives name/key, a vector name/0, name/1 ..."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _as_numbers(f"{name}/{key}", item).items()}
    tensor = torch.as_tensor(value)
    if tensor.numel() == 1:
        return {name: tensor.item()}
    return {f"{name}/{index}": item for index, item in enumerate(tensor.flatten().tolist())}


def check_metric(name: str, metric: Any) -> None:
    """Raises DataError for a metric that cannot be merged over ranks."""
    from torchmetrics import Metric

    if not isinstance(metric, Metric):
        raise DataError(
            f"metrics.{name} is a {type(metric).__name__}, not a torchmetrics Metric\n"
            "  a metric must say how its state is merged over ranks; write one as a torchmetrics.Metric"
        )
    if not metric._defaults:
        raise DataError(
            f"metrics.{name}: a {type(metric).__name__} wraps other metrics and has no state of its own\n"
            "  give the metrics inside one by one, or average over classes with the metric's own keyword"
        )
