"""A short seed of the chaos command."""

import pytest

from tests.chaos import KINDS, run_seed, schedule


def test_a_schedule_is_a_function_of_its_seed():
    assert schedule(7, 5) == schedule(7, 5)
    kinds = {event.kind for seed in range(50) for event in schedule(seed, 5)[1]}
    assert kinds == set(KINDS)


@pytest.mark.timeout(600)
def test_a_killed_worker_and_a_killed_driver_change_nothing(tmp_path):
    text, fine = run_seed(tmp_path, 1, 2, resize=False)
    assert fine, text
