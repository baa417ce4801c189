"""From the config's `parameters`, `optimizer` and `scheduler` sections to parameter groups and
their objects."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raytrainer.errors import ConfigError, Problem

if TYPE_CHECKING:
    from raytrainer.config import ParametersSection

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


def freeze(model: nn.Module, patterns: list[str]) -> list[str]:
    """Turns off gradients for parameters whose name a pattern is found in; returns their names.

    Raises ConfigError for a pattern that fits no parameter, and when nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen = []
    for position, pattern in enumerate(patterns):
        hits = [name for name in names if re.search(pattern, name)]
        if not hits:
            raise _no_match(f"parameters.freeze[{position}]", pattern, names)
        frozen += hits
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if names and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            Problem("config", "parameters.freeze", "every parameter is frozen: nothing is left to train")
        )
    return frozen


def parameter_groups(model: nn.Module, section: ParametersSection) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, in the order of the model's parameters, frozen ones left out.

    A parameter belongs to the first of `parameters.groups` whose pattern is found in its name;
    no_decay: norms_and_biases puts norms and biases into groups of their own with weight_decay 0.
    """
    undecayed = _norms_and_biases(model) if section.no_decay == "norms_and_biases" else set()
    settings = [group.keywords for group in section.groups]
    patterns = [group.match for group in section.groups]
    groups: dict[tuple[int | None, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            index = next((i for i, pattern in enumerate(patterns) if re.search(pattern, name)), None)
            groups.setdefault((index, name in undecayed), []).append(parameter)
    for index, pattern in enumerate(patterns):
        if not any(key[0] == index for key in groups):
            raise _no_match(
                f"parameters.groups[{index}].match",
                pattern,
                [name for name, p in model.named_parameters() if p.requires_grad],
            )
    return [
        {
            "params": parameters,
            **({} if index is None else settings[index]),
            **({"weight_decay": 0.0} if no_decay else {}),
        }
        for (index, no_decay), parameters in groups.items()
    ]


def _norms_and_biases(model: nn.Module) -> set[str]:
    names = set()
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            if isinstance(module, _NORMS) or name == "bias" or name.endswith("_bias"):
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


def _no_match(path: str, pattern: str, names: list[str]) -> ConfigError:
    some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return ConfigError(
        Problem(
            "config",
            path,
            "no parameter of the model has a name in which this is found",
            pattern,
            f"names are: {some}",
        )
    )


def warmup_cosine(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    warmup_steps: int | float = 0.05,
    min_lr_ratio: float = 0.0,
) -> torch.optim.lr_scheduler.LambdaLR:
    """A linear warm-up to each group's own lr, then half a cosine down to min_lr_ratio of it at total_steps.

    warmup_steps: a number of steps, or a share of total_steps when below 1. One `step()` an optimizer step.
    """
    num_warmup = math.ceil(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)

    def ratio(step: int) -> float:
        if step < num_warmup:
            return (step + 1) / num_warmup
        progress = min(1.0, (step - num_warmup) / max(1, total_steps - num_warmup))
        return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, ratio)


def copy_options(optimizer: torch.optim.Optimizer) -> list[Mapping[str, Any]]:
    """Each parameter group's options without its parameters, for messages and tests."""
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
