"""Trials that are ended early: the rules against Ray Tune's, the search's course, and real processes."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule

from raytrainer.__main__ import main
from raytrainer.config.pack import pack_file
from raytrainer.errors import ConfigError
from raytrainer.pack.machines import PackSettings
from raytrainer.pack.search import Asha, Median, Search
from raytrainer.pack.status import TrialStatus
from raytrainer.pack.trials import trials_of

ACT = str(Path(__file__).parent / "pack_scripts" / "act.py")
NUM_TRIALS, NUM_REPORTS = 7, 30

# Which trial reports next, and what.
courses = st.lists(
    st.tuples(st.integers(0, NUM_TRIALS - 1), st.integers(-20, 20).map(lambda n: n / 4)),
    max_size=NUM_TRIALS * NUM_REPORTS,
)


def ends_by(rule, course):
    """(trial, number) of each end; a trial that has ended reports no more."""
    numbers, ended = {}, []
    for trial, value in course:
        if trial not in dict(ended):
            numbers[trial] = numbers.get(trial, 0) + 1
            if rule.why_end(trial, numbers[trial], value) is not None:
                ended.append((trial, numbers[trial]))
    return ended


def ends_by_tune(scheduler, course):
    scheduler.set_search_properties("score", "max")
    controller = SimpleNamespace(get_live_trials=lambda: [])
    trials = [_Trial(str(number)) for number in range(NUM_TRIALS)]
    for trial in trials:
        scheduler.on_trial_add(controller, trial)
    numbers, ended = {}, []
    for number, value in course:
        if number not in dict(ended):
            numbers[number] = numbers.get(number, 0) + 1
            result = {"training_iteration": numbers[number], "score": value}
            if scheduler.on_trial_result(controller, trials[number], result) == "STOP":
                ended.append((number, numbers[number]))
    return ended


@dataclass(frozen=True)
class _Trial:
    """What Tune's schedulers ask of a trial."""

    trial_id: str


@given(courses, st.integers(1, 4), st.sampled_from([2, 3, 4]))
def test_asha_decides_as_ray_tunes_does(course, grace_period, reduction_factor):
    tune = ASHAScheduler(grace_period=grace_period, reduction_factor=reduction_factor, max_t=10**6)
    assert ends_by(Asha(grace_period, reduction_factor), course) == ends_by_tune(tune, course)


@given(courses, st.integers(1, 4), st.integers(1, 4))
def test_the_median_rule_decides_as_ray_tunes_does(course, grace_period, min_trials):
    tune = MedianStoppingRule(
        time_attr="training_iteration",
        grace_period=grace_period,
        min_samples_required=min_trials,
        hard_stop=True,
    )
    assert ends_by(Median(grace_period, min_trials), course) == ends_by_tune(tune, course)


def search(**keys):
    settings = {"scheduler": "asha", "grace_period": 1, "reduction_factor": 2, "min_trials": 1, **keys}
    return Search.of_settings(settings, "loss", None)


def test_less_of_a_loss_is_better_and_nan_is_the_worst():
    course = search()
    assert course.why_end(0, {"step": 5, "loss": 1.0}) is None
    assert "loss 2: below the best 1 in 2 of 1 trials" in course.why_end(1, {"step": 5, "loss": 2.0})
    assert course.why_end(2, {"step": 5, "loss": 0.5}) is None
    assert course.why_end(3, {"step": 5, "loss": math.nan}) == "loss nan"
    # A record of something else, or a text, is no report.
    assert course.why_end(2, {"step": 6, "accuracy": 0.0}) is None
    assert course.why_end(2, {"step": 6, "loss": "high"}) is None
    patient = search(grace_period=2)
    assert patient.why_end(0, {"loss": math.inf}) is None
    assert patient.why_end(0, {"loss": math.inf}) == "loss inf"


def test_a_trial_that_starts_again_is_not_judged_twice_by_the_same_steps():
    course = search(scheduler="median", grace_period=3, min_trials=1)
    for step in (1, 2, 3):
        assert course.why_end(0, {"step": step, "loss": 1.0}) is None
    for _ in range(2):
        for step in (1, 2):
            assert course.why_end(1, {"step": step, "loss": 5.0}) is None
    assert "median of 1 other trials at report 3" in course.why_end(1, {"step": 3, "loss": 5.0})


def test_a_resumed_search_knows_what_was_reported_before():
    course = search()
    course.resume([TrialStatus(0, curve=((10.0, 1.0), (20.0, 0.5)))])
    assert course.why_end(0, {"step": 20, "loss": 9.0}) is None
    assert course.why_end(1, {"step": 10, "loss": 1.5}) is not None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"search": {}}, "trials are ended early by a metric, and none is named"),
        ({"search": {"metric": "a"}, "metric": "b"}, "differs from metric of the file"),
        ({"search": {"metric": "a", "mode": "max"}, "metric_mode": "min"}, "differs from metric_mode"),
        ({"search": {"metric": "a", "num_samples": 3}}, "there are none"),
        ({"search": {"metric": "a", "reduction_factor": 1}}, "reduction_factor"),
        ({"search": {"metric": "a", "scheduler": "hyperband"}}, "scheduler"),
    ],
)
def test_a_search_that_cannot_be_is_refused(keys, said):
    with pytest.raises(ConfigError) as error:
        pack_file({"name": "s", "command": [sys.executable], "grid": {"x": [1, 2]}, **keys})
    assert said in str(error.value)


def test_a_search_may_say_how_many_samples():
    keys = {"samples": {"x": {"uniform": [0, 1]}}, "search": {"metric": "a", "num_samples": 3}}
    file = pack_file({"name": "s", "command": [sys.executable], **keys})
    assert len(trials_of(file)) == 3
    assert PackSettings.of_file(file).metric == "a"
    kept = json.loads(json.dumps(PackSettings.of_file(file).to_mapping()))
    assert PackSettings.from_mapping(kept, {}) == PackSettings.of_file(file)


def test_bad_trials_end_early_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    """One after the other: the first sets the mark, the second is below it, the third has diverged."""
    monkeypatch.chdir(tmp_path)
    trials = [
        {"kind": "improve", "score": 1.0},
        {"kind": "improve", "score": 0.1, "reports": 1, "wait": True},
        {"kind": "diverge"},
        {"kind": "improve", "score": 2.0},
    ]
    search = {"metric": "score", "reduction_factor": 2}
    content = {
        "name": "s",
        "command": [sys.executable, ACT],
        "trials": trials,
        "per_gpu": 1,
        "search": search,
    }
    Path("t.yaml").write_text(json.dumps(content))
    assert main(["pack", "t.yaml", "--local"]) == 0
    states = [json.loads(Path(f"runs/s/trial_{n:03d}/status.json").read_text())["state"] for n in range(4)]
    assert states == ["finished", "pruned", "pruned", "finished"]
    out = capsys.readouterr().out
    assert "trial_001 is ended early, score 0.1: below the best 1 in 2 of 1 trials at report 1" in out
    assert "trial_002 is ended early, score nan" in out
    assert out.splitlines()[-1].endswith("trial_003")
    # They have ended for good.
    assert main(["pack", "--resume", "runs/s"]) == 0
    assert "is finished: 2 finished, 2 pruned" in capsys.readouterr().out
