"""Which trials of a config can train as one model, and why the others cannot; pure, from configs alone.

What only the model itself shows (BatchNorm, dropout, a loss that calls `.item()`) is found when the fused
trials are set up: they run as processes then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raytrainer.pack.trials import Trial

if TYPE_CHECKING:
    from raytrainer.config import Config

# What fused trials may differ in.
OWN_KEYS = (
    *("seed", "optimizer.lr", "optimizer.weight_decay", "optimizer.momentum", "optimizer.betas"),
    "optimizer.eps",
)
# Its steps are written for many sets of numbers at once in `raytrainer.fused.optim`.
OPTIMIZERS = ("torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW")


def why_not(config: Config) -> str | None:
    """Why trials of this config cannot be fused at all; None when nothing in it speaks against it."""
    training, data = config.training, config.data
    target = config.optimizer.get("_target_") if isinstance(config.optimizer, dict) else None
    options = config.optimizer if isinstance(config.optimizer, dict) else {}
    reasons = {
        "task: a training step of your own": config.task is not None,
        f"optimizer: {target}, where fused trials take {', '.join(OPTIMIZERS)}": target not in OPTIMIZERS,
        "optimizer: an option such as amsgrad, maximize or dampening": any(
            options.get(name) for name in ("amsgrad", "maximize", "dampening", "differentiable")
        ),
        f"training.precision: {training.precision}": training.precision != "fp32",
        "training.compile": training.compile,
        f"training.determinism: {training.determinism}": training.determinism != "order",
        f"training.on_nan: {training.on_nan}": training.on_nan != "stop",
        f"data.on_bad_sample: {data.on_bad_sample}": data.on_bad_sample != "stop",
        "logging.ledger": config.logging.ledger,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def with_groups(trials: Sequence[Trial], base: Config) -> tuple[list[Trial], list[str]]:
    """The trials, those that are fused with the number of their group; and a line for each reason why some
    are not."""
    reason = why_not(base)
    if reason is not None:
        return list(trials), [f"not fused, they run as processes: {reason}"]
    groups: dict[str, list[int]] = {}
    for trial in trials:
        groups.setdefault(_key(trial), []).append(trial.index)
    numbers = [members for members in groups.values() if len(members) > 1]
    group_of = {index: number for number, members in enumerate(numbers) for index in members}
    alone = [trial.name for trial in trials if trial.index not in group_of]
    said = []
    if alone:
        shown = ", ".join(alone[:4]) + (f" and {len(alone) - 4} more" if len(alone) > 4 else "")
        keys = ", ".join(OWN_KEYS)
        said = [f"{shown}: not fused, since no other trial differs from it in {keys} alone"]
    return [replace(trial, group=group_of.get(trial.index)) for trial in trials], said


def _key(trial: Trial) -> str:
    """Equal for trials that may be fused with one another."""
    others: dict[str, Any] = {key: value for key, value in trial.values.items() if key not in OWN_KEYS}
    limits = (trial.timeout_s, trial.memory_gib, trial.threads)
    return json.dumps([others, limits], sort_keys=True, default=str)
