"""The fixed binary tree along which a step's microbatches are summed, whatever ranks compute them.

Node (k, i) covers microbatches i * 2^k up to (i + 1) * 2^k, as far as there are that many, and is the sum of
its two children, left plus right. A rank's run of microbatches makes up a few whole nodes; these, in order,
are folded further to the root by the same rule, so that every addition is the same as on a single rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node:
    """The sum of microbatches first to stop - 1."""

    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fold:
    """How nodes that come in order are added up with a stack.

    merges: after pushing the i-th, so many times the two on top are replaced by their sum; nodes: what is
    left on the stack at the end, bottom first; depth: the most that the stack holds when a node that merges
    is added to the one on top without being pushed.
    """

    merges: tuple[int, ...]
    nodes: tuple[Node, ...]
    depth: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """What each rank contributes to a step's sum.

    local: of each rank, from its microbatches to the nodes that it ships; combined: from all ranks' nodes, in
    rank order, to the root.
    """

    local: tuple[Fold, ...]
    combined: Fold

    @property
    def max_nodes(self) -> int:
        """The most nodes that a rank ships."""
        return max(len(fold.nodes) for fold in self.local)


def are_siblings(left: Node, right: Node, num_leaves: int) -> bool:
    """Whether the two are the children of one node of the tree over `num_leaves` microbatches."""
    width = left.stop - left.first
    return (
        left.stop == right.first
        and width & (width - 1) == 0
        and left.first % (2 * width) == 0
        and right.stop == min(left.first + 2 * width, num_leaves)
    )


def fold(nodes: Iterable[Node], num_leaves: int) -> Fold:
    """Adds neighbours up as soon as both children of a node are there, like a carry in a binary counter."""
    stack: list[Node] = []
    merges, depth = [], 0
    for node in nodes:
        count = 0
        while stack and are_siblings(stack[-1], node, num_leaves):
            node = Node(stack.pop().first, node.stop)
            count += 1
        stack.append(node)
        merges.append(count)
        depth = max(depth, len(stack) + max(0, count - 1))
    return Fold(tuple(merges), tuple(stack), depth)


@lru_cache(maxsize=64)
def plan_exchange(num_microbatches: int, world_size: int) -> Exchange:
    """The exchange of a step of V microbatches over W ranks, rank r having [ceil(V*r/W), ceil(V*(r+1)/W))."""
    bounds = [-(-num_microbatches * rank // world_size) for rank in range(world_size + 1)]
    local = tuple(
        fold((Node(leaf, leaf + 1) for leaf in range(first, stop)), num_microbatches)
        for first, stop in pairwise(bounds)
    )
    combined = fold((node for part in local for node in part.nodes), num_microbatches)
    return Exchange(local, combined)


def sum_along(plan: Fold, values: Iterable[T], add: Callable[[T, T], T]) -> list[T]:
    """Carries a fold out: one value a node, in order; gives one value for each of `plan.nodes`."""
    stack: list[T] = []
    for value, merges in zip(values, plan.merges, strict=True):
        stack.append(value)
        for _ in range(merges):
            right = stack.pop()
            stack[-1] = add(stack[-1], right)
    return stack
