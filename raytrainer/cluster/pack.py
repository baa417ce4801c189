"""`raytrainer pack`: the queue of trials, their starts and ends, whatever runs them.

Decisions are `raytrainer.pack`'s; a `Backend` (this machine, or Ray) has the processes. Runs in the process
that the user started, which imports no torch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from raytrainer.cluster.pack_auto import measured_count
from raytrainer.cluster.pack_process import TrialStart
from raytrainer.cluster.pack_start import make_folder, trial_start
from raytrainer.cluster.signals import StopSignal, stop_on_signals
from raytrainer.errors import ResumeError, TrainingError, UsageError
from raytrainer.pack import status as files
from raytrainer.pack.cause import OUT_OF_MEMORY, TrialEnd, cause_of, is_retried
from raytrainer.pack.machines import (
    MachineFacts,
    PackSettings,
    check_placeable,
    nodes_of,
    request_of,
    share_on,
)
from raytrainer.pack.plan import Node, Placement, plan
from raytrainer.pack.search import Search
from raytrainer.pack.share import loader_workers, shm_notice
from raytrainer.pack.status import TrialStatus
from raytrainer.pack.table import Screen, counts, plan_table, row
from raytrainer.pack.trials import Trial
from raytrainer.rundir import release_lock, take_lock
from raytrainer.storage import Storage, open_storage

# How long a trial that is told to stop may take to save: what a pod has.
STOP_GRACE_S = 25.0
POLL_S = 0.25
# A running trial's status.json is written this often.
STATUS_S = 5.0
# Without a terminal, a line about what runs.
PROGRESS_S = 30.0


class Backend(Protocol):
    """Whatever runs trials: nodes by name, each with its trials."""

    def machines(self) -> Mapping[str, MachineFacts]:
        """The nodes that are there now."""
        ...

    def start(self, node: str, start: TrialStart) -> None: ...

    def end(self, node: str, trial: int, reason: str, number: int, grace_s: float | None = None) -> None: ...

    def news(self, timeout_s: float) -> list[dict[str, Any]]:
        """See `TrialHost.news`. A lost node's trials end with a TrialEnd that has `lost`."""
        ...

    def close(self) -> None:
        """Nothing of the trials is left after this."""
        ...


def pack(
    trials: Sequence[Trial],
    settings: PackSettings,
    directory: str,
    *,
    backend: Callable[[], Backend],
    resume: bool = False,
    screen: Screen | None = None,
) -> int:
    """Runs the trials and returns the exit code: the worst trial's, or that of the signal that stopped it.

    directory: of the search; trial_000 and so on are made in it. backend: makes it, once all is checked.
    resume: go on with what has not finished. Raises UsageError for what cannot be run.
    """
    if "://" in directory:
        raise UsageError(
            f"storage_path {directory}\n  trials write their logs to a folder, not to an object store\n"
            "  write storage_path: runs"
        )
    storage = open_storage(directory)
    storage.make_folder()
    lock = take_lock(storage)
    screen = screen or Screen()
    try:
        statuses = _begin(storage, trials, settings, resume)
        if all(status.state in ("finished", "pruned") for status in statuses):
            screen.say(f"{directory} is finished: {counts(statuses)}; to start over, give it another name")
            return 0
        stop = StopSignal()
        with stop_on_signals(stop):
            running = backend()
            try:
                if settings.per_gpu == "auto":
                    settings = _measured(trials, statuses, settings, storage, running, screen, stop)
                run = _Pack(trials, statuses, settings, directory, running, screen, stop)
                return run.run()
            finally:
                running.close()
    finally:
        screen.close()
        release_lock(lock)


def _begin(
    storage: Storage, trials: Sequence[Trial], settings: PackSettings, resume: bool
) -> list[TrialStatus]:
    if storage.exists(files.PACK_FILE) and not resume:
        before, _, _ = files.read_pack(storage)
        if [(t.command, t.values) for t in before] != [(t.command, t.values) for t in trials]:
            raise ResumeError(
                f"{storage.root} was begun with other trials\n"
                "  give this search another name, or go on with those: "
                f"raytrainer pack --resume {storage.root}"
            )
    files.write_pack(storage, trials, settings.to_mapping(), os.getcwd())
    for trial in trials:
        make_folder(storage, trial)
    return [files.to_resume(files.read_status(storage, trial)) for trial in trials]


def _measured(
    trials: Sequence[Trial],
    statuses: Sequence[TrialStatus],
    settings: PackSettings,
    storage: Storage,
    backend: Backend,
    screen: Screen,
    stop: StopSignal,
) -> PackSettings:
    """With a number in place of `per_gpu: auto`, which a later --resume takes over."""
    waiting = {status.trial for status in statuses if status.state == "waiting"}
    first = [trial for trial in trials if trial.index in waiting]
    count = measured_count(first, settings, storage.root, backend, screen, stop)
    if not count:
        return settings
    settings = replace(settings, per_gpu=count)
    files.write_pack(storage, trials, settings.to_mapping(), os.getcwd())
    return settings


def dry_run(trials: Sequence[Trial], settings: PackSettings, machines: Mapping[str, MachineFacts]) -> str:
    """The plan in words: what would start at once, where, with how much; nothing is started."""
    nodes = nodes_of(machines, settings, len(trials))
    check_placeable(list(trials), nodes, settings)
    placements = _plan(nodes, [request_of(trial, settings) for trial in trials], [], settings)
    shares = [(placement, share_on(placement, nodes, machines)) for placement in placements]
    text = plan_table(trials, shares, len(trials) - len(placements))
    if settings.per_gpu == "auto":
        text += "\nper_gpu: auto is measured at the start; this is the plan without it"
    return text


def _plan(
    nodes: list[Node], waiting: list, running: list[Placement], settings: PackSettings
) -> list[Placement]:
    return plan(nodes, waiting, running, settings.strategy, settings.avoid_gpu_nodes)


class _Pack:
    """One run of a pack's queue."""

    def __init__(
        self,
        trials: Sequence[Trial],
        statuses: Sequence[TrialStatus],
        settings: PackSettings,
        directory: str,
        backend: Backend,
        screen: Screen,
        stop: StopSignal,
    ):
        self._trials = {trial.index: trial for trial in trials}
        self._status = {status.trial: status for status in statuses}
        self._settings, self._directory, self._backend = settings, directory, backend
        self._storage = open_storage(directory)
        self._screen, self._stop = screen, stop
        self._search = Search.of_settings(settings.search, settings.metric, settings.metric_mode)
        self._search.resume(statuses)
        self._queue = [status.trial for status in statuses if status.state == "waiting"]
        self._running: dict[int, Placement] = {}
        # Trials that are next given a card for themselves.
        self._alone: set[int] = set()
        self._ended_early: set[int] = set()
        self._retries: dict[int, int] = {}
        self._time_s: dict[int, float] = {}
        self._written_s: dict[int, float] = {}
        self._last_start_s: dict[tuple[str, str], float] = {}
        self._told = False
        self._killed = False
        self._drawn_s = 0.0
        self._said_s = time.monotonic()
        self._machines = backend.machines()
        self._nodes = nodes_of(self._machines, settings, len(trials))

    def run(self) -> int:
        check_placeable(list(self._trials.values()), self._nodes, self._settings)
        self._say_beginning()
        while self._running or (self._queue and not self._stop.requested):
            if self._stop.requested:
                self._pass_on_stop()
            else:
                self._start_what_fits()
            for news in self._backend.news(self._wait_s()):
                self._take(news)
            self._draw()
        return self._conclude()

    def _say_beginning(self) -> None:
        slots = sum(node.num_slots for node in self._nodes)
        cards = sum(len(node.cards) for node in self._nodes)
        at_once = min(slots, len(self._queue))
        done = len(self._status) - len(self._queue)
        text = f"{_count(len(self._queue), 'trial')}, {at_once} at once on {_count(cards, 'card')}"
        self._screen.say(text + (f"; {done} had finished before" if done else ""))
        for node in self._nodes:
            facts = self._machines[node.name]
            workers = loader_workers(self._settings.threads or node.threads_per_trial)
            count = min(node.num_slots, len(self._queue))
            if self._settings.mps and not any(card.is_gpu for card in node.cards):
                self._screen.say(f"warning: mps: there is no GPU to share on {node.name or 'this machine'}")
            notice = shm_notice(facts.shm_free_gib, count, workers, self._settings.shm_gib)
            if notice:
                self._screen.say(f"warning: {notice}")

    # Starts

    def _start_what_fits(self) -> None:
        self._look_at_nodes()
        requests = [
            request_of(self._trials[index], self._settings, index in self._alone) for index in self._queue
        ]
        now_s = time.monotonic()
        for placement in _plan(self._nodes, requests, list(self._running.values()), self._settings):
            if now_s - self._last_start_s.get(placement.key, -1e9) < self._settings.stagger_s:
                continue
            self._last_start_s[placement.key] = now_s
            self._start(placement)

    def _start(self, placement: Placement) -> None:
        trial = self._trials[placement.trial]
        start, share = trial_start(
            trial, placement, self._nodes, self._machines, self._settings, self._storage
        )
        self._queue.remove(trial.index)
        self._running[trial.index] = placement
        more = {"loader_workers": share.loader_workers, "rss_cap_gib": round(share.rss_cap_gib, 4)}
        self._keep(self._status[trial.index].started(placement, more))
        self._time_s[trial.index] = 0.0
        place = f"{placement.node}/{placement.card}" if placement.node else placement.card
        self._screen.say(
            f"{trial.name} starts on {place}, slot {placement.slot}"
            + (", alone" if placement.alone else "")
            + (
                ": " + " ".join(f"{key}={value}" for key, value in trial.values.items())
                if trial.values
                else ""
            )
        )
        self._backend.start(placement.node, start)

    def _wait_s(self) -> float:
        if not self._queue or self._stop.requested:
            return POLL_S
        return min(POLL_S, max(0.01, self._settings.stagger_s))

    # Ends

    def _take(self, news: dict[str, Any]) -> None:
        index = news["trial"]
        if index not in self._running:
            return
        self._time_s[index] = news.get("time_s", self._time_s[index])
        if "mps" in news:
            self._note_mps(index, news["mps"])
        status = self._status[index]
        for record in news.get("records", ()):
            status = status.observed(record, self._settings.metric)
            why = self._search.why_end(index, record)
            if why is not None and "end" not in news and index not in self._ended_early:
                self._end_early(index, why)
        self._status[index] = replace(status, memory_gib=news.get("rss_gib", status.memory_gib))
        if "end" in news:
            self._ended(index, news["end"])
        elif news.get("records") and time.monotonic() - self._written_s.get(index, 0.0) > STATUS_S:
            self._keep(self._status[index])

    def _note_mps(self, index: int, why_not: str) -> None:
        status = self._status[index]
        self._keep(replace(status, place={**status.place, "mps": not why_not}))
        if why_not:
            self._screen.say(f"warning: MPS does not serve {status.name}, it takes turns: {why_not}")

    def _end_early(self, index: int, why: str) -> None:
        self._ended_early.add(index)
        self._screen.say(f"trial_{index:03d} is ended early, {why}")
        self._backend.end(self._running[index].node, index, "pruned", signal.SIGTERM, STOP_GRACE_S)

    def _ended(self, index: int, end: TrialEnd) -> None:
        placement = self._running.pop(index)
        cause = cause_of(end)
        retries = self._retries.get(index, 0)
        again = not self._stop.requested and is_retried(
            cause, retries, self._settings.retries, placement.alone
        )
        status = self._status[index].ended(cause, end.peak_gib, self._time_s[index], again)
        self._keep(status)
        if again:
            self._retries[index] = retries + 1
            if cause.kind in OUT_OF_MEMORY:
                self._alone.add(index)
            self._queue.insert(0, index)
        self._screen.say(
            _describe_end(status, self._settings.metric, again, placement.alone, index in self._alone)
        )

    def _look_at_nodes(self) -> None:
        """A node may have been lost since."""
        machines = self._backend.machines()
        if machines.keys() == self._machines.keys():
            return
        if not machines:
            raise TrainingError(
                "no node is left to run trials on\n"
                f"  what has finished is kept; go on with raytrainer pack --resume {self._directory}"
            )
        self._machines = machines
        self._nodes = nodes_of(machines, self._settings, len(self._trials))

    def _pass_on_stop(self) -> None:
        if not self._told:
            self._told = True
            self._screen.say(f"stopping {len(self._running)} trials; once more stops them at once")
            number = getattr(signal, self._stop.requested, signal.SIGTERM)
            for index, placement in self._running.items():
                self._backend.end(placement.node, index, "stopped", number, STOP_GRACE_S)
        if self._stop.immediate and not self._killed:
            self._killed = True
            for index, placement in self._running.items():
                self._backend.end(placement.node, index, "stopped", signal.SIGKILL)

    # What is kept and shown

    def _keep(self, status: TrialStatus) -> None:
        self._status[status.trial] = status
        self._written_s[status.trial] = time.monotonic()
        self._storage.write(f"{status.name}/{files.STATUS_FILE}", status.to_json())

    def _draw(self) -> None:
        now_s = time.monotonic()
        if now_s - self._drawn_s >= POLL_S:
            self._drawn_s = now_s
            if not self._screen.is_interactive:
                self._say_progress(now_s)
            self._screen.draw(self._rows(), counts(list(self._status.values())))

    def _say_progress(self, now_s: float) -> None:
        """Without a terminal: a line now and then."""
        if now_s - self._said_s < PROGRESS_S:
            return
        self._said_s = now_s
        parts = []
        for index in list(self._running)[:4]:
            status = self._status[index]
            cells = row(status, self._settings.metric, 0.0)
            parts.append(f"{status.name} step {cells[3]} {cells[4]}")
        self._screen.say("; ".join([counts(list(self._status.values())), *parts]))

    def _rows(self) -> list[list[str]]:
        from raytrainer.pack.table import shown

        return [
            row(
                status,
                self._settings.metric,
                status.time_s + (self._time_s[status.trial] if status.state == "running" else 0.0),
            )
            for status in shown(list(self._status.values()))
        ]

    def _conclude(self) -> int:
        statuses = list(self._status.values())
        metric, mode = files.choose_metric(statuses, self._settings.metric), self._settings.metric_mode
        files.write_results(self._storage, statuses, metric, mode)
        self._screen.draw(self._rows(), counts(statuses))
        self._screen.close()
        if metric is not None and not self._stop.requested:
            with suppress(ImportError, OSError):
                files.draw_results(Path(self._storage.path(f"{files.RESULTS}.png")), statuses, metric, mode)
        self._screen.say(f"{counts(statuses)}; {self._storage.path(files.RESULTS)}.csv")
        if self._stop.requested:
            self._screen.say(f"stopped; to go on: raytrainer pack --resume {self._directory}")
        best = files.best_of(statuses, metric, mode)
        if best is not None:
            step = best.metric_steps.get(metric)
            at = "" if step is None else f" at step {step}"
            self._screen.say(
                f"best: {metric} {best.metrics[metric]:.4g}{at}: {self._storage.path(best.name)}"
            )
        return self._stop.exit_code or files.worst_exit_code(statuses)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _describe_end(
    status: TrialStatus, metric: str | None, again: bool, was_alone: bool, next_alone: bool
) -> str:
    text = f"{status.name} {status.message}"
    if status.cause == "finished" and metric in status.metrics:
        text += f", {metric} {status.metrics[metric]:.4g}"
    if again:
        text += "; it is started again" + (", alone on its card" if next_alone else "")
    return text
