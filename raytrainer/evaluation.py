"""Evaluation over exact shards: each sample once, sums merged in a fixed order in float64 on rank 0.

Every rank gets the same numbers back, so that all decide alike.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
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
    *,
    seed: Callable[[int], None] = lambda microbatch: None,
    bitwise: bool = False,
) -> dict[str, float]:
    """The mean loss (as "loss") and every metric over the whole evaluation data.

    batches: this rank's LoadedMicrobatches, in order and on the device; metrics: torchmetrics by name, reset
    here; seed: called before each microbatch; bitwise: the same bits whatever the number of ranks, for which
    the state of a metric that adds fractions is kept a microbatch.
    """
    states = {
        name: _MetricState(metric, each=bitwise and not _is_exact(metric)) for name, metric in metrics.items()
    }
    parts: list[tuple[int, Any, Any]] = []
    with _evaluating(model), torch.inference_mode(), autocast():
        for loaded in batches:
            if loaded.num_samples == 0:
                continue
            task.indices = loaded.indices
            seed(loaded.microbatch.number)
            output = task.evaluation_step(loaded.batch)
            if not isinstance(output, EvaluationOutput):
                raise TypeError(
                    f"evaluation_step must return an EvaluationOutput, not {type(output).__name__}"
                )
            if output.loss is not None:
                weight = loaded.num_samples if output.weight is None else output.weight
                parts.append((loaded.microbatch.number, output.loss.detach(), weight))
            if output.targets is not None:
                for state in states.values():
                    state.update(output.predictions, output.targets)
    numbers = [(number, float(loss), float(weight)) for number, loss, weight in parts]
    gathered = gather_objects((numbers, {name: state.taken() for name, state in states.items()}), process)
    return broadcast_object(_merge(gathered, metrics) if process.is_first else None, process.world_size)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


_EXACT_IN_ANY_ORDER = ("dim_zero_max", "dim_zero_min")


def _is_exact(metric: Any) -> bool:
    """Whether merging a metric's state over ranks gives the same bits wherever the data are cut.

    True of whole numbers, of extremes, and of lists, which keep the order of the samples.
    """
    for name, default in metric._defaults.items():
        reduction = getattr(metric._reductions[name], "__name__", None)
        if isinstance(default, list):
            if reduction not in ("dim_zero_cat", None):
                return False
        elif reduction not in _EXACT_IN_ANY_ORDER and not (
            reduction == "dim_zero_sum" and not default.is_floating_point()
        ):
            return False
    return True


class _MetricState:
    """What a metric gathers on this rank: one state, or one for each microbatch."""

    def __init__(self, metric: Any, each: bool):
        self._metric, self._each = metric, each
        self._states: list[tuple[dict[str, Any], int]] = []
        metric.reset()

    def update(self, predictions: Any, targets: Any) -> None:
        if self._each:
            self._metric.reset()
        self._metric.update(predictions, targets)
        if self._each:
            self._states.append(_state(self._metric))

    def taken(self) -> list[tuple[dict[str, Any], int]]:
        """The states, in the order of the microbatches."""
        return self._states if self._each else [_state(self._metric)]


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
        _take_states(merged, [entry for _, states in gathered for entry in states[name] if entry[1]])
        if merged._update_count == 0:
            continue
        values.update(_as_numbers(name, merged.compute()))
    return values


def _take_states(merged: Any, entries: list[tuple[dict[str, Any], int]]) -> None:
    """Gives a metric the states of several, which come in the order of the samples, as one."""
    if not entries:
        return
    counts = [num_updates for _, num_updates in entries]
    for name in merged._defaults:
        values = [state[name] for state, _ in entries]
        value = values[0] if len(values) == 1 else _reduced(merged._reductions[name], values, counts)
        setattr(merged, name, value)
    merged._update_count = sum(counts)


def _reduced(reduction: Callable[..., Any] | None, values: list[Any], counts: list[int]) -> Any:
    """As torchmetrics merges the states of several processes, except that a mean is weighted by updates."""
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if getattr(reduction, "__name__", None) == "dim_zero_mean":
        return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)
    if getattr(reduction, "__name__", None) == "dim_zero_cat":
        return torch.cat(values)
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


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
