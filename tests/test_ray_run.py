"""Ranks on a real Ray: results, failures, stops, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

import raytrainer
from raytrainer.cluster.ray_run import run_on_ray
from raytrainer.cluster.ray_session import shipped_directory
from raytrainer.cluster.signals import StopSignal
from raytrainer.config.connection import RaySection
from raytrainer.config.scaling import ScalingSection
from raytrainer.errors import ClusterRequestError, UsageError
from tests.training import config, killed_once

ROOT = str(Path(__file__).parents[1])


def run(
    entry, address, *, on_record=None, stop=None, max_failures=0, num_workers=2, committed=None, **payload
):
    records = []
    outcome = run_on_ray(
        {"entry": f"tests.ray_entries:{entry}", "import_paths": [ROOT], **payload},
        ScalingSection(num_workers=num_workers),
        address if isinstance(address, RaySection) else RaySection(address=address),
        on_record=on_record or records.append,
        stop=stop or StopSignal(),
        max_failures=max_failures,
        storage_path="runs",
        name="test",
        verbose=False,
        committed_step=committed or (lambda: None),
    )
    return outcome, records


@pytest.mark.ray
def test_two_ranks_return_results_and_send_records_in_order(ray_address, tmp_path, capfd):
    outcome, records = run("add_up", ray_address, log_dir=str(tmp_path), num_steps=500)
    assert outcome.status == "finished"
    assert outcome.exit_code == 0
    assert outcome.result["total"] == 3.0
    assert outcome.result["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert outcome.result["environment"]["WORLD_SIZE"] == "2"
    assert outcome.result["directory"] == os.getcwd()
    assert not outcome.result["ray_train_imported"]
    assert records[0] == {"event": "started"}
    assert [record["step"] for record in records if "step" in record] == list(range(500))
    assert records[-1] == {"output": "rank 0 says hello", "stream": "stdout"}
    assert "rank 1 says hello" in (tmp_path / "rank_1.log").read_text()
    deadline = time.monotonic() + 30  # a killed worker is gone soon, not at once
    while psutil.pid_exists(outcome.result["pid"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err == ""


@pytest.mark.ray
def test_a_users_exception_ends_the_run_and_is_the_cause(ray_address):
    began = time.time()
    outcome, _ = run("fail_on_rank_1", ray_address, max_failures=3)
    assert outcome.status == "failed"
    assert outcome.exit_code == 1
    assert outcome.restarts == ()
    assert (outcome.failure.rank, outcome.failure.kind) == (1, "user")
    assert outcome.failure.traceback.splitlines()[0].endswith("in fail_on_rank_1")
    assert outcome.failure.traceback.endswith("ValueError: the label of sample 7 is -1")
    assert outcome.failure.time > began


@pytest.mark.ray
def test_a_killed_rank_is_explained_and_the_group_starts_again(ray_address, capfd):
    outcome, records = run("killed_on_rank_1", ray_address, max_failures=1, num_deaths=1)
    assert outcome.status == "finished"
    assert outcome.result["attempt"] == 1
    assert [failure.kind for failure in outcome.restarts] == ["lost"]
    (event,) = [record for record in records if record.get("event") == "worker_failed"]
    assert event["rank"] == 1
    assert "SIGKILL" in event["message"]
    assert "GiB" in event["message"]
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err == ""


@pytest.mark.ray
def test_a_rank_that_hangs_beside_a_lost_one_still_saves_the_last_finished_step(ray_address, tmp_path):
    wanted = [
        f"ray.address='{ray_address}'",
        "scaling.num_workers=2",
        "checkpoint={every: {steps: 1000}, snapshot: off}",
    ]
    section = killed_once(tmp_path, 9, 1, others_hang=True)
    result = raytrainer.run(config(tmp_path, *wanted, **section))
    assert (result.status, result.restarts, result.steps) == ("finished", 1, 15)
    assert result.lost_steps <= 1


@pytest.mark.ray
def test_a_stop_reaches_the_ranks(ray_address):
    stop, steps = StopSignal(), []

    def on_record(record):
        if "step" in record:
            steps.append(record["step"])
            stop.request("SIGTERM")

    outcome, _ = run("wait_for_stop", ray_address, on_record=on_record, stop=stop)
    assert outcome.status == "stopped"
    assert outcome.exit_code == 143
    assert outcome.result["stop_reason"] == "SIGTERM"
    assert steps[0] == 1


@pytest.mark.ray
def test_what_the_cluster_can_never_give_is_refused(ray_address):
    with pytest.raises(ClusterRequestError, match="can hold 2 of 3 workers"):
        run("add_up", ray_address, num_workers=3)


@pytest.mark.ray
def test_what_the_cluster_cannot_give_yet_is_waited_for_where_asked(ray_address):
    stop, records = StopSignal(), []

    def on_record(record):
        records.append(record)
        stop.request("SIGTERM")

    settings = RaySection(address=ray_address, wait=True)
    outcome, _ = run("add_up", settings, on_record=on_record, stop=stop, num_workers=3)
    assert (outcome.status, outcome.exit_code) == ("stopped", 143)
    assert records[0]["event"] == "waiting"
    assert "no room yet for 3 x {CPU: 1}" in records[0]["message"]


DRIVER = """
import sys, json
from pathlib import Path
from raytrainer.cluster.ray_run import run_on_ray
from raytrainer.cluster.signals import StopSignal, stop_on_signals
from raytrainer.config.connection import RaySection
from raytrainer.config.scaling import ScalingSection

payload, address, marker = json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
stop = StopSignal()
with stop_on_signals(stop):
    if payload.pop("mark_early", False):
        marker.touch()
    outcome = run_on_ray(
        payload, ScalingSection(num_workers=2), RaySection(address=address),
        on_record=lambda record: marker.touch(),
        stop=stop, max_failures=0, storage_path="runs", name="test", verbose=False,
        committed_step=lambda: None,
    )
assert "torch" not in sys.modules
print(json.dumps([outcome.status, outcome.result]))
sys.exit(outcome.exit_code)
"""


class Driver:
    """A driver process of its own, whose descendants are remembered however they are orphaned."""

    def __init__(self, tmp_path, address, **payload):
        self.marker = tmp_path / "marker"
        payload = {"import_paths": [ROOT], **payload}
        self.tag = f"raytrainer-test-{tmp_path.name}-{os.getpid()}"
        environment = {**os.environ, "PYTHONPATH": ROOT, "RAYTRAINER_TEST_TAG": self.tag}
        arguments = [json.dumps(payload), json.dumps(address), str(self.marker)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(DRIVER), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_until_marked(self):
        self.wait_for(self.marker)

    def wait_for(self, path):
        deadline = time.monotonic() + 120
        while not path.exists():
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def left(self):
        """Processes that carry the driver's environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAYTRAINER_TEST_TAG") == self.tag:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_until_none_is_left(self):
        deadline = time.monotonic() + 90
        while left := self.left():
            assert time.monotonic() < deadline, [process.cmdline() for process in left]
            time.sleep(0.1)


@pytest.fixture
def start_driver(tmp_path):
    drivers = []

    def start(address, **payload):
        drivers.append(Driver(tmp_path, address, **payload))
        return drivers[-1]

    yield start
    for driver in drivers:
        for process in driver.left():
            process.kill()
        driver.process.wait()
        driver.process.stdout.close()


@pytest.mark.ray
def test_a_ray_of_its_own_is_silent_and_gone_afterwards(start_driver):
    before = set(Path("/tmp").glob("rt-*"))
    driver = start_driver(None, entry="tests.ray_entries:add_up")
    output, _ = driver.process.communicate(timeout=120)
    assert driver.process.returncode == 0, output
    status, result = json.loads(output)
    assert status == "finished"
    assert result["total"] == 3.0
    assert driver.left() == []
    assert set(Path("/tmp").glob("rt-*")) <= before


@pytest.mark.ray
def test_ctrl_c_in_a_terminal_stops_after_the_step(start_driver):
    driver = start_driver(None, entry="tests.ray_entries:wait_for_stop")
    driver.wait_until_marked()
    # A terminal sends it to the whole group: driver, Ray and ranks.
    os.killpg(driver.process.pid, signal.SIGINT)
    output, _ = driver.process.communicate(timeout=60)
    assert driver.process.returncode == 130, output
    assert json.loads(output) == ["stopped", {"status": "stopped", "stop_reason": "SIGINT"}]
    assert driver.left() == []


@pytest.mark.ray
def test_a_second_signal_does_not_wait_for_the_ranks(start_driver, tmp_path):
    asked = tmp_path / "asked"
    driver = start_driver(None, entry="tests.ray_entries:ignore_stop", asked=str(asked))
    driver.wait_until_marked()
    driver.process.send_signal(signal.SIGTERM)
    driver.wait_for(asked)
    driver.process.send_signal(signal.SIGINT)
    output, _ = driver.process.communicate(timeout=60)
    assert driver.process.returncode == 143, output
    assert json.loads(output) == ["stopped", None]
    assert driver.left() == []


@pytest.mark.ray
def test_a_killed_driver_leaves_no_process(start_driver):
    driver = start_driver(None, entry="tests.ray_entries:wait_for_stop")
    driver.wait_until_marked()
    assert len(driver.left()) > 3
    driver.process.kill()
    driver.process.wait()
    driver.wait_until_none_is_left()


@pytest.mark.ray
def test_a_killed_driver_leaves_no_rank_on_a_cluster(start_driver, ray_address, tmp_path):
    driver = start_driver(ray_address, entry="tests.ray_entries:wait_for_stop", pid_dir=str(tmp_path))
    driver.wait_until_marked()
    ranks = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(ranks) == 2
    driver.process.kill()
    driver.process.wait()
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.ray
def test_ctrl_c_while_ray_starts(start_driver):
    driver = start_driver(None, entry="tests.ray_entries:wait_for_stop", mark_early=True)
    driver.wait_until_marked()
    driver.process.send_signal(signal.SIGINT)
    output, _ = driver.process.communicate(timeout=60)
    assert driver.process.returncode == 130, output
    assert json.loads(output) == ["stopped", None]
    assert driver.left() == []


def test_an_address_where_nothing_answers():
    with pytest.raises(UsageError, match="no Ray cluster answers there"):
        run("add_up", "127.0.0.1:1")


def test_ray_client_is_refused():
    with pytest.raises(UsageError, match="host:port of the head node"):
        run("add_up", "ray://head:10001")


def test_the_runs_are_not_shipped_with_the_working_directory(tmp_path):
    shipped = shipped_directory(str(tmp_path), str(tmp_path / "runs"), {"excludes": ["*.bin"]})
    assert shipped["working_dir"] == str(tmp_path)
    assert {"*.bin", "/runs", ".git"} <= set(shipped["excludes"])
    assert "/.." not in shipped_directory(str(tmp_path), "s3://bucket/runs", {})["excludes"]
