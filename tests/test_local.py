"""Tests for the local backend, with real processes: faults, stops, new starts, and that nothing is left."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from raytrainer.cluster import local
from raytrainer.cluster.local import check_local_request, run_local
from raytrainer.cluster.outcome import to_error
from raytrainer.cluster.signals import StopSignal
from raytrainer.errors import ClusterRequestError

TESTS = Path(__file__).parent


class Run:
    """One call of `run_local` with its records."""

    def __init__(
        self, folder, entry, num_workers=2, *, max_failures=0, on_record=None, committed=None, **payload
    ):
        self.folder = folder
        self.records = []
        self.stop = StopSignal()
        self._on_record = on_record
        self._arguments = {
            "payload": {
                "entry": f"local_entries:{entry}",
                "import_paths": [str(TESTS)],
                "folder": str(folder),
            }
            | payload,
            "num_workers": num_workers,
            "on_record": self.record,
            "stop": self.stop,
            "max_failures": max_failures,
            "log_dir": folder / "logs",
            "committed_step": committed or (lambda: None),
        }

    def record(self, record):
        self.records.append(record)
        if self._on_record:
            self._on_record(self, record)

    def __call__(self):
        return run_local(**self._arguments)

    def events(self, name):
        return [record for record in self.records if record.get("event") == name]

    def noted(self, rank):
        path = self.folder / f"rank_{rank}.txt"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def log(self, rank):
        return (self.folder / "logs" / f"rank_{rank}.log").read_text()


@pytest.fixture
def short_grace(monkeypatch):
    """For ranks that are sure to hang: how long the wait for them is, is not what is tested."""
    monkeypatch.setattr(local, "GRACE_S", 0.4)


def is_alive(pid):
    """Whether a process runs; a zombie, of which only the entry is left, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pids, timeout_s=20):
    """Wait for processes that are not ours to collect."""
    deadline = time.monotonic() + timeout_s
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if is_alive(pid)]
        time.sleep(0.02)


def assert_none_left(run, num_workers=2):
    for rank in range(num_workers):
        for pid in run.noted(rank):
            assert not is_alive(pid)


# Running


@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_rank_runs_and_rank_0_gives_the_result(tmp_path, num_workers):
    run = Run(tmp_path, "finish", num_workers)
    outcome = run()
    assert (outcome.status, outcome.exit_code, outcome.failure, outcome.restarts) == ("finished", 0, None, ())
    assert outcome.result["rank"] == 0
    assert {"step": 1, "loss": 0.5} in run.records
    assert all(len(run.noted(rank)) == 1 for rank in range(num_workers))
    assert_none_left(run, num_workers)


def test_ranks_get_torchs_variables_threads_and_the_users_paths(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = Run(tmp_path, "show_environment", 2, env={"EXTRA": "yes", "RANK": "9"})
    outcome = run()
    seen = {record["RANK"]: record for record in run.events("environment")}
    assert sorted(seen) == ["0", "1"]
    for rank, values in seen.items():
        assert values["LOCAL_RANK"] == rank
        assert values["WORLD_SIZE"] == values["LOCAL_WORLD_SIZE"] == "2"
        assert (values["GROUP_RANK"], values["MASTER_ADDR"], values["EXTRA"]) == ("0", "127.0.0.1", "yes")
        assert values["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert seen["0"]["MASTER_PORT"] == seen["1"]["MASTER_PORT"]
    paths = run.events("path")
    assert all(str(TESTS) == record["path"][0] for record in paths)
    assert sorted(record["place"] for record in paths) == [[0, 2, 0, 2, 0], [1, 2, 1, 2, 0]]
    assert outcome.result["torch"] is False


def test_a_thread_count_of_the_users_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run = Run(tmp_path, "show_environment", 1)
    run()
    assert run.events("environment")[0]["OMP_NUM_THREADS"] == "7"


def test_output_is_in_log_files_in_order_and_rank_0s_on_the_console_too(tmp_path):
    run = Run(tmp_path, "print_things", 2)
    run()
    lines = [f"rank 1 {stream} {number}" for number in range(3) for stream in ("out", "err")]
    assert run.log(1).splitlines()[:7] == [*lines, "native output"]
    shown = [record["output"] for record in run.records if "output" in record]
    assert shown == [*(line.replace("rank 1", "rank 0") for line in lines), "bar 100%"]
    assert {record["stream"] for record in run.records if "output" in record} == {"stdout", "stderr"}


def test_a_new_start_appends_to_the_log(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").write_text("from before\n")
    run = Run(tmp_path, "print_things", 1)
    run()
    assert run.log(0).startswith("from before\nrank 0 out 0\n")


def test_the_store_and_gloo_connect_the_ranks_of_two_runs_at_once(tmp_path):
    runs = [Run(tmp_path / str(base), "use_torch_store", 2, base=base) for base in (1, 10)]
    outcomes = {}

    def start(base, run):
        run.folder.mkdir()
        outcomes[base] = run()

    threads = [threading.Thread(target=start, args=pair) for pair in zip((1, 10), runs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {base: outcome.result and outcome.result["total"] for base, outcome in outcomes.items()} == {
        1: 3,
        10: 21,
    }


def test_a_parent_that_does_not_read_does_not_hold_the_ranks_up(tmp_path):
    os.mkfifo(tmp_path / "go")

    def on_record(run, record):
        # The console is stuck until the rank has sent its last record.
        if record.get("step") == 0:
            assert (tmp_path / "go").read_text() == "done\n"

    run = Run(tmp_path, "flood", 1, on_record=on_record)
    outcome = run()
    assert outcome.status == "finished"
    assert run.events("flooded")
    assert 100 < len(run.records) < 20_000


def _is_rank_of(path, parent):
    try:
        fields = (path / "stat").read_text().rpartition(")")[2].split()
        return int(fields[1]) == parent and b"worker.py" in (path / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


# Faults


def test_one_ranks_exception_ends_the_run_and_is_shown_once(tmp_path, short_grace):
    run = Run(tmp_path, "raise_on_one", 3, bad_rank=1, max_failures=5)
    outcome = run()
    assert (outcome.status, outcome.exit_code, outcome.restarts) == ("failed", 1, ())
    assert (outcome.failure.rank, outcome.failure.kind) == (1, "user")
    text = str(to_error(outcome.failure))
    assert "in users_model" in text
    assert "worker.py" not in text
    assert "ValueError: shapes do not match" in run.log(1)
    assert not run.events("worker_failed")
    assert_none_left(run, 3)


def test_a_rank_that_has_to_be_killed_leaves_its_stack_in_the_log(tmp_path, short_grace):
    run = Run(tmp_path, "raise_on_one", 2, bad_rank=1)
    run()
    assert "where it stands" in run.log(0)
    assert "in raise_on_one" in run.log(0)


def test_a_usage_error_on_all_ranks_keeps_its_exit_code(tmp_path):
    outcome = Run(tmp_path, "usage_on_all", 2)()
    assert (outcome.status, outcome.exit_code, outcome.failure.kind) == ("failed", 2, "usage")


def test_the_cause_is_shown_though_its_echo_came_first(tmp_path):
    os.mkfifo(tmp_path / "go")
    outcome = Run(tmp_path, "collateral_first", 2, max_failures=3)()
    assert outcome.failure.message == "the real cause"
    assert outcome.restarts == ()


@pytest.mark.parametrize(("entry", "code"), [("exit_on_one", 3), ("leave_on_one", 7)])
def test_a_rank_that_ends_itself_fails_the_run(tmp_path, short_grace, entry, code):
    run = Run(tmp_path, entry, 2, bad_rank=1, max_failures=5)
    outcome = run()
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert (outcome.failure.rank, outcome.failure.kind, outcome.failure.exit_code) == (1, "exit", code)
    assert_none_left(run)


def test_an_entry_that_does_not_exist_is_an_error_of_the_rank(tmp_path):
    outcome = Run(tmp_path, "missing", 1)()
    assert outcome.failure.error_type == "AttributeError"


def test_what_a_finished_rank_left_running_is_ended(tmp_path):
    run = Run(tmp_path, "finish_but_leave_a_child", 2)
    assert run().status == "finished"
    wait_gone(run.noted(0) + run.noted(1))


def test_a_rank_whose_exit_hangs_has_finished_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "EXIT_S", 0.3)
    run = Run(tmp_path, "finish_but_never_exit", 2)
    assert run().status == "finished"
    assert_none_left(run)


# New starts


def test_a_lost_rank_starts_the_group_again(tmp_path, short_grace):
    run = Run(tmp_path, "die_until", 2, num_deaths=2, max_failures=2)
    outcome = run()
    assert (outcome.status, outcome.result["attempt"]) == ("finished", 2)
    assert [cause.signal for cause in outcome.restarts] == ["SIGKILL", "SIGKILL"]
    assert outcome.restarts[0].rss_gib > 0
    events = run.events("worker_failed")
    assert [event["num_failures"] for event in events] == [1, 2]
    assert events[0]["rank"] == 1
    assert "probably the host ran out of memory" in events[0]["message"]
    assert_none_left(run)


def test_failures_without_progress_run_out(tmp_path, short_grace):
    outcome = Run(tmp_path, "die_until", 2, num_deaths=9, max_failures=1)()
    assert (outcome.status, outcome.exit_code, len(outcome.restarts)) == ("failed", 1, 1)
    assert outcome.failure.kind == "lost"


def test_a_committed_step_starts_the_count_again(tmp_path, short_grace):
    os.mkfifo(tmp_path / "go")
    committed = tmp_path / "committed"
    run = Run(
        tmp_path,
        "die_until",
        2,
        num_deaths=3,
        max_failures=1,
        commit=True,
        committed=lambda: int(committed.read_text()) if committed.exists() else None,
    )
    outcome = run()
    assert (outcome.status, len(outcome.restarts)) == ("finished", 3)
    assert [event["num_failures"] for event in run.events("worker_failed")] == [1, 1, 1]
    assert [event["step"] for event in run.events("worker_failed")] == [1, 2, 3]


# Stopping


def test_the_first_request_lets_the_ranks_finish_their_step(tmp_path):
    def on_record(run, record):
        if record.get("step") == 3:
            run.stop.request("SIGTERM")

    run = Run(tmp_path, "train_until_stopped", 2, on_record=on_record)
    outcome = run()
    assert (outcome.status, outcome.exit_code) == ("stopped", 143)
    assert outcome.result["steps"] >= 3


def test_the_second_request_stops_at_once(tmp_path):
    def on_record(run, record):
        run.stop.request("SIGINT")
        run.stop.insist("SIGINT")

    run = Run(tmp_path, "hang", 2, on_record=on_record)
    outcome = run()
    assert (outcome.status, outcome.exit_code, outcome.result) == ("stopped", 130, None)
    assert_none_left(run)


def test_a_request_before_the_first_step_stops_at_once(tmp_path):
    def on_record(run, record):
        if record.get("event") == "loading":
            run.stop.request("SIGINT")

    outcome = Run(tmp_path, "start_slowly", 2, on_record=on_record)()
    assert (outcome.status, outcome.exit_code, outcome.failure) == ("stopped", 130, None)


def test_a_request_from_before_starts_nothing(tmp_path):
    run = Run(tmp_path, "finish", 2)
    run.stop.request("SIGINT")
    assert run().status == "stopped"
    assert not (tmp_path / "logs").exists()


def test_a_request_between_two_starts_starts_nothing_more(tmp_path, short_grace):
    def on_record(run, record):
        if record.get("event") == "worker_failed":
            run.stop.request("SIGTERM")

    run = Run(tmp_path, "die_until", 2, num_deaths=9, max_failures=-1, on_record=on_record)
    outcome = run()
    assert (outcome.status, outcome.exit_code, len(outcome.restarts)) == ("stopped", 143, 1)
    assert len(run.noted(0)) == 1


def test_an_error_in_the_parent_leaves_no_rank(tmp_path):
    def on_record(run, record):
        raise KeyError("broken observer")

    run = Run(tmp_path, "hang", 2, on_record=on_record)
    with pytest.raises(KeyError, match="broken observer"):
        run()
    assert_none_left(run)


# As a program: signals and death of the parent

PROGRAM = """
import json, os, sys
sys.path[:0] = [{tests!r}, {root!r}]
from raytrainer.cluster.local import run_local
from raytrainer.cluster.signals import StopSignal, stop_on_signals
stop = StopSignal()
with stop_on_signals(stop), stop.listening(lambda: os.write(1, b'{{"heard": true}}\\n')):
    outcome = run_local(
        {payload!r}, {num_workers}, on_record=lambda record: print(json.dumps(record), flush=True), stop=stop,
        max_failures=0, log_dir={log_dir!r}, committed_step=lambda: None,
    )
assert "torch" not in sys.modules
print(json.dumps({{"status": outcome.status}}), flush=True)
sys.exit(outcome.exit_code)
"""


@pytest.fixture
def program(tmp_path):
    """Starts a program that runs an entry; ends what is left of it."""
    started = []

    def start(entry, num_workers=2):
        payload = {"entry": f"local_entries:{entry}", "import_paths": [str(TESTS)], "folder": str(tmp_path)}
        code = PROGRAM.format(
            tests=str(TESTS),
            root=str(TESTS.parent),
            payload=payload,
            num_workers=num_workers,
            log_dir=str(tmp_path / "logs"),
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def records_of(process, wanted, count=1):
    """The next `count` records that `wanted` accepts."""
    found = []
    for line in process.stdout:
        record = json.loads(line)
        if wanted(record):
            found.append(record)
            if len(found) == count:
                return found
    raise AssertionError(f"the program ended after {found}")


@pytest.mark.parametrize("entry", ["hang_with_children", "hang_with_the_interpreter_held"])
def test_a_killed_parent_leaves_no_process(program, entry):
    process = program(entry)
    started = records_of(process, lambda record: record.get("event") == "started", count=2)
    pids = [pid for record in started for pid in record["pids"]]
    assert all(is_alive(pid) for pid in pids)
    process.kill()
    process.wait()
    wait_gone(pids)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_the_step(program, number, code):
    process = program("train_until_stopped")
    records_of(process, lambda record: "step" in record)
    process.send_signal(number)
    records_of(process, lambda record: record.get("status") == "stopped")
    assert process.wait() == code


def test_the_second_signal_stops_at_once(program):
    process = program("hang_with_children")
    started = records_of(process, lambda record: record.get("event") == "started", count=2)
    process.send_signal(signal.SIGINT)
    # Two signals that arrive together may be one.
    records_of(process, lambda record: record.get("heard"))
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    wait_gone([pid for record in started for pid in record["pids"]])


def test_a_signal_to_one_rank_stops_them_all_as_a_job_scheduler_does(program):
    process = program("train_until_stopped", num_workers=1)
    records_of(process, lambda record: "step" in record)
    rank = next(int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_rank_of(path, process.pid))
    os.kill(rank, signal.SIGTERM)
    records_of(process, lambda record: record.get("status") == "stopped")
    assert process.wait() == 143


# The stop signal itself


def test_handlers_come_back_and_the_second_signal_insists():
    from raytrainer.cluster.signals import stop_on_signals

    before = signal.getsignal(signal.SIGINT)
    stop = StopSignal()
    seen = []
    with stop_on_signals(stop), stop.listening(lambda: seen.append(stop.immediate)):
        signal.raise_signal(signal.SIGINT)
        assert (stop.requested, stop.immediate) == ("SIGINT", False)
        signal.raise_signal(signal.SIGTERM)
        assert (stop.requested, stop.immediate) == ("SIGINT", True)
    assert seen == [False, True]
    assert signal.getsignal(signal.SIGINT) is before
    assert stop.exit_code == 130


def test_off_the_main_thread_no_handler_is_set():
    from raytrainer.cluster.signals import stop_on_signals

    before = signal.getsignal(signal.SIGINT)
    inside = []

    def body():
        with stop_on_signals(StopSignal()):
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert inside == [before]


def test_a_forked_process_ends_when_it_is_told_to():
    from raytrainer.cluster.signals import stop_on_signals

    with stop_on_signals(StopSignal()):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_more_workers_than_the_machine_holds_are_refused():
    assert check_local_request(2, 2, 8.0) is None
    assert "3 workers share 2 cores" in check_local_request(3, 2, 8.0)
    with pytest.raises(ClusterRequestError, match=r"num_workers = 64\n.*this machine has 8 GiB"):
        check_local_request(64, 2, 8.0)
