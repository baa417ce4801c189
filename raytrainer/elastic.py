"""Whether to change the number of workers: pure decisions of plain numbers, acted on by the backends."""

from __future__ import annotations

from dataclasses import dataclass

# Before a restart has been measured.
DEFAULT_RESTART_S = 30.0


@dataclass(frozen=True)
class Situation:
    """What is known when a decision is due.

    current: workers now; available: how many there is room for, those of this run included; min_workers,
    max_workers: of the config; num_microbatches: of a step; left_s: what is left of the run at the current
    pace, None if not known; restart_s: from the last step at one size to the first at another.
    """

    current: int
    available: int
    min_workers: int
    max_workers: int
    num_microbatches: int
    left_s: float | None = None
    restart_s: float = DEFAULT_RESTART_S


@dataclass(frozen=True)
class Resize:
    """to: the number of workers from now on; why: a few words for the console."""

    to: int
    why: str


def starting_size(available: int, min_workers: int, max_workers: int) -> int | None:
    """How many workers to start with, None where there is no room for the fewest."""
    size = min(available, max_workers)
    return size if size >= min_workers else None


def decide(now: Situation) -> Resize | None:
    """The change worth making, None for none.

    Room that goes away is left at once, down to the fewest allowed. Room that comes is used when what is left
    of the run gets shorter by more than a restart takes; a step takes as long as the worker with the most
    microbatches.
    """
    size = starting_size(now.available, now.min_workers, now.max_workers)
    if size is None or size == now.current:
        return None
    if size < now.current:
        return Resize(size, f"room for {now.available} is left")
    return Resize(size, f"room for {now.available}") if gain_s(now, size) > now.restart_s else None


def gain_s(now: Situation, size: int) -> float:
    """The seconds by which the rest of the run gets shorter on `size` workers, the restart not counted."""
    longest_now = -(-now.num_microbatches // now.current)
    longest_then = -(-now.num_microbatches // size)
    if longest_then >= longest_now:
        return 0.0
    if now.left_s is None:
        return float("inf")
    return now.left_s * (1 - longest_then / longest_now)
