"""The sampler: each sample once, the same steps at any number of ranks, positions of finished steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrainer.data import (
    ClassBalancedOrder,
    ElasticBatchSampler,
    EvalBatches,
    MnistSubset,
    WeightedOrder,
    epoch_order,
    microbatches_of,
    mix_seed,
    steps_per_epoch,
)
from raytrainer.errors import DataError, ResumeError

shapes = st.tuples(st.integers(1, 90), st.integers(1, 24), st.integers(1, 24), st.integers(1, 6)).map(
    lambda shape: (shape[0], shape[1], min(shape[1], shape[2]), shape[3])
)
quick = settings(max_examples=60, deadline=None)


def samplers(num_samples, batch, micro, world_size, **settings):
    return [
        ElasticBatchSampler(num_samples, batch, micro, rank, world_size, **settings)
        for rank in range(world_size)
    ]


def steps_of(ranks) -> dict[int, dict[int, list[int]]]:
    """All ranks' microbatches: step -> number -> indices."""
    steps: dict[int, dict[int, list[int]]] = {}
    for sampler in ranks:
        for microbatch in sampler:
            step = steps.setdefault(microbatch.step, {})
            assert microbatch.number not in step, "two ranks computed one microbatch"
            step[microbatch.number] = microbatch.indices
    return steps


def samples_in_order(steps) -> list[int]:
    return [
        index for step in sorted(steps) for number in sorted(steps[step]) for index in steps[step][number]
    ]


@quick
@given(shapes, st.integers(0, 5), st.booleans())
def test_an_epoch_has_each_sample_exactly_once_in_the_order_of_the_epoch(shape, epoch, drop_last):
    num_samples, batch, micro, world_size = shape
    if drop_last and num_samples < batch:
        return
    ranks = samplers(num_samples, batch, micro, world_size, seed=3, drop_last=drop_last)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    seen = samples_in_order(steps_of(ranks))
    expected = epoch_order(3, epoch, num_samples, shuffle=True).tolist()
    assert seen == (expected[: num_samples // batch * batch] if drop_last else expected)
    assert sorted(expected) == list(range(num_samples))


@quick
@given(shapes, st.integers(1, 6))
def test_steps_and_microbatches_do_not_depend_on_the_number_of_ranks(shape, other_world_size):
    num_samples, batch, micro, world_size = shape
    here = steps_of(samplers(num_samples, batch, micro, world_size))
    there = steps_of(samplers(num_samples, batch, micro, other_world_size))
    assert here == there


@quick
@given(shapes, st.integers(1, 6), st.data())
def test_a_run_continues_at_any_step_at_any_number_of_ranks(shape, other_world_size, data):
    num_samples, batch, micro, world_size = shape
    epoch = data.draw(st.integers(0, 3))
    before = samplers(num_samples, batch, micro, world_size, seed=1)
    finished = data.draw(st.integers(0, before[0].steps_per_epoch))
    for sampler in before:
        sampler.set_epoch(epoch)
    whole = steps_of(before)
    before[0].set_position(epoch, finished)
    state = before[0].state_dict()

    after = samplers(num_samples, batch, micro, other_world_size, seed=1)
    for sampler in after:
        sampler.load_state_dict(state)
        sampler.set_epoch(sampler.epoch)
    assert after[0].epoch == epoch + (finished == before[0].steps_per_epoch)
    if after[0].epoch == epoch:
        first = epoch * before[0].steps_per_epoch + finished
        assert steps_of(after) == {step: batches for step, batches in whole.items() if step >= first}


@quick
@given(shapes)
def test_plans_and_lengths_say_what_the_iterator_gives(shape):
    ranks = samplers(*shape)
    steps = steps_of(ranks)
    for sampler in ranks:
        for start in range(sampler.steps_per_epoch):
            sampler.set_position(0, start)
            assert len(sampler) == len(list(sampler))
    for step in range(ranks[0].steps_per_epoch):
        plans = [sampler.plan(step) for sampler in ranks]
        assert plans[0].num_microbatches == len(steps[step])
        assert plans[0].num_samples == sum(map(len, steps[step].values()))
        assert [plans[0].samples_in(number) for number in sorted(steps[step])] == [
            len(steps[step][number]) for number in sorted(steps[step])
        ]
        assert plans[0].num_idle_ranks == sum(1 for plan in plans if len(plan.local) == 0)
        assert 0 in plans[0].local


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 40))
def test_ranks_divide_the_microbatches_and_rank_0_has_the_first(num_samples, micro, world_size):
    shares = [microbatches_of(num_samples, micro, rank, world_size) for rank in range(world_size)]
    assert [number for share in shares for number in share] == list(range(-(-num_samples // micro)))
    assert shares[0][0] == 0
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 8))
def test_evaluation_sees_each_sample_once_and_numbers_its_batches_globally(num_samples, batch, world_size):
    batches = [
        microbatch
        for rank in range(world_size)
        for microbatch in EvalBatches(num_samples, batch, rank, world_size)
    ]
    assert [microbatch.number for microbatch in batches] == list(range(len(batches)))
    assert [index for microbatch in batches for index in microbatch.indices] == list(range(num_samples))


def test_what_was_prefetched_does_not_move_the_position():
    sampler = ElasticBatchSampler(20, 4, 2)
    iterator = iter(sampler)
    for _ in range(7):
        next(iterator)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["step_in_epoch"]) == (0, 0)
    sampler.set_position(0, 2)
    assert sampler.state_dict()["step_in_epoch"] == 2
    assert next(iterator).step == 3, "a running iterator goes on where it was"
    assert next(iter(sampler)).step == 2


def test_a_running_iterator_keeps_its_epoch_when_the_next_one_is_set():
    sampler = ElasticBatchSampler(8, 4, 4)
    iterator = iter(sampler)
    sampler.set_epoch(1)
    assert [microbatch.epoch for microbatch in iterator] == [0, 0]
    assert [microbatch.step for microbatch in sampler] == [2, 3]


def test_set_epoch_keeps_a_position_in_that_epoch_and_leaves_another():
    sampler = ElasticBatchSampler(20, 4, 2)
    sampler.set_position(3, 2)
    sampler.set_epoch(3)
    assert sampler.step_in_epoch == 2
    sampler.set_epoch(4)
    assert sampler.step_in_epoch == 0


def test_the_order_is_fixed_for_all_time():
    """A saved run must go on in the same order with a later raytrainer."""
    assert mix_seed(0, 1, -1) == 18019247097306821814
    assert epoch_order(7, 2, 8, shuffle=True).tolist() == [6, 7, 4, 3, 2, 1, 0, 5]
    assert epoch_order(7, 2, 4, shuffle=False).tolist() == [0, 1, 2, 3]
    assert not torch.equal(epoch_order(7, 3, 100, True), epoch_order(7, 2, 100, True))
    assert not torch.equal(epoch_order(8, 2, 100, True), epoch_order(7, 2, 100, True))


def test_the_last_short_step_may_leave_ranks_without_work():
    plan = ElasticBatchSampler(130, 128, 32, rank=3, world_size=4).plan(1)
    assert (plan.num_samples, plan.num_microbatches, len(plan.local), plan.num_idle_ranks) == (2, 1, 0, 3)


def test_steps_per_epoch():
    assert [steps_per_epoch(10, 4, drop_last) for drop_last in (False, True)] == [3, 2]


def test_an_epoch_without_steps_is_refused():
    with pytest.raises(DataError, match=r"global_batch_size = 16\n.*10 samples"):
        ElasticBatchSampler(10, 16, 4, drop_last=True)


@pytest.mark.parametrize(
    ("key", "value"), [("num_samples", 21), ("global_batch_size", 5), ("micro_batch_size", 1), ("seed", 9)]
)
def test_a_state_that_means_other_samples_is_refused(key, value):
    arguments = {"num_samples": 20, "global_batch_size": 4, "micro_batch_size": 2, "seed": 0}
    state = ElasticBatchSampler(**arguments).state_dict()
    with pytest.raises(ResumeError, match=key):
        ElasticBatchSampler(**{**arguments, key: value}).load_state_dict(state)


def test_a_state_of_another_version_is_refused():
    sampler = ElasticBatchSampler(20, 4, 2)
    with pytest.raises(ResumeError, match="version = 99"):
        sampler.load_state_dict({**sampler.state_dict(), "version": 99})


def test_a_weighted_order_draws_in_proportion_and_never_what_weighs_nothing():
    order = WeightedOrder([0.0, 1.0, 3.0, 0.0], num_samples=8000)
    counts = torch.bincount(order(0, 0), minlength=4).tolist()
    assert counts[0] == counts[3] == 0
    assert counts[2] / counts[1] == pytest.approx(3, rel=0.15)
    assert torch.equal(order(0, 1), order(0, 1))
    assert not torch.equal(order(0, 0), order(0, 1))


def test_a_weighted_order_without_replacement_repeats_nothing():
    order = WeightedOrder([1.0, 0.0, 5.0, 2.0], num_samples=3, replacement=False)
    assert sorted(order(0, 4).tolist()) == [0, 2, 3]
    heavy_first = [WeightedOrder([1.0, 50.0], replacement=False)(0, epoch)[0].item() for epoch in range(50)]
    assert sum(heavy_first) > 40


def test_a_class_balanced_order_draws_each_class_alike():
    class Skewed:
        targets = [0] * 900 + [1] * 100

    drawn = ClassBalancedOrder(Skewed(), num_samples=4000)(0, 0)
    assert (drawn >= 900).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert ClassBalancedOrder(MnistSubset("eval")).num_samples == 1000


def test_a_custom_order_sets_the_length_of_the_epoch():
    sampler = ElasticBatchSampler(4, 5, 5, order=WeightedOrder([1, 1, 1, 1], num_samples=12))
    assert [len(microbatch) for microbatch in sampler] == [5, 5, 2]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda seed, epoch: [0, 1, 9], "sample index 9"),
        (lambda seed, epoch: [0, -1], "sample index -1"),
        (lambda seed, epoch: np.array([0.5]), "float64"),
        (lambda seed, epoch: [[0, 1]], r"shape \[1, 2\]"),
        (lambda seed, epoch: [], r"shape \[0\]"),
        (lambda seed, epoch: [0] * (epoch + 1), "gave 2 indices for epoch 1"),
    ],
)
def test_a_wrong_custom_order_is_refused(order, message):
    def use() -> None:
        sampler = ElasticBatchSampler(4, 1, 1, order=order)
        sampler.set_epoch(1)
        list(sampler)

    with pytest.raises(DataError, match=message):
        use()


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [0.0, 0.0], [float("nan"), 1.0], [[1.0], [2.0]]])
def test_weights_that_cannot_be_drawn_from_are_refused(weights):
    with pytest.raises(DataError, match="weights"):
        WeightedOrder(weights)


def test_weighted_orders_of_impossible_lengths_are_refused():
    with pytest.raises(DataError, match="from 1 to 1"):
        WeightedOrder([1.0, 0.0], num_samples=2, replacement=False)
    with pytest.raises(DataError, match="at least 1"):
        WeightedOrder([1.0], num_samples=0)
    with pytest.raises(DataError, match="targets"):
        ClassBalancedOrder([1, 2])
