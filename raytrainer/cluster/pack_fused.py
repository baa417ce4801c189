"""Groups of trials that train as one model, as the queue of `raytrainer pack` sees them: one process each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from raytrainer.pack.cause import Cause
from raytrainer.pack.trials import Trial

# Numbers of such processes: beyond those of trials.
FIRST = 1_000_000
# Written into a trial's directory to have it end early, its group going on.
END_FILE = "end"


@dataclass(frozen=True)
class FusedGroup(Trial):
    """The process that trains the `members`."""

    members: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"fused_{self.index - FIRST}"


def groups_of(trials: Iterable[Trial], directory: str, timeout_s: float | None) -> list[FusedGroup]:
    """The groups with two members or more among the trials that wait. timeout_s: of one trial."""
    by_group: dict[int, list[Trial]] = {}
    for trial in trials:
        if trial.group is not None:
            by_group.setdefault(trial.group, []).append(trial)
    groups = []
    for number, found in by_group.items():
        if len(found) < 2:
            continue
        members = tuple(trial.index for trial in found)
        module = "raytrainer.cluster.fused_process"
        command = (sys.executable, "-m", module, os.path.abspath(directory), *map(str, members))
        limits = [trial.timeout_s or timeout_s for trial in found]
        groups.append(
            FusedGroup(
                FIRST + number,
                command,
                timeout_s=None if None in limits else sum(limits),
                memory_gib=found[0].memory_gib,
                threads=found[0].threads,
                members=members,
            )
        )
    return groups


def describe(names: Sequence[str]) -> str:
    return f"{names[0]} to {names[-1]}, {len(names)} trials as one model"


def cause_of_member(record: dict[str, Any], was_ended_early: bool) -> Cause:
    """Why a trial of a group ended, from what the group's process says of it."""
    how, message = record["ended"], str(record.get("message", "")).splitlines()[:1]
    if how == "finished":
        return Cause("finished", "finished", 0)
    if how == "failed":
        return Cause("exception", message[0] if message else "failed", int(record["exit_code"]))
    if was_ended_early:
        return Cause("pruned", "stopped early, since others did better", 0)
    return Cause("stopped", "stopped on request", int(record["exit_code"]))
