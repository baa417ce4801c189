"""The queue of `raytrainer pack`: starts trials as planned, takes in what becomes of them, ends them."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raytrainer.cluster.pack_fused import END_FILE, FusedGroup, cause_of_member, describe, groups_of
from raytrainer.cluster.pack_start import trial_start
from raytrainer.cluster.pack_statuses import Statuses
from raytrainer.cluster.signals import StopSignal
from raytrainer.errors import TrainingError
from raytrainer.pack.cause import OUT_OF_MEMORY, Cause, TrialEnd, cause_of, is_retried
from raytrainer.pack.machines import PackSettings, check_placeable, nodes_of, request_of
from raytrainer.pack.plan import Placement, Request, plan
from raytrainer.pack.search import Search
from raytrainer.pack.share import loader_workers, shm_notice
from raytrainer.pack.status import TrialStatus
from raytrainer.pack.table import Screen
from raytrainer.pack.trials import Trial
from raytrainer.storage import open_storage

if TYPE_CHECKING:
    from raytrainer.cluster.pack import Backend

# How long a trial that is told to stop may take to save: what a pod has.
STOP_GRACE_S = 25.0
POLL_S = 0.25


class Queue:
    """One run of a pack: its trials wait, run and end here."""

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
        self._settings, self._directory, self._backend = settings, directory, backend
        self._storage = open_storage(directory)
        self._screen, self._stop = screen, stop
        self._statuses = Statuses(statuses, settings, self._storage, screen)
        self._search = Search.of_settings(settings.search, settings.metric, settings.metric_mode)
        self._search.resume(statuses)
        self._queue = self._statuses.waiting
        self._groups: dict[int, FusedGroup] = {}
        self._group_of: dict[int, int] = {}
        self._why_not_fused: dict[int, str] = {}
        self._running: dict[int, Placement] = {}
        # Trials that are next given a card for themselves.
        self._alone: set[int] = set()
        self._ended_early: set[int] = set()
        self._retries: dict[int, int] = {}
        self._last_start_s: dict[tuple[str, str], float] = {}
        self._told = False
        self._killed = False
        self._machines = backend.machines()
        self._nodes = nodes_of(self._machines, settings, len(trials))

    def _take_groups_out(self) -> None:
        """Fused trials wait as one, before the others."""
        waiting = [self._trials[index] for index in self._queue]
        for group in groups_of(waiting, self._directory, self._settings.timeout_s):
            self._groups[group.index] = group
            self._group_of |= dict.fromkeys(group.members, group.index)
            self._storage.make_folder(group.name)
        alone = [index for index in self._queue if index not in self._group_of]
        self._queue = [*self._groups, *alone]

    def run(self) -> int:
        self._take_groups_out()
        check_placeable(list(self._trials.values()), self._nodes, self._settings)
        self._say_beginning()
        while self._running or (self._queue and not self._stop.requested):
            if self._stop.requested:
                self._pass_on_stop()
            else:
                self._start_what_fits()
            for news in self._backend.news(self._wait_s()):
                self._take(news)
            self._statuses.draw([each for index in self._running for each in self._trials_of(index)])
        return self._statuses.conclude(self._stop, self._directory)

    def _say_beginning(self) -> None:
        slots = sum(node.num_slots for node in self._nodes)
        cards = sum(len(node.cards) for node in self._nodes)
        at_once = min(slots, len(self._queue))
        waiting = len(self._statuses.waiting)
        done = len(self._statuses) - waiting
        running = f"{at_once} at once" if not self._groups else f"{_count(len(self._groups), 'group')} fused"
        text = f"{_count(waiting, 'trial')}, {running} on {_count(cards, 'card')}"
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
        requests = [self._request_of(index) for index in self._queue]
        now_s = time.monotonic()
        for placement in self._plan(requests):
            if now_s - self._last_start_s.get(placement.key, -1e9) < self._settings.stagger_s:
                continue
            self._last_start_s[placement.key] = now_s
            self._start(placement)

    def _plan(self, requests: list[Request]) -> list[Placement]:
        settings, running = self._settings, list(self._running.values())
        return plan(self._nodes, requests, running, settings.strategy, settings.avoid_gpu_nodes)

    def _request_of(self, index: int) -> Request:
        if index in self._groups:
            return request_of(self._groups[index], self._settings, alone=True)
        return request_of(self._trials[index], self._settings, index in self._alone)

    def _start(self, placement: Placement) -> None:
        index = placement.trial
        trial = self._groups[index] if index in self._groups else self._trials[index]
        start, share = trial_start(
            trial, placement, self._nodes, self._machines, self._settings, self._storage
        )
        self._queue.remove(index)
        self._running[index] = placement
        self._statuses.time_s[index] = 0.0
        more = {"loader_workers": share.loader_workers, "rss_cap_gib": round(share.rss_cap_gib, 4)}
        for each in self._trials_of(index):
            self._statuses.keep(self._statuses[each].started(placement, more))
            self._statuses.time_s[each] = 0.0
        place = f"{placement.node}/{placement.card}" if placement.node else placement.card
        alone = ", alone" if placement.alone and index not in self._groups else ""
        values = " ".join(f"{key}={value}" for key, value in trial.values.items())
        if index in self._groups:
            values = describe([self._trials[each].name for each in trial.members])
        self._screen.say(
            f"{trial.name} starts on {place}, slot {placement.slot}{alone}"
            + (f": {values}" if values else "")
        )
        self._backend.start(placement.node, start)

    def _trials_of(self, index: int) -> tuple[int, ...]:
        """Of a process: its own trial, or those of its group."""
        return self._groups[index].members if index in self._groups else (index,)

    def _wait_s(self) -> float:
        if not self._queue or self._stop.requested:
            return POLL_S
        return min(POLL_S, max(0.01, self._settings.stagger_s))

    # Ends

    def _take(self, news: dict[str, Any]) -> None:
        index = news["trial"]
        if index not in self._running:
            return
        self._statuses.time_s[index] = news.get("time_s", self._statuses.time_s[index])
        if index in self._groups:
            self._take_groups(index, news)
            return
        if "mps" in news:
            self._note_mps(index, news["mps"])
        for record in news.get("records", ()):
            self._observe(index, record, "end" not in news)
        if "rss_gib" in news:
            self._statuses.measured(index, news["rss_gib"])
        if "end" in news:
            self._ended(index, news["end"])
        elif news.get("records"):
            self._statuses.keep_if_due(index)

    def _observe(self, index: int, record: dict[str, Any], may_end: bool) -> None:
        """One record of a trial's metrics."""
        self._statuses.observe(index, record)
        why = self._search.why_end(index, record)
        if why is not None and may_end and index not in self._ended_early:
            self._end_early(index, why)

    def _take_groups(self, index: int, news: dict[str, Any]) -> None:
        """News of a group: each record says of which of its trials it is."""
        for record in news.get("records", ()):
            if "not_fused" in record:
                self._why_not_fused[index] = str(record["not_fused"])
            member = record.get("trial")
            if member not in self._groups[index].members or self._statuses[member].state != "running":
                continue
            self._statuses.time_s[member] = self._statuses.time_s[index]
            if "ended" in record:
                early = self._storage.exists(f"{self._trials[member].name}/{END_FILE}")
                self._member_ended(member, cause_of_member(record, early))
            else:
                record = {key: value for key, value in record.items() if key != "trial"}
                self._observe(member, record, "end" not in news)
                self._statuses.keep_if_due(member)
        if "end" in news:
            self._group_ended(index, cause_of(news["end"]))

    def _member_ended(self, member: int, cause: Cause) -> None:
        status = self._statuses[member].ended(cause, 0.0, self._statuses.time_s[member], again=False)
        self._statuses.keep(status)
        self._statuses.say_end(member)

    def _group_ended(self, index: int, cause: Cause) -> None:
        """Those of its trials that have not ended were stopped with it, or run as processes."""
        del self._running[index]
        group = self._groups.pop(index)
        left = [member for member in group.members if self._statuses[member].state == "running"]
        if self._stop.requested:
            for member in left:
                self._member_ended(member, Cause("stopped", "stopped on request", cause.exit_code))
        elif left:
            why = self._why_not_fused.get(index, cause.message)
            self._screen.say(f"{group.name}: {_count(len(left), 'trial')} not fused, run as processes: {why}")
            for member in left:
                self._statuses.keep(replace(self._statuses[member], state="waiting"))
            self._queue = [*left, *self._queue]

    def _note_mps(self, index: int, why_not: str) -> None:
        status = self._statuses[index]
        self._statuses.keep(replace(status, place={**status.place, "mps": not why_not}))
        if why_not:
            self._screen.say(f"warning: MPS does not serve {status.name}, it takes turns: {why_not}")

    def _end_early(self, index: int, why: str) -> None:
        self._ended_early.add(index)
        self._screen.say(f"trial_{index:03d} is ended early, {why}")
        if index not in self._running:
            # One of a group, which goes on without it.
            self._storage.write(f"{self._trials[index].name}/{END_FILE}", why.encode())
            return
        self._backend.end(self._running[index].node, index, "pruned", signal.SIGTERM, STOP_GRACE_S)

    def _ended(self, index: int, end: TrialEnd) -> None:
        placement = self._running.pop(index)
        cause = cause_of(end)
        retries = self._retries.get(index, 0)
        again = not self._stop.requested and is_retried(
            cause, retries, self._settings.retries, placement.alone
        )
        status = self._statuses[index].ended(cause, end.peak_gib, self._statuses.time_s[index], again)
        self._statuses.keep(status)
        if again:
            self._retries[index] = retries + 1
            if cause.kind in OUT_OF_MEMORY:
                self._alone.add(index)
            self._queue.insert(0, index)
        self._statuses.say_end(index, again, index in self._alone)

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
            running = sum(len(self._trials_of(index)) for index in self._running)
            self._screen.say(f"stopping {running} trials; once more stops them at once")
            number = getattr(signal, self._stop.requested, signal.SIGTERM)
            for index, placement in self._running.items():
                self._backend.end(placement.node, index, "stopped", number, STOP_GRACE_S)
        if self._stop.immediate and not self._killed:
            self._killed = True
            for index, placement in self._running.items():
                self._backend.end(placement.node, index, "stopped", signal.SIGKILL)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
