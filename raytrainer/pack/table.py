"""What the user sees while trials run: a table that redraws itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from raytrainer.console import format_duration
from raytrainer.pack.plan import Placement
from raytrainer.pack.share import Share
from raytrainer.pack.status import TrialStatus
from raytrainer.pack.trials import Trial
from raytrainer.table import as_table

HEAD = ("TRIAL", "CARD", "STATE", "STEP", "METRIC", "MEMORY", "TIME")
# Of a long queue, the terminal shows what runs and what ended last.
MAX_ROWS = 30


def row(status: TrialStatus, metric: str | None, time_s: float) -> list[str]:
    """time_s: of all its attempts, the running one included."""
    place = status.place if status.state != "waiting" else {}
    card = f"{place['node']}/{place['card']}" if place.get("node") else place.get("card", "")
    name = metric if metric in status.metrics else next(reversed(status.metrics), None)
    memory = status.memory_gib if status.state == "running" else status.peak_memory_gib
    state = status.state if status.state != "failed" else f"failed: {status.cause}"
    return [
        status.name,
        f"{card} slot {place['slot']}" if card else "-",
        state,
        "-" if status.step is None else str(status.step),
        "-" if name is None else f"{name} {status.metrics[name]:.4g}",
        f"{memory:.2f} GiB" if memory else "-",
        format_duration(time_s) if time_s else "-",
    ]


def shown(statuses: Sequence[TrialStatus]) -> list[TrialStatus]:
    """The rows that fit: running ones first to be kept, then the ended ones, in the trials' order."""
    if len(statuses) <= MAX_ROWS:
        return list(statuses)
    rank = {"running": 0, "failed": 1, "finished": 2}
    kept = sorted(statuses, key=lambda status: (rank.get(status.state, 3), -status.trial))[:MAX_ROWS]
    return sorted(kept, key=lambda status: status.trial)


def counts(statuses: Sequence[TrialStatus]) -> str:
    """3 running, 2 finished, 1 failed, 4 waiting"""
    order = ("running", "finished", "failed", "pruned", "stopped", "waiting")
    number = {state: sum(status.state == state for status in statuses) for state in order}
    return ", ".join(f"{number[state]} {state}" for state in order if number[state])


def plan_table(trials: Sequence[Trial], rounds: Sequence[tuple[Placement, Share]], num_waiting: int) -> str:
    """The plan of `--dry-run`: what would start at once, and how many would wait."""
    by_index = {trial.index: trial for trial in trials}
    rows = []
    for placement, share in rounds:
        values = by_index[placement.trial].values
        rows.append(
            [
                by_index[placement.trial].name,
                f"{placement.node}/{placement.card}" if placement.node else placement.card,
                str(placement.slot),
                f"{placement.memory_gib:.2f} GiB",
                str(placement.threads),
                str(share.loader_workers),
                " ".join(f"{key}={_short(value)}" for key, value in values.items()) or "-",
            ]
        )
    head = ("TRIAL", "CARD", "SLOT", "MEMORY CAP", "THREADS", "LOADER WORKERS", "VALUES")
    text = as_table(head, rows)
    return f"{text}\n{num_waiting} more wait for a slot" if num_waiting else text


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Screen:
    """Shows the trials on `stream`, until it is closed; a reader that goes away ends the output alone."""

    def __init__(self, stream: TextIO | None = None, interactive: bool | None = None):
        self._stream = stream or sys.stdout
        if interactive is None:
            interactive = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._live: Any = None
        self._gone = False
        if interactive:
            from rich.console import Console
            from rich.live import Live

            terminal = Console(file=self._stream, force_terminal=True, highlight=False, markup=False)
            self._live = Live("", console=terminal, auto_refresh=False)
            self._live.start()

    @property
    def is_interactive(self) -> bool:
        """Whether there is a table to redraw."""
        return self._live is not None

    def say(self, text: str) -> None:
        """A line, above the table."""
        if self._gone:
            return
        try:
            if self._live is not None:
                self._live.console.print(text)
            else:
                self._stream.write(f"{text}\n")
                self._stream.flush()
        except BrokenPipeError:
            self._gone = True
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def draw(self, rows: Sequence[Sequence[str]], foot: str) -> None:
        """Redraw the table; nothing without a terminal."""
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(f"{as_table(HEAD, rows)}\n{foot}"), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
