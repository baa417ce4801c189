"""`raytrainer validate --deep`: imports the targets, binds their signatures and reads the data
set's length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raytrainer import build
from raytrainer.config import callable_from, check_target, locate, names_places, takes

if TYPE_CHECKING:
    from raytrainer.config import Config


@names_places
def deep_report(config: Config) -> str:
    """What a run would do, in a few lines. Raises TargetError or DataError for what it could not do.

    Makes the data sets, since only they know their length, and nothing else: no model, no GPU, no cluster.
    """
    for at, target, positional in _targets(config):
        check_target(target, *positional, at=at)
    _check_scheduler(config.scheduler_target)
    callable_from(config.data.collate_fn, at="data.collate_fn")
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
        + (
            f", the last of {last.num_samples} samples"
            if last.num_samples < config.data.global_batch_size
            else ""
        ),
        f"total steps: {num_steps}",
    ]
    return "\n".join(f"# {line}" for line in lines)


def _check_scheduler(target: Any) -> None:
    """The run adds the optimizer, and total_steps where the target takes it and does not have it."""
    if isinstance(target, dict):
        locate(target["_target_"], "scheduler")
        offers = {"total_steps": 1} if takes(target, "total_steps", "scheduler") else {}
        check_target(target, None, at="scheduler", **offers)


def _workers(config: Config) -> str:
    low, high = config.scaling.min_workers, config.scaling.max_workers
    number = f"{high}" if low == high else f"{low} to {high}"
    return f"{number} worker{'s' if high > 1 else ''}"


def _targets(config: Config) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Every target with its place and the positional arguments that the run adds, whose values do
    not matter."""
    named = [
        ("data.train", config.data.train, ()),
        ("data.eval", config.data.eval, ()),
        ("model", config.model, ()),
        ("loss", config.loss, ()),
        ("optimizer", config.optimizer, (None,)),
        ("task", config.task, ()),
        *((f"metrics.{name}", target, ()) for name, target in config.metrics.items()),
    ]
    return [(at, target, positional) for at, target, positional in named if target is not None]
