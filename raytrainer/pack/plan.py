"""Which trial goes on which card, now: a pure function of the cards, the queue and what runs.

Counts are whole numbers: a card has so many slots, a node so many threads to give. No sums of fractions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["packed", "spread"]
CPU = "cpu"
# Of a sum of sizes in GiB, which are no whole numbers.
_TOLERANCE_GIB = 1e-6


@dataclass(frozen=True)
class Card:
    """A GPU, or a node's cores taken as one card.

    name: unique on its node, "cpu" or "cuda:N"; device: for CUDA_VISIBLE_DEVICES, "" for a CPU. slots: how
    many trials at once. memory_gib: what its trials may take together, on the card (a GPU) or in the host's
    memory (a CPU).
    """

    node: str
    name: str
    device: str
    slots: int
    memory_gib: float

    @property
    def key(self) -> tuple[str, str]:
        return self.node, self.name

    @property
    def is_gpu(self) -> bool:
        return self.name != CPU

    @property
    def share_gib(self) -> float:
        """What each of its trials gets when all slots are taken."""
        return self.memory_gib / self.slots


@dataclass(frozen=True)
class Node:
    """A machine. cores: what this job may use of it (affinity, cgroup); host_gib: of its memory. has_gpu:
    whether it has GPUs, used as cards or not."""

    name: str
    cores: int
    host_gib: float
    cards: tuple[Card, ...]
    has_gpu: bool = False

    @property
    def num_slots(self) -> int:
        return sum(card.slots for card in self.cards)

    @property
    def threads(self) -> int:
        """Threads to give in all: a core each, and one at least for each slot that was asked for."""
        return max(self.cores, self.num_slots)

    @property
    def threads_per_trial(self) -> int:
        return max(1, self.cores // max(1, self.num_slots))


@dataclass(frozen=True)
class Request:
    """What a waiting trial asks for.

    memory_gib: its cap; None: the card's share. threads: None: the node's share. alone: a card for itself,
    with all of its memory, after it ran out of it. needs_gpu: None: a GPU where there are some.
    """

    trial: int
    memory_gib: float | None = None
    threads: int | None = None
    alone: bool = False
    needs_gpu: bool | None = None


@dataclass(frozen=True)
class Placement:
    """A trial's place. memory_gib: its cap; slot: from 0, free on its card while the trial runs."""

    trial: int
    node: str
    card: str
    device: str
    slot: int
    memory_gib: float
    threads: int
    alone: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.node, self.card


def plan(
    nodes: Sequence[Node],
    waiting: Iterable[Request],
    running: Iterable[Placement] = (),
    strategy: Strategy = "packed",
    avoid_gpu_nodes: bool = False,
) -> list[Placement]:
    """What can start now, in the order of the queue.

    packed: the fullest card that has room; spread: the emptiest. avoid_gpu_nodes: trials for the CPU stay off
    nodes that have GPUs. The first trial that finds no room keeps a card to itself until it has it: those
    behind it may pass it on other cards only, so that none waits for ever.
    """
    taken = list(running)
    placements: list[Placement] = []
    kept: set[tuple[str, str]] = set()
    kept_nodes: set[str] = set()
    for request in waiting:
        if len(kept_nodes) == len(nodes):
            break
        cards = candidates(nodes, request, avoid_gpu_nodes)
        open_cards = [(n, c) for n, c in cards if c.key not in kept and n.name not in kept_nodes]
        found = _best(open_cards, request, taken, strategy)
        if found is not None:
            placements.append(found)
            taken.append(found)
        elif cards:
            node, card = _to_keep(cards, request, taken)
            kept.add(card.key)
            if _lacks_threads(node, card, request, taken):
                kept_nodes.add(node.name)
    return placements


def candidates(
    nodes: Sequence[Node], request: Request, avoid_gpu_nodes: bool = False
) -> list[tuple[Node, Card]]:
    """The cards that could hold the request if nothing else ran; empty when it can never be placed."""
    any_gpu = any(card.is_gpu for node in nodes for card in node.cards)
    wants_gpu = any_gpu if request.needs_gpu is None else request.needs_gpu
    found = []
    for node in nodes:
        if not wants_gpu and avoid_gpu_nodes and node.has_gpu:
            continue
        if (request.threads or 1) > node.threads:
            continue
        for card in node.cards:
            fits = (request.memory_gib or 0.0) <= card.memory_gib + _TOLERANCE_GIB
            if card.is_gpu == wants_gpu and card.slots > 0 and fits:
                found.append((node, card))
    return found


def _to_keep(cards: list[tuple[Node, Card]], request: Request, taken: list[Placement]) -> tuple[Node, Card]:
    """The card that will be free for the request first, as far as one can tell: the emptiest."""
    counts = Counter(placed.key for placed in taken)
    return min(cards, key=lambda pair: (counts[pair[1].key], pair[1].key))


def _best(
    cards: list[tuple[Node, Card]], request: Request, taken: list[Placement], strategy: Strategy
) -> Placement | None:
    counts = Counter(placed.key for placed in taken)
    sign = -1 if strategy == "packed" else 1
    order = sorted(cards, key=lambda pair: sign * counts[pair[1].key])
    return next((p for node, card in order if (p := _place(node, card, request, taken))), None)


def _place(node: Node, card: Card, request: Request, taken: list[Placement]) -> Placement | None:
    here = [placed for placed in taken if placed.key == card.key]
    if any(placed.alone for placed in here) or (request.alone and here) or len(here) >= card.slots:
        return None
    memory_gib = card.memory_gib if request.alone else request.memory_gib or card.share_gib
    if sum(placed.memory_gib for placed in here) + memory_gib > card.memory_gib + _TOLERANCE_GIB:
        return None
    if _lacks_threads(node, card, request, taken):
        return None
    used = {placed.slot for placed in here}
    slot = next(number for number in range(card.slots) if number not in used)
    threads = request.threads or node.threads_per_trial
    return Placement(
        request.trial, node.name, card.name, card.device, slot, memory_gib, threads, request.alone
    )


def _lacks_threads(node: Node, card: Card, request: Request, taken: list[Placement]) -> bool:
    used = sum(placed.threads for placed in taken if placed.node == node.name)
    return used + (request.threads or node.threads_per_trial) > node.threads
