"""Launched scripts on a real Ray: the ranks' variables, output, failures, and that nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from raytrainer.__main__ import main
from tests.test_launch import wait_gone

ROOT = Path(__file__).parents[1]
ACT = str(Path(__file__).parent / "launch_scripts" / "act.py")
SHOW = str(Path(__file__).parent / "launch_scripts" / "show.py")
pytestmark = pytest.mark.ray


@pytest.fixture
def launch(tmp_path, monkeypatch, ray_address):
    """`raytrainer launch` with two ranks on the session's Ray; the exit code."""
    monkeypatch.chdir(tmp_path)

    def launch(*arguments):
        return main(["launch", "-n", "2", "--address", ray_address, *map(str, arguments)])

    return launch


def start(folder, *arguments):
    """`raytrainer launch` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "raytrainer", "launch", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for(folder, *names, process):
    deadline = time.monotonic() + 90
    while not all((folder / name).exists() for name in names):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, names
        time.sleep(0.05)


def noted_pids(folder, number):
    files = [*folder.glob("pid_*"), *folder.glob("children_*")]
    pids = [int(pid) for path in files for pid in path.read_text().split()]
    assert len(pids) == number
    return pids


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
    wait_gone(noted_pids(tmp_path, 6))


@pytest.mark.parametrize(
    ("number", "action", "code"), [(signal.SIGINT, "save", 0), (signal.SIGKILL, "children", -signal.SIGKILL)]
)
def test_a_signal_to_the_command_reaches_the_scripts(tmp_path, ray_address, number, action, code):
    process = start(tmp_path, "-n", 2, "--address", ray_address, ACT, tmp_path, f"*={action}")
    wait_for(tmp_path, "ready_0", "ready_1", process=process)
    pids = noted_pids(tmp_path, 2 if action == "save" else 6)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    if action == "save":
        assert [(tmp_path / f"told_{rank}").read_text() for rank in range(2)] == ["SIGINT", "SIGINT"]
    wait_gone(pids)


def test_after_a_node_s_death_the_scripts_start_again_on_what_is_left(tmp_path):
    from ray.cluster_utils import Cluster

    environment = dict(os.environ)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=2)
        arguments = ["-n", "1:4", "--max-restarts", 1, "--address", cluster.address]
        process = start(tmp_path, *arguments, ACT, tmp_path, "*=until_restart")
        wait_for(tmp_path, "ready_0", "ready_1", "ready_2", process=process)
        cluster.remove_node(node, allow_graceful=False)
        _, err = process.communicate(timeout=120)
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(environment)
    assert process.returncode == 0, err
    assert [path.name for path in tmp_path.glob("world_size_*")] == ["world_size_0"]
    assert (tmp_path / "world_size_0").read_text() == "1"
    wait_gone(noted_pids(tmp_path, 3))
