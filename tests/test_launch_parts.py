"""The parts of a launch that need no process: output, environment, options, the script section."""

import os

import pytest

from raytrainer.cluster import shipping
from raytrainer.cluster.outcome import RankFailure, choose_cause, is_echo, is_retryable, to_error
from raytrainer.cluster.script_environment import ScriptPlace, num_threads, script_command, script_environment
from raytrainer.cluster.script_output import LOG, STDOUT, FrameReader, Prefixer, pack, shorten
from raytrainer.config import Config
from raytrainer.errors import ConfigError, ScriptError, UsageError
from raytrainer.launch_options import default_name

PLACE = ScriptPlace(3, 4, 1, 2, 1, 2, "10.0.0.1", 29500, 0, "/tmp/error.json")
PLAN = {
    "path": "train.py",
    "args": ["--epochs", "3"],
    "module": False,
    "env": {},
    "local_rank_arg": "none",
    "process_args": False,
    "rank_env": True,
    "num_threads": "1",
    "python_path": [],
    "max_restarts": 2,
    "run_id": "train-1",
}


def test_frames_arrive_whole_however_they_are_cut():
    stream = pack(STDOUT, b"hello\n") + pack(LOG, b"") + pack(STDOUT, b"\xff\x00" * 300)
    for step in (1, 3, 7, len(stream)):
        reader, frames = FrameReader(), []
        for start in range(0, len(stream), step):
            frames += reader.feed(stream[start : start + step])
        assert frames == [(STDOUT, b"hello\n"), (LOG, b""), (STDOUT, b"\xff\x00" * 300)]


def test_whole_lines_get_a_prefix_and_progress_bars_move():
    prefixer = Prefixer(b"[rank=1] ")
    assert prefixer.feed(b"a\nb") == b"[rank=1] a\n"
    assert prefixer.feed(b"c\r\n") == b"[rank=1] bc\r\n"
    assert prefixer.feed(b"10%\r20%\r30%") == b"[rank=1] 10%\r[rank=1] 20%\r"
    assert prefixer.rest() == b"[rank=1] 30%\n"
    assert prefixer.rest() == b""


def test_a_line_that_never_ends_is_not_collected_for_ever():
    prefixer = Prefixer(b"[rank=1] ")
    assert len(prefixer.feed(b"x" * 100_000)) > 100_000


def test_the_end_of_the_output_that_says_why():
    text = "epoch 1\n10%\r100%\n[rank1]: Traceback (most recent call last):\n  File a\nValueError: no\n\n"
    assert shorten(text) == "[rank1]: Traceback (most recent call last):\n  File a\nValueError: no"
    assert shorten("10%\r50%\rkilled\n") == "killed"
    assert shorten("\n".join(map(str, range(100)))).splitlines()[0] == "90"


def test_a_broken_connection_is_an_echo_and_not_the_cause():
    gloo = "RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.0.0.1]:6025"
    assert is_echo(f"Traceback ...\n{gloo}\n")
    assert is_echo(f"Traceback ...\n[rank0]: {gloo}\n")
    assert is_echo("torch.distributed.DistBackendError: NCCL error in: x")
    assert not is_echo("ValueError: no")
    assert not is_echo("")
    echo = RankFailure(0, "collateral", message="exited with code 1", exit_code=1, time=1.0)
    cause = RankFailure(1, "script", message="exited with code 3", exit_code=3, time=2.0)
    assert choose_cause([echo, cause]) is cause
    assert is_retryable(cause)
    error = to_error(cause)
    assert isinstance(error, ScriptError)
    assert (error.exit_code, str(error)) == (3, "rank 1 exited with code 3")


def test_every_variable_of_torchrun_is_the_ranks_own():
    inherited = {
        "RANK": "0",
        "HOME": "/root",
        "RAY_JOB_ID": "1",
        "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace",
    }
    names = script_environment(inherited, PLAN, PLACE)
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "HOME": "/root",
    }
    assert expected.items() <= names.items()
    assert "RAY_JOB_ID" not in names
    assert "PYTHONBREAKPOINT" not in names
    assert "RANK" not in script_environment(inherited, {**PLAN, "rank_env": False}, PLACE)


def test_the_users_variables_have_the_last_word():
    plan = {**PLAN, "env": {"RANK": "9", "OMP_NUM_THREADS": None}, "python_path": ["/mine"]}
    names = script_environment({"PYTHONPATH": "/theirs"}, plan, PLACE)
    assert names["RANK"] == "9"
    assert "OMP_NUM_THREADS" not in names
    assert names["PYTHONPATH"] == os.pathsep.join(["/mine", "/theirs"])


def test_threads_are_torchruns_unless_more_is_reserved():
    assert num_threads({}, cpus_per_worker=1.0, num_workers=4) == "1"
    assert num_threads({}, cpus_per_worker=1.0, num_workers=1) is None
    assert num_threads({}, cpus_per_worker=8.0, num_workers=2) == "8"
    assert num_threads({"OMP_NUM_THREADS": "3"}, cpus_per_worker=8.0, num_workers=2) == "3"


def test_command_lines():
    assert script_command("py", PLAN, PLACE) == ["py", "-u", "train.py", "--epochs", "3"]
    plan = {**PLAN, "module": True, "local_rank_arg": "--local_rank", "process_args": True}
    command = script_command("py", plan, PLACE)
    assert command[2:7] == ["-m", "train.py", "--local_rank=1", "--epochs", "3"]
    assert command[7:] == ["--process_index", "3", "--process_num", "4"]


def test_what_goes_along_is_measured_and_the_largest_named(tmp_path, monkeypatch):
    for name, size in {"train.py": 10, "data/a/b.bin": 2000, ".git/x": 5000, "runs/y": 5000}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    excludes = [".git", "/runs"]
    parcel = shipping.measure(str(tmp_path), excludes)
    assert parcel == shipping.Parcel(2010, 2, (("data/a", 2000), ("train.py", 10)))
    assert "2 files, 0.0 MiB; left out: .git, runs" in shipping.describe(parcel, "here", excludes)
    shipping.check(parcel, "here")
    monkeypatch.setattr(shipping, "MAX_BYTES", 2000)
    with pytest.raises(UsageError, match=r"too large[\s\S]*data/a[\s\S]*--exclude"):
        shipping.check(parcel, "here")


@pytest.mark.parametrize(
    ("path", "module", "name"),
    [("jobs/train.py", False, "train"), ("pkg.train", True, "pkg.train"), ("a b.py", False, "a_b")],
)
def test_the_run_is_called_after_the_script(path, module, name):
    assert default_name(path, module) == name


def test_a_script_stands_in_place_of_model_and_data():
    config = Config.from_mapping({"name": "x", "script": {"path": "train.py"}})
    assert (config.model, config.data) == (None, None)
    assert config.failure.max_failures == 0
    assert (
        Config.from_mapping({"name": "x", "script": {"path": "a"}, "failure": {"max_failures": 2}}) != config
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"_target_": "a.B"}}, "and script cannot both be given"),
        ({"script": {"path": " "}}, "must not be empty"),
        ({"script": {"path": "a", "env": {"A=B": "x"}}}, "is not the name of an environment variable"),
        ({"script": {"path": "a", "min_workers": 3}}, "is more than scaling.num_workers"),
        ({"script": {"path": "a", "arg": ["b"]}}, "did you mean script.args"),
        (
            {"script": None, "model": {"_target_": "a.B"}, "data": None},
            "is required unless there is a script",
        ),
    ],
)
def test_what_a_script_section_rules_out(changes, words):
    with pytest.raises(ConfigError, match=words):
        Config.from_mapping({"name": "x", "script": {"path": "train.py"}, **changes})
