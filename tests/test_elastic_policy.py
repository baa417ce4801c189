"""When the number of workers changes: properties of the pure decisions."""

from hypothesis import given
from hypothesis import strategies as st

from raytrainer.elastic import Resize, Situation, decide, gain_s, starting_size

SITUATIONS = st.builds(
    lambda low, extra, current, available, spare, left_s, restart_s: Situation(
        current=min(low + extra, max(low, current)),
        available=available,
        min_workers=low,
        max_workers=low + extra,
        num_microbatches=low + extra + spare,
        left_s=left_s,
        restart_s=restart_s,
    ),
    low=st.integers(1, 6),
    extra=st.integers(0, 6),
    current=st.integers(1, 12),
    available=st.integers(0, 20),
    spare=st.integers(0, 20),
    left_s=st.none() | st.floats(0, 1e5),
    restart_s=st.floats(0, 1e3),
)


@given(SITUATIONS)
def test_a_decision_is_a_change_within_the_bounds_that_there_is_room_for(now):
    decision = decide(now)
    if decision is not None:
        assert now.min_workers <= decision.to <= min(now.max_workers, now.available)
        assert decision.to != now.current


@given(SITUATIONS)
def test_growing_pays_for_its_restart(now):
    decision = decide(now)
    if decision is not None and decision.to > now.current:
        assert gain_s(now, decision.to) > now.restart_s


@given(SITUATIONS)
def test_room_that_goes_is_left_whatever_the_restart_costs(now):
    if now.min_workers <= now.available < now.current:
        assert decide(now) == Resize(now.available, f"room for {now.available} is left")


@given(st.integers(0, 20), st.integers(1, 5), st.integers(0, 5))
def test_the_first_size_is_all_there_is_room_for(available, low, extra):
    size = starting_size(available, low, low + extra)
    assert size == (None if available < low else min(available, low + extra))


def test_near_the_end_or_without_a_shorter_step_nothing_changes():
    near = Situation(1, 2, 1, 2, num_microbatches=4, left_s=20, restart_s=15)
    assert decide(near) is None
    assert decide(Situation(1, 2, 1, 2, num_microbatches=4, left_s=40, restart_s=15)).to == 2
    # Four microbatches on two workers or on three: the slowest has two either way.
    assert decide(Situation(2, 3, 1, 3, num_microbatches=4, left_s=1e6, restart_s=1)) is None
