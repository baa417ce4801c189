"""The fixed tree: which additions are made, and in what order, for every number of microbatches and ranks."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from raytrainer.data.sampler import microbatches_of
from raytrainer.tree import Node, are_siblings, fold, plan_exchange, sum_along

sizes = st.tuples(st.integers(1, 200), st.integers(1, 40))


def added(left, right):
    return f"({left}+{right})"


def expected(first, stop):
    """The sum of microbatches first to stop - 1 as the definition of the tree has it, from the root down."""
    if stop - first == 1:
        return str(first)
    half = 1 << (stop - first - 1).bit_length() - 1
    return added(expected(first, first + half), expected(first + half, stop))


def exchanged(num_microbatches, world_size):
    """What the ranks and their exchange add up, and how many nodes each rank ships."""
    plan = plan_exchange(num_microbatches, world_size)
    nodes = []
    for rank, local in enumerate(plan.local):
        run = microbatches_of(num_microbatches, 1, rank, world_size)
        nodes += sum_along(local, map(str, run), added)
    return sum_along(plan.combined, nodes, added), [len(local.nodes) for local in plan.local]


@given(sizes)
def test_the_additions_are_those_of_one_rank(sizes):
    num_microbatches, world_size = sizes
    total, _ = exchanged(num_microbatches, world_size)
    assert total == [expected(0, num_microbatches)]


@given(sizes)
def test_a_rank_needs_little_memory_and_ships_little(sizes):
    num_microbatches, world_size = sizes
    for rank, local in enumerate(plan_exchange(num_microbatches, world_size).local):
        num_local = len(microbatches_of(num_microbatches, 1, rank, world_size))
        assert local.depth <= 2 * math.ceil(math.log2(num_local + 1))
        assert len(local.nodes) <= local.depth
        assert sum(node.stop - node.first for node in local.nodes) == num_local
    assert plan_exchange(num_microbatches, 1).local[0].depth <= 1 + math.ceil(math.log2(num_microbatches))


def test_with_a_microbatch_a_rank_each_ships_one_node():
    """So that no more bytes move than in a ring; the same for any whole power of two of them a rank."""
    for world_size in range(1, 9):
        for factor in (1, 2, 4):
            _, num_nodes = exchanged(factor * world_size, world_size)
            assert num_nodes == [1] * world_size


def test_a_truncated_right_child_is_a_sibling():
    assert are_siblings(Node(0, 4), Node(4, 5), 5)
    assert not are_siblings(Node(0, 4), Node(4, 5), 6)
    assert not are_siblings(Node(2, 4), Node(4, 6), 8)
    assert fold([Node(0, 4), Node(4, 5)], 5).merges == (0, 1)


def test_another_order_would_be_noticed():
    assert exchanged(3, 2)[0] == ["((0+1)+2)"]
    assert exchanged(3, 2)[0] != ["(0+(1+2))"]
