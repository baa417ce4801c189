"""Parameters, buffers and optimizer states of several trials as one tensor each, theirs being views of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from raytrainer.errors import UsageError
from raytrainer.fused.optim import State, clip, new_state, options_of, step_of


class Stack:
    """models: of one architecture; optimizers: of one kind, for each model its own.

    trained: by name, [N, ...] with the trained parameters of all; fixed: the others, and the buffers. What
    the trials hold are views of these from now on. Raises UsageError where models differ in shape.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]):
        self.module, self.size = models[0], len(models)
        self._optimizers = list(optimizers)
        self.trained: dict[str, torch.Tensor] = {}
        self.fixed: dict[str, torch.Tensor] = {}
        self._states: dict[str, State] = {}
        self._group_of: dict[str, int] = {}
        shapes = [[(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()] for m in models]
        if any(other != shapes[0] for other in shapes):
            raise UsageError("their models differ in shape")
        parameters = [dict(model.named_parameters()) for model in models]
        groups = {id(p): number for number, p in _with_group(optimizers[0])}
        for name, first in parameters[0].items():
            stacked = torch.stack([own[name].detach() for own in parameters])
            for own, value in zip(parameters, stacked, strict=True):
                own[name].data = value
            (self.trained if first.requires_grad else self.fixed)[name] = stacked
            if first.requires_grad:
                self._group_of[name] = groups[id(first)]
                self._states[name] = self._stack_states([own[name] for own in parameters], name, stacked)
        for name, _ in models[0].named_buffers():
            own = [model.get_buffer(name) for model in models]
            self.fixed[name] = stacked = torch.stack(own)
            for model, value in zip(models, stacked, strict=True):
                path, _, last = name.rpartition(".")
                model.get_submodule(path)._buffers[last] = value

    def _stack_states(self, parameters: list[nn.Parameter], name: str, values: torch.Tensor) -> State:
        groups = self._groups(name)
        stacked = new_state(self._optimizers[0], groups, values)
        for index, (optimizer, parameter) in enumerate(zip(self._optimizers, parameters, strict=True)):
            own = optimizer.state[parameter]
            for key, value in stacked.items():
                if isinstance(own.get(key), torch.Tensor):
                    value[index] = own[key]
                own[key] = value[index]
        return stacked

    def _groups(self, name: str) -> list[dict]:
        return [optimizer.param_groups[self._group_of[name]] for optimizer in self._optimizers]

    def step(self, grads: dict[str, torch.Tensor], clip_norm: float | None) -> torch.Tensor | None:
        """One optimizer step of every trial with [N, ...] gradients; the norms before clipping, [N], if they
        are clipped."""
        norms = None if clip_norm is None else clip(list(grads.values()), clip_norm)
        apply = step_of(self._optimizers[0])
        options = {}
        for name, values in self.trained.items():
            number = self._group_of[name]
            if number not in options:
                options[number] = options_of(self._groups(name), values.device)
            apply(values, grads[name], self._states[name], options[number])
        return norms


def _with_group(optimizer: torch.optim.Optimizer) -> list[tuple[int, nn.Parameter]]:
    return [(number, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"]]
