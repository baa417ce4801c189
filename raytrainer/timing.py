"""Where the time of the steps goes, at the cost of two clock readings a microbatch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch


class StepTimer:
    """Sums up the steps since the last logged one: their rate, and the share of time spent waiting for
    data."""

    def __init__(self) -> None:
        self.gradient_norm: torch.Tensor | None = None
        self._reset()

    def _reset(self) -> None:
        self._started = time.perf_counter()
        self._data_wait_s = 0.0
        self._outside_s = 0.0
        self._num_samples = 0

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; the time that each is waited for counts as data wait."""
        while True:
            before = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._data_wait_s += time.perf_counter() - before
            yield batch

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Evaluation and saving: not part of the steps."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._outside_s += time.perf_counter() - before

    def step(self, num_samples: int) -> None:
        """Counts a finished step."""
        self._num_samples += num_samples

    def window(self) -> dict[str, Any]:
        """samples_per_s and data_time_pct since the last call."""
        wall_s = max(1e-9, time.perf_counter() - self._started - self._outside_s)
        values = {
            "samples_per_s": round(self._num_samples / wall_s, 1),
            "data_time_pct": round(100 * self._data_wait_s / wall_s, 1),
        }
        if self.gradient_norm is not None:
            values["grad_norm"] = self.gradient_norm
        self._reset()
        return values
