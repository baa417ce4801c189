"""Trials on this machine, without Ray."""

from __future__ import annotations

from typing import Any

from raytrainer.cluster.pack_host import TrialHost, machine_facts
from raytrainer.cluster.pack_process import TrialStart
from raytrainer.pack.machines import MachineFacts


class LocalBackend:
    """This machine as the only node, which has no name. See `pack.Backend`."""

    def __init__(self) -> None:
        self._host = TrialHost()
        self._facts = machine_facts()

    def machines(self) -> dict[str, MachineFacts]:
        return {"": self._facts}

    def start(self, node: str, start: TrialStart) -> None:
        self._host.start(start)

    def end(self, node: str, trial: int, reason: str, number: int, grace_s: float | None = None) -> None:
        self._host.end(trial, reason, number, grace_s)

    def news(self, timeout_s: float) -> list[dict[str, Any]]:
        return self._host.news(timeout_s)

    def close(self) -> None:
        self._host.close()
