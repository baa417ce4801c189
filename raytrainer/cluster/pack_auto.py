"""`per_gpu: auto`: measures one trial, then two on the same card, and so on, and keeps the count that pays.

What is measured are the first trials of the queue, in directories of their own, which are ended afterwards:
each trial's own run starts anew, with the threads of the count that was chosen.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raytrainer.cluster.pack_start import make_folder, trial_start
from raytrainer.cluster.signals import StopSignal
from raytrainer.errors import TrainingError, UsageError
from raytrainer.pack.auto import (
    GAIN,
    Probe,
    Report,
    best_count,
    evidence,
    fills_the_card,
    next_count,
    rate_of,
)
from raytrainer.pack.cause import OUT_OF_MEMORY, TrialEnd, cause_of
from raytrainer.pack.machines import PackSettings, check_placeable, nodes_of, request_of
from raytrainer.pack.plan import Node, Placement, candidates, plan
from raytrainer.pack.table import Screen
from raytrainer.pack.trials import Trial
from raytrainer.storage import open_storage

if TYPE_CHECKING:
    from raytrainer.cluster.pack import Backend

# How long a trial may take until it has reported enough steps.
REPORTS_S = 900.0
POLL_S = 0.25
FOLDER = "auto"


def measured_count(
    trials: Sequence[Trial],
    settings: PackSettings,
    directory: str,
    backend: Backend,
    screen: Screen,
    stop: StopSignal,
) -> int:
    """Trials on a card, after saying why; 0 when a stop was asked for.

    Raises UsageError for trials that fill a card or cannot be measured, TrainingError when one fails.
    """
    probes: list[Probe] = []
    while (count := next_count(probes, len(trials))) is not None:
        screen.say(f"per_gpu: auto: measuring {count} on a card")
        measuring = _Measuring(trials[:count], settings, directory, backend, stop)
        try:
            probe = measuring.run()
        finally:
            measuring.end()
        if stop.requested:
            return 0
        probes.append(probe)
    shutil.rmtree(os.path.join(directory, FOLDER), ignore_errors=True)
    screen.say(evidence(probes))
    if fills_the_card(probes):
        second = probes[1]
        why = (
            second.why or f"two together were {second.steps_per_s / probes[0].steps_per_s:.2f} times as fast"
        )
        raise UsageError(
            f"per_gpu: auto\n  one trial fills the card already: {why} (asked for: {GAIN:g} or more)\n"
            "  write per_gpu: 1 for one after the other on each card"
        )
    count = best_count(probes)
    screen.say(f"per_gpu: auto: {count} on each card")
    return count


class _Measuring:
    """So many trials together on the first card that takes them."""

    def __init__(
        self,
        trials: Sequence[Trial],
        settings: PackSettings,
        directory: str,
        backend: Backend,
        stop: StopSignal,
    ):
        self._trials = {trial.index: trial for trial in trials}
        self._settings = replace(settings, per_gpu=len(trials), timeout_s=None)
        self._storage = open_storage(os.path.join(directory, FOLDER, str(len(trials))))
        self._backend, self._stop = backend, stop
        self._running: dict[int, Placement] = {}
        self._steps: dict[int, Report] = {}
        # Since all have reported a step.
        self._window: dict[int, list[Report]] = {}
        self._peak_gib = 0.0

    def run(self) -> Probe:
        count = len(self._trials)
        machines = self._backend.machines()
        nodes = nodes_of(machines, self._settings, count)
        if count == 1:
            check_placeable(list(self._trials.values()), nodes, self._settings)
        requests = [request_of(trial, self._settings) for trial in self._trials.values()]
        placements = plan(_one_card(nodes, requests[0], self._settings), requests)
        if len(placements) < count:
            return Probe(count, None, why="no room for their memory or threads")
        shutil.rmtree(self._storage.path(), ignore_errors=True)
        for placement in placements:
            trial = self._trials[placement.trial]
            make_folder(self._storage, trial)
            start, _ = trial_start(trial, placement, nodes, machines, self._settings, self._storage)
            self._running[trial.index] = placement
            self._backend.start(placement.node, start)
        return self._measure()

    def _measure(self) -> Probe:
        count, began_s = len(self._trials), time.monotonic()
        while not self._stop.requested:
            for news in self._backend.news(POLL_S):
                self._take(news)
                if "end" in news:
                    return self._ended(news["trial"], news["end"])
            if len(self._steps) == count and not self._window:
                self._window = {index: [] for index in self._trials}
            rate = rate_of(self._window, self._settings.probe_s)
            if rate is not None:
                return Probe(count, rate, self._peak_gib)
            if time.monotonic() - began_s > REPORTS_S:
                raise UsageError(
                    f"per_gpu: auto\n  too few steps were reported in {REPORTS_S:g} s to measure them\n"
                    '  have the trials print lines such as {"step": 10} more often, or write per_gpu: 2'
                )
        return Probe(count, None)

    def _take(self, news: dict) -> None:
        index = news["trial"]
        self._peak_gib = max(self._peak_gib, news.get("rss_gib", 0.0))
        for record, time_s in zip(news.get("records", ()), news.get("times_s", ()), strict=True):
            step, own_s = record.get("step"), record.get("time_s")
            if isinstance(step, int | float) and index in self._running:
                # Its own clock is as in a run's metrics.jsonl; ours is of when the record came here.
                self._steps[index] = Report(own_s if isinstance(own_s, int | float) else time_s, step)
                if self._window:
                    self._window[index].append(self._steps[index])

    def _ended(self, index: int, end: TrialEnd) -> Probe:
        del self._running[index]
        cause, trial = cause_of(end), self._trials[index]
        if cause.kind in OUT_OF_MEMORY and len(self._trials) > 1:
            return Probe(len(self._trials), None, max(self._peak_gib, end.peak_gib), "out of memory")
        if not cause.is_failure:
            raise UsageError(
                f"per_gpu: auto\n  {trial.name} was over before its rate could be measured for "
                f"{self._settings.probe_s:g} s\n"
                '  have it print lines such as {"step": 10}, write a smaller probe_s, or per_gpu: 2'
            )
        raise TrainingError(
            f"per_gpu: auto: {trial.name} failed while it was measured: {cause.message}\n"
            f"  its output is in {self._storage.path(trial.name)}/stdout.log"
        )

    def end(self) -> None:
        """What was measured is over; nothing of it runs when this returns."""
        for index, placement in self._running.items():
            self._backend.end(placement.node, index, "stopped", signal.SIGKILL)
        while self._running:
            for news in self._backend.news(POLL_S):
                if "end" in news:
                    self._running.pop(news["trial"], None)


def _one_card(nodes: list[Node], request: object, settings: PackSettings) -> list[Node]:
    """The first node that could take the request, with one card and that card's part of the cores."""
    for node in nodes:
        for _, card in candidates([node], request, settings.avoid_gpu_nodes):
            cores = max(1, node.cores // len(node.cards))
            return [replace(node, cards=(card,), cores=cores)]
    return []
