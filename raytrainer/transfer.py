"""Batches to the device ahead of the step that needs them: pinned memory, a stream of its own, nothing waited
for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """The same nesting with every tensor on `device`; anything with a `.to` of its own is asked for it."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: to_device(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch


def ahead_of_use(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """LoadedMicrobatches on `device`: on a GPU the next is on its way while this one is computed."""
    if device.type != "cuda":
        return batches
    return _CudaPrefetch(batches, device)


class _CudaPrefetch:
    def __init__(self, batches: Iterator[Any], device: torch.device):
        self._batches, self._device = batches, device
        self._stream = torch.cuda.Stream(device)
        self._next: Any = None
        self._error: BaseException | None = None
        self._fetch()

    def _fetch(self) -> None:
        try:
            loaded = next(self._batches)
            with torch.cuda.stream(self._stream):
                self._next = replace(loaded, batch=to_device(loaded.batch, self._device))
        except BaseException as error:  # raised where this batch is asked for, after those before it
            self._next, self._error = None, error

    def __iter__(self) -> _CudaPrefetch:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        loaded = self._next
        _record_stream(loaded.batch, current)
        self._fetch()
        return loaded


def _record_stream(batch: Any, stream: torch.cuda.Stream) -> None:
    """Keeps the allocator from handing the memory out again while `stream` still reads it."""
    if isinstance(batch, torch.Tensor):
        batch.record_stream(stream)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            _record_stream(value, stream)
    elif isinstance(batch, list | tuple):
        for value in batch:
            _record_stream(value, stream)
