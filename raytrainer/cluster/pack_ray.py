"""Trials on the nodes of a Ray cluster: an actor on each holds what is free there and runs the trials.

Ray only sees the actors, which reserve whole CPUs and GPUs: where on a node a trial goes, and how many share
a card, is the plan's business. An actor ends with the driver, and its trials with it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from raytrainer.cluster.pack_host import TrialHost, machine_facts
from raytrainer.cluster.pack_process import TrialStart
from raytrainer.cluster.ray_run import restore_signal_handlers
from raytrainer.cluster.ray_session import explain_missing, open_session
from raytrainer.config.connection import RaySection
from raytrainer.errors import ClusterRequestError
from raytrainer.pack.cause import TrialEnd
from raytrainer.pack.machines import MachineFacts
from raytrainer.pack.share import passed_on

# For an actor on each node to come up.
START_S = 120.0
CLOSE_S = 10.0
# How long an actor waits before it answers that nothing has happened.
ANSWER_S = 1.0


class NodeTrials:
    """The actor on a node: a `TrialHost` within what Ray has reserved for it."""

    def __init__(self) -> None:
        self._host = TrialHost()

    def facts(self, num_cpus: int) -> MachineFacts:
        """What this node has for trials: the cores and GPUs reserved here, and as much of the memory."""
        import ray

        facts = machine_facts()
        reserved = {str(gpu) for gpu in ray.get_gpu_ids()}
        cores = max(1, min(num_cpus, facts.cores)) if num_cpus else facts.cores
        return replace(
            facts,
            cores=cores,
            memory_gib=facts.memory_gib * cores / facts.cores,
            gpus=tuple(gpu for gpu in facts.gpus if gpu[0] in reserved),
        )

    def start(self, start: TrialStart, here: bool) -> None:
        """here: run it in this node's copy of the working directory."""
        environment = {**passed_on(os.environ), **start.environment}
        directory = os.getcwd() if here else start.directory
        self._host.start(replace(start, environment=environment, directory=directory))

    def end(self, trial: int, reason: str, number: int, grace_s: float | None) -> None:
        self._host.end(trial, reason, number, grace_s)

    def news(self, timeout_s: float) -> list[dict[str, Any]]:
        return self._host.news(timeout_s)

    def close(self) -> None:
        self._host.close()


class RayBackend:
    """A cluster's nodes, by their addresses. See `pack.Backend`.

    address: None for RAY_ADDRESS, else for a Ray of this command's own. directory: where the search is kept.
    """

    def __init__(self, address: str | None, directory: str, verbose: bool = False):
        try:
            import ray
        except ImportError as error:
            raise explain_missing(error) from error
        self._ray = ray
        self._session = open_session(RaySection(address=address), os.path.dirname(directory), verbose)
        # Ray has put its own in their place.
        restore_signal_handlers()
        self._actors: dict[str, Any] = {}
        self._num_cpus: dict[str, int] = {}
        self._facts: dict[str, MachineFacts] = {}
        self._asked: dict[Any, str] = {}
        self._trials: dict[str, set[int]] = {}
        self._late_news: list[dict[str, Any]] = []
        try:
            self._hold_nodes()
        except BaseException:
            self.close()
            raise

    def _hold_nodes(self) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for node_id, (address, free) in self._session.free_by_node.items():
            num_cpus, num_gpus = int(free.get("CPU", 0)), int(free.get("GPU", 0))
            if not num_cpus and not num_gpus:
                continue
            name = address if address not in self._actors else f"{address}-{node_id[:6]}"
            options = {
                "num_cpus": num_cpus,
                "num_gpus": num_gpus,
                "max_concurrency": 8,
                "max_restarts": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
            }
            self._actors[name] = self._ray.remote(NodeTrials).options(**options).remote()
            self._num_cpus[name] = num_cpus
            self._trials[name] = set()
        waiting = {actor.facts.remote(self._num_cpus[name]): name for name, actor in self._actors.items()}
        ready = []
        if waiting:
            ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=START_S)
        for ref in ready:
            with suppress(self._ray.exceptions.RayActorError):
                self._facts[waiting[ref]] = self._ray.get(ref)
        for name in [name for name in self._actors if name not in self._facts]:
            # Somebody else was quicker, or the node is gone.
            self._ray.kill(self._actors.pop(name))
        if not self._actors:
            raise ClusterRequestError(
                "pack: no node of the Ray cluster has a free CPU or GPU\n"
                "  wait until there is one, or use --local for this machine without Ray"
            )

    def machines(self) -> dict[str, MachineFacts]:
        return dict(self._facts)

    def start(self, node: str, start: TrialStart) -> None:
        if node not in self._actors:
            lost = TrialEnd(-9, lost=f"node {node} is gone")
            self._late_news.append({"trial": start.trial, "end": lost})
            return
        changed = {k: v for k, v in start.environment.items() if os.environ.get(k) != v}
        self._trials[node].add(start.trial)
        self._actors[node].start.remote(replace(start, environment=changed), self._session.ships_files)

    def end(self, node: str, trial: int, reason: str, number: int, grace_s: float | None = None) -> None:
        if node in self._actors:
            self._actors[node].end.remote(trial, reason, number, grace_s)

    def news(self, timeout_s: float) -> list[dict[str, Any]]:
        if self._late_news:
            news, self._late_news = self._late_news, []
            return news
        asked = set(self._asked.values())
        for name, actor in self._actors.items():
            if name not in asked:
                self._asked[actor.news.remote(ANSWER_S)] = name
        if not self._asked:
            time.sleep(timeout_s)  # no node is left to be waited for
            return []
        ready, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=timeout_s)
        news = []
        for ref in ready:
            name = self._asked.pop(ref)
            if name not in self._actors:
                continue
            try:
                found = self._ray.get(ref)
            except self._ray.exceptions.RayActorError as error:
                news += self._lose(name, str(error).splitlines()[0])
                continue
            self._trials[name] -= {each["trial"] for each in found if "end" in each}
            news += found
        return news

    def _lose(self, name: str, why: str) -> list[dict[str, Any]]:
        """A node is gone, and its trials with it."""
        # It may be out of reach and not gone: the trials run elsewhere from now on.
        self._ray.kill(self._actors.pop(name))
        del self._facts[name]
        lost = TrialEnd(-9, lost=f"node {name} is gone ({why})")
        return [{"trial": trial, "end": lost} for trial in sorted(self._trials.pop(name))]

    def close(self) -> None:
        closing = [actor.close.remote() for actor in self._actors.values()]
        if closing:
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._session.close()
