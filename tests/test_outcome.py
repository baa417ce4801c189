"""Tests for the description of a rank's end: its kind, its text, the choice of the cause."""

import pickle
import traceback
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrainer import errors
from raytrainer.cluster.outcome import (
    KINDS,
    RankFailure,
    choose_cause,
    describe_exception,
    describe_exit,
    format_traceback,
    is_retryable,
    to_error,
)


def caught(raiser):
    try:
        raiser()
    except BaseException as exc:
        return exc
    raise AssertionError("nothing was raised")


class DistBackendError(RuntimeError):
    """Named as torch names its own."""


def user_code():
    raise ValueError("mat1 and mat2 shapes cannot be multiplied")


def test_a_users_exception_keeps_its_type_and_its_own_frames():
    failure = describe_exception(caught(user_code), 2)
    assert (failure.rank, failure.kind, failure.error_type) == (2, "user", "ValueError")
    assert "in user_code" in failure.traceback
    assert failure.traceback.endswith("ValueError: mat1 and mat2 shapes cannot be multiplied")
    error = to_error(failure)
    assert isinstance(error, errors.WorkerError)
    assert str(error).startswith("rank 2 failed\n")
    assert str(error).count("ValueError: mat1 and mat2") == 1
    assert str(error).count("rank 2") == 1
    assert error.exit_code == 1


def test_library_frames_are_counted_and_left_out():
    import json

    exc = caught(lambda: json.loads("{", object_hook=None))
    text = format_traceback(exc)
    assert "json/decoder.py" not in text
    assert "more frames inside libraries" in text
    assert "test_outcome.py" in text


def test_library_frames_stay_when_nothing_is_the_users():
    exc = caught(lambda: None.missing)
    exc.__traceback__ = None
    assert format_traceback(exc).startswith("AttributeError")
    import json

    exc = caught(lambda: json.loads("{"))
    while "json" not in exc.__traceback__.tb_frame.f_code.co_filename:
        exc.__traceback__ = exc.__traceback__.tb_next
    assert "json/decoder.py" in format_traceback(exc)


def test_what_an_error_was_raised_from_follows_it():
    def chained():
        try:
            user_code()
        except ValueError as exc:
            raise KeyError("label") from exc

    text = format_traceback(caught(chained))
    assert text.index("KeyError") < text.index("caused by:") < text.index("ValueError: mat1")


@pytest.mark.parametrize(
    "message",
    [
        "[/x/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [::1]: Connection reset by peer",
        "Timed out waiting 1800000ms for recv operation to complete",
        "NCCL error in: ProcessGroupNCCL.cpp:2356, remote process exited or there was a network error",
        "Application timeout caused pair closure",
    ],
)
def test_a_collectives_error_is_collateral(message):
    failure = describe_exception(RuntimeError(message), 0)
    assert failure.kind == "collateral"
    assert is_retryable(failure)
    assert isinstance(to_error(failure), errors.WorkerLostError)


def test_torchs_own_error_types_are_collateral_whatever_they_say():
    assert describe_exception(DistBackendError("x"), 0).kind == "collateral"


@pytest.mark.parametrize(
    "exc",
    [
        DistBackendError(
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0; ncclInvalidUsage"
        ),
        ConnectionResetError("Connection reset by peer"),
        RuntimeError("CUDA error: device-side assert triggered"),
        TimeoutError("download timed out"),
    ],
)
def test_what_this_rank_caused_itself_is_not_collateral(exc):
    failure = describe_exception(exc, 0)
    assert failure.kind == "user"
    assert not is_retryable(failure)


def test_an_error_of_ours_keeps_its_class_message_and_exit_code():
    failure = describe_exception(errors.DataError("label 12 is outside the 10 classes"), 1)
    assert (failure.kind, failure.exit_code, failure.traceback) == ("usage", 2, "")
    error = to_error(failure)
    assert type(error) is errors.DataError
    assert str(error) == "label 12 is outside the 10 classes"

    failure = describe_exception(errors.NonFiniteLossError("the loss is NaN at step 5"), 1)
    assert (failure.kind, failure.exit_code) == ("user", 1)
    error = to_error(failure)
    assert type(error) is errors.NonFiniteLossError
    assert str(error) == "rank 1: the loss is NaN at step 5"


def test_a_config_error_comes_back_as_a_usage_error_with_its_text():
    failure = describe_exception(errors.ConfigError(errors.Problem("a.yaml:3", "lr", "is no number")), 0)
    error = to_error(failure)
    assert isinstance(error, errors.UsageError)
    assert str(error) == "a.yaml:3: lr\n  is no number"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_error_of_ours_shows_the_users_frames_that_it_was_raised_from():
    def build():
        try:
            user_code()
        except ValueError as exc:
            raise errors.TargetError("model: calling it raised ValueError") from exc

    assert "in user_code" in describe_exception(caught(build), 0).traceback


def test_sys_exit_in_user_code_is_named_and_not_retried():
    failure = describe_exception(SystemExit(3), 1)
    assert (failure.kind, failure.exit_code) == ("exit", 3)
    assert not is_retryable(failure)
    assert "sys.exit(3)" in str(to_error(failure))
    assert describe_exception(SystemExit(), 1).exit_code == 0
    assert describe_exception(SystemExit("no data"), 1).exit_code == 1


def test_a_loader_process_error_is_shown_as_the_original():
    try:
        user_code()
    except ValueError:
        original = traceback.format_exc()
    original = original.replace(
        "Traceback (most recent call last):\n",
        "Original Traceback (most recent call last):\n"
        '  File "/lib/python3.11/site-packages/torch/utils/data/worker.py", line 349, in _worker_loop\n'
        "    data = fetcher.fetch(index)\n",
    )
    failure = describe_exception(
        ValueError(f"Caught ValueError in DataLoader worker process 3.\n{original}"), 0
    )
    assert (failure.kind, failure.error_type) == ("user", "ValueError")
    assert failure.message == "mat1 and mat2 shapes cannot be multiplied"
    assert "in user_code" in failure.traceback
    assert "site-packages" not in failure.traceback
    assert "DataLoader worker process 3" in failure.traceback


def test_kill_is_explained_with_the_resident_size():
    failure = describe_exit(1, -9, 12.34)
    assert (failure.kind, failure.signal, failure.rss_gib) == ("lost", "SIGKILL", 12.34)
    assert is_retryable(failure)
    text = str(to_error(failure))
    assert text.startswith("rank 1 was lost")
    assert "probably the host ran out of memory" in text
    assert "12.3 GiB" in text


@pytest.mark.parametrize(
    ("code", "name"), [(-11, "SIGSEGV"), (-15, "SIGTERM"), (-6, "SIGABRT"), (-250, "signal 250")]
)
def test_other_signals_are_named(code, name):
    failure = describe_exit(0, code)
    assert failure.kind == "lost"
    assert name in failure.message


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_ended_itself_is_not_retried(code):
    failure = describe_exit(0, code)
    assert (failure.kind, failure.exit_code) == ("exit", code)
    assert not is_retryable(failure)
    assert isinstance(to_error(failure), errors.WorkerError)


def test_every_error_class_of_ours_can_be_rebuilt():
    for cls in vars(errors).values():
        if (
            isinstance(cls, type)
            and issubclass(cls, errors.RaytrainerError)
            and cls is not errors.ConfigError
        ):
            error = to_error(describe_exception(cls("some text"), 0))
            assert type(error) is cls
            assert "some text" in str(error)


failures = st.builds(
    RankFailure,
    rank=st.integers(0, 7),
    kind=st.sampled_from(KINDS),
    message=st.text(max_size=20),
    time=st.floats(0, 10),
)


@given(st.lists(failures, min_size=1, max_size=8))
def test_the_cause_is_the_earliest_that_is_no_echo(found):
    cause = choose_cause(found)
    originals = [failure for failure in found if failure.kind != "collateral"] or found
    assert cause in originals
    assert cause.time == min(failure.time for failure in originals)


@given(failures)
def test_a_failure_survives_the_way_as_plain_values(failure):
    assert RankFailure.from_dict(failure.to_dict()) == failure
    assert pickle.loads(pickle.dumps(failure)) == failure


def test_the_order_of_arrival_does_not_choose_the_cause():
    echo = describe_exception(RuntimeError("Connection closed by peer"), 0)
    lost = replace(describe_exit(1, -9), time=echo.time + 1)
    assert choose_cause([echo, lost]) == choose_cause([lost, echo]) == lost


def test_no_failures_have_no_cause():
    with pytest.raises(ValueError, match="empty"):
        choose_cause([])
