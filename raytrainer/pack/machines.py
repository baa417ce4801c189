"""From what machines have to the nodes and cards of the plan; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raytrainer.config.pack import PackFile
from raytrainer.errors import ClusterRequestError, UsageError
from raytrainer.pack.plan import CPU, Card, Node, Placement, Request
from raytrainer.pack.share import Share, card_budget_gib, host_budget_gib, share_of
from raytrainer.pack.trials import Trial


@dataclass(frozen=True)
class MachineFacts:
    """What a machine has for trials. gpus: (for CUDA_VISIBLE_DEVICES, total GiB) of each."""

    cores: int
    memory_gib: float
    shm_free_gib: float | None
    gpus: tuple[tuple[str, float], ...]
    torch_version: str | None


@dataclass(frozen=True)
class PackSettings:
    """How trials are packed; see the keys of `PackFile`. all_at_once: without `per_gpu`, as many slots as
    there are trials. search: as in the file, None without one. python_path: folders that the
    trials import from, besides their own."""

    per_gpu: int | str | None = None
    all_at_once: bool = False
    strategy: str = "packed"
    gpus: int | str = "auto"
    avoid_gpu_nodes: bool = False
    memory_gib: float | None = None
    threads: int | None = None
    shm_gib: float | None = None
    timeout_s: float | None = None
    retries: int = 1
    stagger_s: float = 0.1
    probe_s: float = 10.0
    mps: bool = False
    log_mib: float = 16.0
    metric: str | None = None
    metric_mode: str | None = None
    search: Mapping[str, Any] | None = None
    env: dict[str, str] = field(default_factory=dict)
    python_path: tuple[str, ...] = ()

    @classmethod
    def of_file(cls, file: PackFile) -> PackSettings:
        """What the file says; a share of a card is as many slots as fit."""
        names = ("strategy", "gpus", "avoid_gpu_nodes", "memory_gib", "threads", "shm_gib", "timeout_s")
        more = ("retries", "stagger_s", "probe_s", "mps", "log_mib", "env")
        per_gpu = file.per_gpu
        if per_gpu is None and file.gpu_share is not None:
            per_gpu = max(1, math.floor(1 / file.gpu_share + 1e-9))
        judged = {"metric": file.judged_by, "metric_mode": file.judged_mode}
        search = None if file.search is None else file.search.model_dump()
        kept = {name: getattr(file, name) for name in (*names, *more)}
        return cls(per_gpu=per_gpu, **judged, search=search, **kept)

    def to_mapping(self) -> dict[str, Any]:
        """As it is kept for --resume: the values of `env` are not, since they may be secrets."""
        return {**asdict(self), "env": {}, "env_names": sorted(self.env)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], environment: Mapping[str, str]) -> PackSettings:
        """environment: where the variables named in `env` are looked for."""
        known = {name: mapping[name] for name in cls.__dataclass_fields__ if name in mapping}
        env = {name: environment[name] for name in mapping.get("env_names", ()) if name in environment}
        return cls(**{**known, "env": env, "python_path": tuple(known.get("python_path", ()))})


def nodes_of(machines: Mapping[str, MachineFacts], settings: PackSettings, num_trials: int) -> list[Node]:
    """The nodes with their cards: the GPUs where there are some and they are wanted, else the cores.

    Raises UsageError when the trials of a card together would have more than it has.
    """
    uses_gpus = settings.gpus != 0 and any(facts.gpus for facts in machines.values())
    names = {
        name: [f"cuda:{number}" for number in range(len(facts.gpus))] if uses_gpus else [CPU]
        for name, facts in machines.items()
    }
    num_cards = sum(map(len, names.values()))
    nodes = []
    for name, facts in sorted(machines.items()):
        slots = _num_slots(settings, facts, uses_gpus, num_trials, num_cards)
        cards = []
        for number, card in enumerate(names[name]):
            device = facts.gpus[number][0] if uses_gpus else ""
            total_gib = facts.gpus[number][1] if uses_gpus else facts.memory_gib
            budget_gib = card_budget_gib(total_gib, slots) if uses_gpus else host_budget_gib(total_gib)
            cards.append(Card(name, card, device, slots, budget_gib))
        host_gib = host_budget_gib(facts.memory_gib)
        nodes.append(Node(name, facts.cores, host_gib, tuple(cards), has_gpu=bool(facts.gpus)))
    _check_memory(nodes, settings)
    return nodes


def _num_slots(
    settings: PackSettings, facts: MachineFacts, uses_gpus: bool, num_trials: int, num_cards: int
) -> int:
    if isinstance(settings.per_gpu, int):
        return settings.per_gpu
    if settings.all_at_once:
        return max(1, math.ceil(num_trials / max(1, num_cards)))
    return 1 if uses_gpus else max(1, facts.cores // (settings.threads or 1))


def _check_memory(nodes: list[Node], settings: PackSettings) -> None:
    wanted = settings.memory_gib
    if wanted is None:
        return
    for card in (card for node in nodes for card in node.cards):
        together = wanted * card.slots if isinstance(settings.per_gpu, int) else wanted
        if together > card.memory_gib + 1e-6:
            count = f"{card.slots} trials of " if isinstance(settings.per_gpu, int) else ""
            raise UsageError(
                f"memory_gib = {wanted:g}\n  {count}{wanted:g} GiB are more than {card.name} has for trials, "
                f"{card.memory_gib:.1f} GiB\n"
                f"  write memory_gib: {card.share_gib:.1f} or less, or fewer trials on a card (per_gpu)"
            )


def request_of(trial: Trial, settings: PackSettings, alone: bool = False) -> Request:
    """What the trial asks the plan for."""
    return Request(
        trial.index,
        trial.memory_gib or settings.memory_gib,
        trial.threads or settings.threads,
        alone,
        False if settings.gpus == 0 else None,
    )


def check_placeable(trials: list[Trial], nodes: list[Node], settings: PackSettings) -> None:
    """Raises ClusterRequestError for a trial that could not run even if nothing else did."""
    from raytrainer.pack.plan import candidates

    for trial in trials:
        request = request_of(trial, settings)
        if candidates(nodes, request, settings.avoid_gpu_nodes):
            continue
        asked = [f"threads: {request.threads}"] if request.threads else []
        asked += [f"memory_gib: {request.memory_gib:g}"] if request.memory_gib else []
        has = "; ".join(
            f"{node.name or 'this machine'} with {node.cores} cores"
            + "".join(f", {card.name} of {card.memory_gib:.1f} GiB" for card in node.cards)
            for node in nodes
        )
        if settings.avoid_gpu_nodes and all(node.has_gpu for node in nodes):
            asked.append("avoid_gpu_nodes: true")
        raise ClusterRequestError(
            f"{trial.name}: no card could ever hold it\n"
            f"  asked for: {', '.join(asked) or 'a card'}\n  there is: {has}\n  ask for less"
        )


def share_on(placement: Placement, nodes: list[Node], machines: Mapping[str, MachineFacts]) -> Share:
    """The trial's part of the machine that it was placed on."""
    facts = machines[placement.node]
    node = next(node for node in nodes if node.name == placement.node)
    total = dict(facts.gpus).get(placement.device) if placement.device else None
    return share_of(
        placement,
        card_total_gib=total,
        host_share_gib=node.host_gib / max(1, node.num_slots),
        torch_version=facts.torch_version,
    )
