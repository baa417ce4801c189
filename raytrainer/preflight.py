"""`raytrainer validate --deep`: imports the targets, binds their signatures and reads the data set's length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raytrainer import build
from raytrainer.config import locate
from raytrainer.config.instantiate import bind_target

if TYPE_CHECKING:
    from raytrainer.config import Config


def deep_report(config: Config) -> str:
    """What a run would do, in a few lines. Raises TargetError or DataError for what it could not do.

    Makes the data sets, since only they know their length, and nothing else: no model, no GPU, no cluster.
    """
    for at, target, offered in _targets(config):
        if isinstance(target, dict):
            bind_target(target, at=at, offered=offered)
        elif isinstance(target, str):
            locate(target, at=at)
    data = build.build_data(config)
    sampler = build.build_sampler(config, data, 0, 1)
    num_steps = config.training.total_steps(sampler.steps_per_epoch)
    last = sampler.plan(sampler.steps_per_epoch - 1)
    lines = [
        f"training samples: {len(data.train)}",
        *([f"evaluation samples: {len(data.eval)}"] if data.eval is not None else []),
        f"global batch: {config.data.global_batch_size} samples, {config.num_microbatches} microbatches "
        f"of {config.data.micro_batch_size}, on {_workers(config)}",
        f"steps an epoch: {sampler.steps_per_epoch}"
        + (f", the last of {last.num_samples} samples" if last.num_samples < config.data.global_batch_size else ""),
        f"total steps: {num_steps}",
    ]
    return "\n".join(f"# {line}" for line in lines)


def _workers(config: Config) -> str:
    low, high = config.scaling.min_workers, config.scaling.max_workers
    number = f"{high}" if low == high else f"{low} to {high}"
    return f"{number} worker{'s' if high > 1 else ''}"


def _targets(config: Config) -> list[tuple[str, Any, tuple[int, set[str]]]]:
    """Every target with its place, and what the run adds to its call: positional arguments and keywords."""
    nothing: tuple[int, set[str]] = (0, set())
    named = [
        ("data.train", config.data.train, nothing),
        ("data.eval", config.data.eval, nothing),
        ("data.order", config.data.order, (0, {"dataset"})),
        ("data.collate_fn", config.data.collate_fn, nothing),
        ("model", config.model, nothing),
        ("loss", config.loss, nothing),
        ("optimizer", config.optimizer, (1, set())),
        ("scheduler", config.scheduler_target, (1, {"total_steps"})),
        ("task", config.task, nothing),
        *((f"metrics.{name}", target, nothing) for name, target in config.metrics.items()),
    ]
    return [(at, target, offered) for at, target, offered in named if target is not None]
