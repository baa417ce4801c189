"""How the trials of a pack stand: kept in each one's status.json, shown while they run, and summed up."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from raytrainer.cluster.signals import StopSignal
from raytrainer.pack import status as files
from raytrainer.pack.machines import PackSettings
from raytrainer.pack.status import TrialStatus
from raytrainer.pack.table import Screen, counts, row, shown
from raytrainer.storage import Storage

DRAW_S = 0.25
# A running trial's status.json is written this often.
STATUS_S = 5.0
# Without a terminal, a line about what runs.
PROGRESS_S = 30.0


class Statuses:
    """By number of the trial. time_s: of the attempt that runs."""

    def __init__(
        self, statuses: Iterable[TrialStatus], settings: PackSettings, storage: Storage, screen: Screen
    ):
        self._status = {status.trial: status for status in statuses}
        self._settings, self._storage, self._screen = settings, storage, screen
        self.time_s: dict[int, float] = {}
        self._written_s: dict[int, float] = {}
        self._drawn_s = 0.0
        self._said_s = time.monotonic()

    def __getitem__(self, trial: int) -> TrialStatus:
        return self._status[trial]

    def __len__(self) -> int:
        return len(self._status)

    @property
    def waiting(self) -> list[int]:
        return [status.trial for status in self._status.values() if status.state == "waiting"]

    def keep(self, status: TrialStatus) -> None:
        """Takes it in, and writes it."""
        self._status[status.trial] = status
        self._written_s[status.trial] = time.monotonic()
        self._storage.write(f"{status.name}/{files.STATUS_FILE}", status.to_json())

    def keep_if_due(self, trial: int) -> None:
        if time.monotonic() - self._written_s.get(trial, 0.0) > STATUS_S:
            self.keep(self._status[trial])

    def observe(self, trial: int, record: dict[str, Any]) -> None:
        """One record of a trial's metrics."""
        self._status[trial] = self._status[trial].observed(record, self._settings.metric)

    def measured(self, trial: int, rss_gib: float) -> None:
        self._status[trial] = replace(self._status[trial], memory_gib=rss_gib)

    # Shown

    def say_end(self, trial: int, again: bool = False, alone: bool = False) -> None:
        """again: it goes back into the queue; alone: for a card of its own."""
        status, metric = self._status[trial], self._settings.metric
        text = f"{status.name} {status.message}"
        if status.cause == "finished" and metric in status.metrics:
            text += f", {metric} {status.metrics[metric]:.4g}"
        if again:
            text += "; it is started again" + (", alone on its card" if alone else "")
        self._screen.say(text)

    def draw(self, running: Sequence[int]) -> None:
        """The table, or without a terminal a line now and then about those that run."""
        now_s = time.monotonic()
        if now_s - self._drawn_s < DRAW_S:
            return
        self._drawn_s = now_s
        if not self._screen.is_interactive and now_s - self._said_s >= PROGRESS_S:
            self._said_s = now_s
            self._say_progress(running)
        self._screen.draw(self._rows(), self._counts())

    def _say_progress(self, running: Sequence[int]) -> None:
        parts = []
        for trial in running[:4]:
            cells = row(self._status[trial], self._settings.metric, 0.0)
            parts.append(f"{cells[0]} step {cells[3]} {cells[4]}")
        self._screen.say("; ".join([self._counts(), *parts]))

    def _counts(self) -> str:
        return counts(list(self._status.values()))

    def _rows(self) -> list[list[str]]:
        rows = []
        for status in shown(list(self._status.values())):
            running_s = self.time_s[status.trial] if status.state == "running" else 0.0
            rows.append(row(status, self._settings.metric, status.time_s + running_s))
        return rows

    # In the end

    def conclude(self, stop: StopSignal, directory: str) -> int:
        """Writes the results, names the best trial, and gives the exit code."""
        statuses = list(self._status.values())
        metric, mode = files.choose_metric(statuses, self._settings.metric), self._settings.metric_mode
        files.write_results(self._storage, statuses, metric, mode)
        self._screen.draw(self._rows(), self._counts())
        self._screen.close()
        if metric is not None and not stop.requested:
            with suppress(ImportError, OSError):
                files.draw_results(Path(self._storage.path(f"{files.RESULTS}.png")), statuses, metric, mode)
        self._screen.say(f"{self._counts()}; {self._storage.path(files.RESULTS)}.csv")
        if stop.requested:
            self._screen.say(f"stopped; to go on: raytrainer pack --resume {directory}")
        best = files.best_of(statuses, metric, mode)
        if best is not None:
            step = best.metric_steps.get(metric)
            at = "" if step is None else f" at step {step}"
            self._screen.say(
                f"best: {metric} {best.metrics[metric]:.4g}{at}: {self._storage.path(best.name)}"
            )
        return stop.exit_code or files.worst_exit_code(statuses)
