"""Launched scripts on a real Ray: the ranks' variables, output, failures, and that nothing is left."""

import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from raytrainer.__main__ import main
from tests.test_launch import ACT, SCRIPTS, noted_pids, run_cli, wait_for, wait_gone

SHOW = str(SCRIPTS / "show.py")
pytestmark = pytest.mark.ray


@pytest.fixture
def launch(tmp_path, monkeypatch, ray_address):
    """`raytrainer launch` with two ranks on the session's Ray; the exit code."""
    monkeypatch.chdir(tmp_path)

    def launch(*arguments):
        return main(["launch", "-n", "2", "--address", ray_address, *map(str, arguments)])

    return launch


def test_a_script_sees_torchruns_variables_and_the_users_folder(launch, tmp_path):
    assert launch(SHOW, tmp_path, "--epochs", "3") == 0
    first, second = (json.loads((tmp_path / f"show_{rank}.json").read_text()) for rank in range(2))
    assert first["argv"] == [SHOW, str(tmp_path), "--epochs", "3"]
    assert (first["path"], first["cwd"], first["prefix"]) == (
        str(Path(SHOW).parent),
        str(tmp_path),
        sys.prefix,
    )
    assert all(value is not None for value in first["env"].values())
    assert (first["env"]["RANK"], second["env"]["RANK"]) == ("0", "1")
    assert first["env"]["MASTER_PORT"] == second["env"]["MASTER_PORT"]
    assert first["env"]["OMP_NUM_THREADS"] == "1"


def test_a_failure_is_shown_once_with_the_scripts_code_after_its_new_start(launch, tmp_path, capfd):
    assert launch("--max-restarts", 1, ACT, tmp_path, "0=save", "1=exit_3") == 3
    err = capfd.readouterr().err
    assert err.count("error: rank 1 exited with code 3") == 1
    assert "starting again" in err
    assert (tmp_path / "told_0").read_text() == "SIGTERM"
    events = [json.loads(line) for line in (tmp_path / "runs/act/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", "worker_failed", "started", "failed"]


def test_a_killed_ray_worker_takes_its_script_with_it(launch, tmp_path, capfd):
    import threading

    def kill_worker():
        deadline = time.monotonic() + 60
        while not all((tmp_path / f"ready_{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        script = psutil.Process(int((tmp_path / "pid_1").read_text()))
        script.parent().parent().parent().send_signal(signal.SIGKILL)  # past its supervisor

    thread = threading.Thread(target=kill_worker)
    thread.start()
    assert launch(ACT, tmp_path, "*=children") == 1
    thread.join()
    assert "rank 1 was lost" in capfd.readouterr().err
    pids = noted_pids(tmp_path)
    assert len(pids) == 6
    wait_gone(pids)


@pytest.mark.parametrize(
    ("number", "action", "code"), [(signal.SIGINT, "save", 0), (signal.SIGKILL, "children", -signal.SIGKILL)]
)
def test_a_signal_to_the_command_reaches_the_scripts(tmp_path, ray_address, number, action, code):
    process = run_cli(tmp_path, "-n", 2, "--address", ray_address, ACT, tmp_path, f"*={action}")
    wait_for(tmp_path, "ready_0", "ready_1", process=process)
    pids = noted_pids(tmp_path)
    assert len(pids) == (2 if action == "save" else 6)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    if action == "save":
        assert [(tmp_path / f"told_{rank}").read_text() for rank in range(2)] == ["SIGINT", "SIGINT"]
    wait_gone(pids)


def test_after_a_node_s_death_the_scripts_start_again_on_what_is_left(tmp_path, ray_cluster):
    node = ray_cluster.add_node(num_cpus=2)
    arguments = ["-n", "1:4", "--max-restarts", 1, "--address", ray_cluster.address]
    process = run_cli(tmp_path, *arguments, ACT, tmp_path, "*=until_restart")
    wait_for(tmp_path, "ready_0", "ready_1", "ready_2", process=process)
    ray_cluster.remove_node(node, allow_graceful=False)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [path.name for path in tmp_path.glob("world_size_*")] == ["world_size_0"]
    assert (tmp_path / "world_size_0").read_text() == "1"
    pids = noted_pids(tmp_path)
    assert len(pids) == 3
    wait_gone(pids)
