"""`raytrainer pack` on Ray: the same trials by an actor on each node, when a node or the command dies."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from raytrainer.__main__ import main
from tests.test_pack import ROOT, here, log, noted_pids, status, wait_gone, wait_until, write

assert here  # a fixture


def test_trials_run_in_what_ray_gives_and_keep_their_causes(here, ray_address):
    write("t.yaml", trials=[{"kind": "ok"}, {"kind": "exit3"}, {"kind": "memory"}], per_gpu=2, threads=1)
    assert main(["pack", "t.yaml", "--address", ray_address]) == 3
    assert [status(trial)["cause"] for trial in range(3)] == ["finished", "exit_code", "memory_error"]
    assert "threads 1, cards ''" in log(0)


def test_nothing_is_left_on_ray_when_the_command_is_killed(here, ray_address):
    write("t.yaml", trials=[{"kind": "until"}, {"kind": "leave_and_wait"}], per_gpu=2)
    command = [sys.executable, "-m", "raytrainer", "pack", "t.yaml", "--address", ray_address]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_until(lambda: len(list(Path("runs").glob("search/*/pid_*"))) == 4 or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    wait_gone([pid for trial in (0, 1) for pid in noted_pids(f"runs/search/trial_00{trial}")])


def test_the_trials_of_a_lost_node_run_on_another(here, ray_cluster):
    node = ray_cluster.add_node(num_cpus=1)
    ray_cluster.wait_for_nodes()
    write("t.yaml", trials=[{"kind": "until"}, {"kind": "until"}], per_gpu=1, threads=1)

    def lose_a_node():
        wait_until(lambda: len(list(Path("runs").glob("search/*/pid_*"))) == 2)
        ray_cluster.remove_node(node, allow_graceful=False)
        statuses = [Path(f"runs/search/trial_00{trial}/status.json") for trial in (0, 1)]
        wait_until(lambda: any(json.loads(path.read_text())["attempts"] for path in statuses))
        Path("go").touch()

    thread = threading.Thread(target=lose_a_node)
    thread.start()
    try:
        assert main(["pack", "t.yaml", "--address", ray_cluster.address]) == 0
    finally:
        Path("go").touch()
        thread.join()
    attempts = sorted([each["cause"] for each in status(trial)["attempts"]] for trial in (0, 1))
    assert attempts == [["finished"], ["lost_node", "finished"]]
    wait_gone([pid for trial in (0, 1) for pid in noted_pids(f"runs/search/trial_00{trial}")])
