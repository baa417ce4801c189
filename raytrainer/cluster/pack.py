"""`raytrainer pack`: the queue of trials, their starts and ends, whatever runs them.

Decisions are `raytrainer.pack`'s; a `Backend` (this machine, or Ray) has the processes. Runs in the process
that the user started, which imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from raytrainer.cluster.pack_auto import measured_count
from raytrainer.cluster.pack_fused import describe, groups_of
from raytrainer.cluster.pack_process import TrialStart
from raytrainer.cluster.pack_queue import Queue
from raytrainer.cluster.pack_start import make_folder
from raytrainer.cluster.signals import StopSignal, stop_on_signals
from raytrainer.errors import ResumeError, UsageError
from raytrainer.pack import status as files
from raytrainer.pack.machines import (
    MachineFacts,
    PackSettings,
    check_placeable,
    nodes_of,
    request_of,
    share_on,
)
from raytrainer.pack.plan import plan
from raytrainer.pack.status import TrialStatus
from raytrainer.pack.table import Screen, counts, plan_table
from raytrainer.pack.trials import Trial
from raytrainer.rundir import release_lock, take_lock
from raytrainer.storage import Storage, open_storage


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
    notes: Sequence[str] = (),
    screen: Screen | None = None,
) -> int:
    """Runs the trials and returns the exit code: the worst trial's, or that of the signal that stopped it.

    directory: of the search; trial_000 and so on are made in it. backend: makes it, once all is checked.
    resume: go on with what has not finished. notes: told first. Raises UsageError for what cannot be run.
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
        for note in notes:
            screen.say(note)
        stop = StopSignal()
        with stop_on_signals(stop):
            running = backend()
            try:
                if settings.per_gpu == "auto":
                    settings = _measured(trials, statuses, settings, storage, running, screen, stop)
                run = Queue(trials, statuses, settings, directory, running, screen, stop)
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
    first = [trial for trial in trials if trial.index in waiting and trial.group is None]
    if not first:
        return replace(settings, per_gpu=None)
    count = measured_count(first, settings, storage.root, backend, screen, stop)
    if not count:
        return settings
    settings = replace(settings, per_gpu=count)
    files.write_pack(storage, trials, settings.to_mapping(), os.getcwd())
    return settings


def dry_run(
    trials: Sequence[Trial],
    settings: PackSettings,
    machines: Mapping[str, MachineFacts],
    notes: Sequence[str] = (),
) -> str:
    """The plan in words: what would start at once, where, with how much; nothing is started."""
    nodes = nodes_of(machines, settings, len(trials))
    check_placeable(list(trials), nodes, settings)
    requests = [request_of(trial, settings) for trial in trials]
    placements = plan(nodes, requests, [], settings.strategy, settings.avoid_gpu_nodes)
    shares = [(placement, share_on(placement, nodes, machines)) for placement in placements]
    text = plan_table(trials, shares, len(trials) - len(placements))
    if settings.per_gpu == "auto":
        text += "\nper_gpu: auto is measured at the start; this is the plan without it"
    fused = [
        f"{g.name}: {describe([f'trial_{m:03d}' for m in g.members])}" for g in groups_of(trials, "", None)
    ]
    return "\n".join([text, *fused, *notes])
