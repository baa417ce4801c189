"""The state as it was after the last finished step, which every rank holds while the next one is under way.

When a peer dies, the others fail or hang in a collective operation, before the optimizer has changed
anything: any of them can still write a whole checkpoint, from another thread if need be. For that, nothing is
read while it is being changed, and buffers that the forward pass changes on rank 0 alone (BatchNorm's) are
known to every rank as they were after the last finished step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from raytrainer.distributed import Process

if TYPE_CHECKING:
    from raytrainer.checkpoint import Snapshot
    from raytrainer.state import TrainState


class FinishedStep:
    """Guards `state` so that it can be copied, as of the last finished step, from any thread.

    A task with state of its own cannot be looked after, since only rank 0's counts and the step under way may
    have changed it: then there is nothing to copy, and neither is there between the updates of a step of
    several optimizers.
    """

    def __init__(self, state: TrainState, process: Process, device: torch.device):
        self._state, self._process, self._device = state, process, device
        self._lock = threading.Lock()
        self._whole = not state.task.state_dict()
        self._can_be_whole = self._whole
        self._names: list[str] | None = None
        self._buffers: torch.Tensor | None = None
        self._next_buffers: torch.Tensor | None = None
        self._updated: torch.cuda.Event | None = None

    @property
    def step(self) -> int | None:
        """The last finished step, None while the state is not whole."""
        return self._state.progress.step if self._whole else None

    def exchange(self, buffers: list[torch.Tensor]) -> None:
        """Before a step is finished: tells all ranks what rank 0's microbatch 0 left in `buffers`."""
        if self._process.world_size == 1 or not buffers:
            return
        if self._names is None:
            names = {id(buffer): name for name, buffer in self._state.model.named_buffers()}
            self._names = [names[id(buffer)] for buffer in buffers]
        flat = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
        dist.broadcast(flat, src=0)
        self._next_buffers = flat

    def tear(self) -> None:
        """From here to the end of the step the state is between two steps."""
        self._whole = False

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """While open the state may change; afterwards it is that of a finished step."""
        with self._lock:
            self._whole = False
            yield
            if self._next_buffers is not None:
                self._buffers, self._next_buffers = self._next_buffers, None
            if self._device.type == "cuda":
                self._updated = self._updated or torch.cuda.Event()
                self._updated.record()
            self._whole = self._can_be_whole

    def snapshot(self, take: Callable[[], Snapshot]) -> Snapshot | None:
        """What `take` copies of the state, with the buffers of the last finished step; None if not whole."""
        with self._lock, self._beside_the_stuck_stream():
            if not self._whole:
                return None
            snapshot = take()
            self._put_back_buffers(snapshot.model, "")
            if snapshot.training["ema"] is not None:
                self._put_back_buffers(snapshot.training["ema"], "module.")
            return snapshot

    def _put_back_buffers(self, state_dict: dict[str, Any], prefix: str) -> None:
        if self._buffers is None or self._names is None:
            return
        flat, position = self._buffers.cpu(), 0
        for name in self._names:
            kept = state_dict.get(prefix + name)
            buffer = self._state.model.get_buffer(name)
            size = buffer.numel() * buffer.element_size()
            if kept is not None:
                # A copy: a view into the bytes need not be aligned.
                content = flat[position : position + size].clone().view(buffer.dtype)
                state_dict[prefix + name] = content.reshape(buffer.shape)
            position += size

    @contextlib.contextmanager
    def _beside_the_stuck_stream(self) -> Iterator[None]:
        """On a GPU: a stream that waits for the last update only, not for the collective that hangs."""
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self._device)
        if self._updated is not None:
            stream.wait_event(self._updated)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield
            stream.synchronize()
