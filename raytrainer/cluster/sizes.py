"""How many ranks there can be now, and what to make of it: what the backends' resizing has in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from raytrainer.cluster.signals import StopSignal
from raytrainer.console import Pace
from raytrainer.elastic import DEFAULT_RESTART_S, Resize, Situation, decide, starting_size


class SizeSource(Protocol):
    """Says for how many ranks there is room, those that run included, and tells when that changes."""

    def available(self) -> int: ...

    def listening(self, callback: Callable[[], None]) -> Any: ...


class Slots:
    """Room for a number of ranks that is set from outside, from any thread."""

    def __init__(self, count: int):
        self._count = count
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def available(self) -> int:
        return self._count

    def set(self, count: int) -> None:
        """There is room for `count` ranks from now on."""
        with self._lock:
            self._count = count
            listeners = tuple(self._listeners)
        for callback in listeners:
            callback()

    @contextmanager
    def listening(self, callback: Callable[[], None]) -> Iterator[None]:
        """Calls `callback` after each change, in the thread that makes it; it must not block."""
        with self._lock:
            self._listeners.append(callback)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(callback)


def wait_for_room(
    sizes: SizeSource, bounds: Bounds, stop: StopSignal, on_record: Callable[[dict], None]
) -> int | None:
    """The size to start with, once there is room for the fewest ranks; None once a stop was asked for."""
    changed = threading.Event()
    with sizes.listening(changed.set), stop.listening(changed.set):
        told = False
        while not stop.requested:
            size = starting_size(sizes.available(), bounds.min_workers, bounds.max_workers)
            if size is not None:
                return size
            if not told:
                told = True
                message = f"there is room for {sizes.available()} of at least {bounds.min_workers} workers"
                on_record({"event": "waiting", "message": message})
            changed.wait()
            changed.clear()
    return None


@dataclass(frozen=True)
class Bounds:
    """What the config allows: fewest and most workers, and the microbatches of a step."""

    min_workers: int
    max_workers: int
    num_microbatches: int


class Resizing:
    """Watches a run's records and measures restarts, to ask the policy with what is known by now.

    An event "resized" is made of the first record of a group that has another size than the one before.
    """

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self._pace = Pace()
        self._total_steps: int | None = None
        self._restart_s = DEFAULT_RESTART_S
        self._ended_s: float | None = None
        self._size: int | None = None
        self._size_before: int | None = None
        self._why = ""

    def decide(self, current: int, available: int) -> Resize | None:
        """The change that is worth making to a group of `current` ranks."""
        left_s = self._pace.left_s(self._total_steps)
        bounds = self.bounds
        return decide(
            Situation(
                current,
                available,
                bounds.min_workers,
                bounds.max_workers,
                bounds.num_microbatches,
                left_s,
                self._restart_s,
            )
        )

    def ended(self, why: str) -> None:
        """The group is to be left, or has been lost, just now; why: for the event."""
        self._ended_s = time.monotonic()
        self._why = why

    def started(self, size: int) -> None:
        """A group of `size` ranks is being started."""
        self._size_before, self._size = self._size, size
        self._pace = Pace()

    def observe(self, record: dict) -> dict | None:
        """Takes a record of rank 0; gives the event "resized" when this is the first of another size."""
        if record.get("event") == "resumed" and self._ended_s is not None:
            seconds = time.monotonic() - self._ended_s
            self._restart_s, self._ended_s = seconds, None
            if self._size_before is None or self._size_before == self._size:
                return None
            return {
                "event": "resized",
                "from": self._size_before,
                "to": self._size,
                "step": record["step"],
                "lost_steps": record.get("lost_steps"),
                "seconds": round(seconds, 2),
                "why": self._why,
            }
        if "step" in record and "loss" in record:
            self._total_steps = record.get("total_steps", self._total_steps)
            self._pace.add(record["step"], record.get("time_s", time.time()))
        return None
