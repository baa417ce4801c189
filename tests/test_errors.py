"""Exit codes and how an error reads."""

import pickle

import pytest

from raytrainer import errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError, 2),
        (errors.ClusterRequestError, 2),
        (errors.WorkerError, 1),
        (errors.StorageError, 1),
    ],
)
def test_exit_codes_follow_the_tree(error, code):
    assert error.exit_code == code


def test_config_error_says_where_what_rule_and_fix_and_survives_pickling():
    problem = errors.Problem("a.yaml:3", "optimizer.lr", "must be a number", "fast", "write: lr: 1e-3")
    error = pickle.loads(pickle.dumps(errors.ConfigError([problem])))
    assert str(error) == "a.yaml:3: optimizer.lr = fast\n  must be a number\n  write: lr: 1e-3"
    assert error.problems == [problem]
