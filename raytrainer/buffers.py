"""Which buffers a forward pass changes, and whose change counts: that of microbatch 0, always rank 0's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raytrainer.distributed import broadcast_tensors


class StepBuffers:
    """Keeps every buffer that the forward pass changes as microbatch 0 left it.

    BatchNorm is told not to update its running statistics elsewhere, and does not read them in training. Any
    other buffer that is seen to change in the first step is put back after each microbatch, so that all of a
    step's microbatches find the same, and is taken over from rank 0 after the step.
    """

    def __init__(self, model: nn.Module):
        self._norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        in_norms = {id(buffer) for norm in self._norms for buffer in norm.buffers()}
        self._all = [buffer for buffer in model.buffers() if id(buffer) not in in_norms]
        self._first_step: int | None = None
        self._positions = list(range(len(self._all)))
        self._known: list[int] = []
        self._seen: set[int] = set()
        self._after_first: dict[int, torch.Tensor] = {}

    @property
    def watching(self) -> bool:
        """Whether this is the first step, in which all count as changing."""
        return len(self._positions) == len(self._all)

    def begin(self, step: int) -> None:
        """A step, or the turn of one of its optimizers, starts."""
        if self._first_step is None:
            self._first_step = step
        elif self._first_step != step:
            self._positions = self._known

    def seen_to_change(self) -> list[int]:
        """The positions of those that microbatch 0 has changed on this rank."""
        return sorted(self._seen)

    def learn(self, positions: list[int]) -> None:
        """Looks after these from now on: what rank 0 has seen to change."""
        self._known = sorted({*self._known, *positions})

    def share(self, world_size: int) -> None:
        """Takes over from rank 0 what its microbatch 0 changed."""
        for position, value in self._after_first.items():
            self._all[position].copy_(value)
        self._after_first = {}
        broadcast_tensors([self._all[position] for position in self._known], world_size)

    @contextlib.contextmanager
    def around(self, microbatch: int) -> Iterator[None]:
        """Around a microbatch's forward and backward pass."""
        is_first = microbatch == 0
        buffers = {position: self._all[position] for position in self._positions}
        kept = {position: (buffer.clone(), buffer._version) for position, buffer in buffers.items()}
        for norm in self._norms:
            norm.track_running_stats = is_first
        try:
            yield
        finally:
            for norm in self._norms:
                norm.track_running_stats = True
            for position, (value, version) in kept.items():
                buffer = buffers[position]
                if buffer._version == version:
                    continue
                if is_first:
                    self._seen.add(position)
                    self._after_first[position] = buffer.clone()
                buffer.copy_(value)
