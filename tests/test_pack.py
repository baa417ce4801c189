"""`raytrainer pack --local` with real processes: faults, their causes, stopping, resuming, nothing left."""

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

ROOT = Path(__file__).parents[1]
ACT = str(Path(__file__).parent / "pack_scripts" / "act.py")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, **keys):
    Path(path).write_text(json.dumps({"name": "search", "command": [sys.executable, ACT], **keys}))


def status(trial, search="search"):
    return json.loads(Path("runs", search, f"trial_{trial:03d}", "status.json").read_text())


def log(trial, search="search"):
    return Path("runs", search, f"trial_{trial:03d}", "stdout.log").read_text()


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids):
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def wait_until(condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def noted_pids(folder):
    return [int(path.name.partition("_")[2]) for path in Path(folder).glob("pid_*")]


def test_n_processes_with_their_indices(here, capsys):
    assert main(["pack", "-n", "3", "--local", "--process-args", "--", sys.executable, ACT]) == 0
    for trial in range(3):
        assert f"process {trial} of 3, threads " in log(trial, "act")
        assert "cards ''" in log(trial, "act")
    out = capsys.readouterr().out
    assert "3 finished" in out
    assert out.splitlines()[-1].startswith("best: loss")
    assert out.splitlines()[-1].endswith("trial_000")
    # The same command again is another search.
    assert main(["pack", "-n", "1", "--local", "--", sys.executable, ACT]) == 0
    assert Path("runs/act-2/results.csv").exists()
    assert Path("runs/act-2/results.png").exists()


def test_eight_trials_four_of_them_with_faults(here, capsys):
    """The four causes are right, and the healthy ones' weights are those of a run alone, to the bit."""
    kinds = ["train", "memory", "train", "kill", "exit3", "train", "hang", "train"]
    trials = [{"kind": kind, "seed": seed} for seed, kind in enumerate(kinds)]
    # The hang is ended by a time-out of its own: the healthy have all the time they need.
    trials[6]["_timeout_s"] = 2.0
    write("t.yaml", trials=trials, per_gpu=8, threads=1, stagger_s=0.0)
    assert main(["pack", "t.yaml", "--local"]) == 137
    causes = [status(trial)["cause"] for trial in range(8)]
    assert causes == [
        "finished", "memory_error", "finished", "signal", "exit_code", "finished", "timeout", "finished",
    ]  # fmt: skip
    assert status(3)["signal"] == "SIGKILL"
    assert status(4)["exit_code"] == 3
    assert status(6)["exit_code"] == 124
    assert status(1)["message"] == "ran out of memory: MemoryError: no more"
    # Alone on the card it had a second chance; the others had none.
    assert [len(status(trial)["attempts"]) for trial in range(8)] == [1, 2, 1, 1, 1, 1, 1, 1]
    assert status(1)["attempts"][1]["place"]["alone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for trial in (0, 2, 5, 7):
        command = [sys.executable, ACT, "--kind", "train", "--seed", str(trial)]
        alone = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert "weights " in alone
        assert alone.splitlines()[-2:] == log(trial).splitlines()[-2:]
    rows = Path("runs/search/results.csv").read_text().splitlines()
    assert len(rows) == 9
    assert "best: loss" in capsys.readouterr().out.splitlines()[-1]


def test_more_memory_than_its_cap_ends_that_trial_and_once_more_alone_it_fits(here, capsys):
    write("t.yaml", trials=[{"kind": "eat", "mib": 400}, {"kind": "ok"}], per_gpu=2, memory_gib=0.25)
    assert main(["pack", "t.yaml", "--local"]) == 0
    assert [each["cause"] for each in status(0)["attempts"]] == ["memory_cap", "finished"]
    assert status(0)["attempts"][0]["peak_memory_gib"] > 0.25
    assert "alone on its card" in capsys.readouterr().out
    assert status(1)["state"] == "finished"


def test_children_that_a_trial_leaves_are_ended_and_a_flood_is_bounded(here):
    write("t.yaml", trials=[{"kind": "leave"}, {"kind": "flood"}], per_gpu=2, log_mib=0.5)
    assert main(["pack", "t.yaml", "--local"]) == 0
    pids = noted_pids(here / "runs/search/trial_000")
    assert len(pids) == 2
    wait_gone(pids)
    text = log(1)
    assert len(text) < 0.6 * 2**20
    assert "bytes left out here" in text
    assert text.startswith("process 0")
    assert text.endswith("the end\n")


def start_pack(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "raytrainer", "pack", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_ctrl_c_stops_all_and_resume_goes_on(here):
    write("t.yaml", trials=[{"kind": "ok"}, {"kind": "until"}, {"kind": "until"}, {"kind": "ok"}], per_gpu=2)
    process = start_pack("t.yaml", "--local")
    wait_until(lambda: len(list(Path("runs").glob("search/*/pid_*"))) == 2)
    # Somebody else may not run it at the same time.
    assert main(["pack", "--resume", "runs/search", "--local"]) == 2
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out
    assert "to go on: raytrainer pack --resume" in out
    wait_gone([pid for trial in (1, 2) for pid in noted_pids(f"runs/search/trial_00{trial}")])
    assert [status(trial)["state"] for trial in range(3)] == ["finished", "stopped", "stopped"]
    Path("go").touch()
    assert main(["pack", "--resume", "runs/search", "--local"]) == 0
    assert [status(trial)["state"] for trial in range(4)] == ["finished"] * 4
    # What had finished was not run again.
    assert log(0).count("process") == 1
    assert main(["pack", "t.yaml", "--local"]) == 0
    assert log(3).count("process") == 1


def test_a_trial_that_will_not_stop_is_killed_by_the_second_ctrl_c(here):
    write("t.yaml", trials=[{"kind": "stubborn"}, {"kind": "stubborn"}], per_gpu=1)
    process = start_pack("t.yaml", "--local")
    wait_until(lambda: list(Path("runs").glob("search/*/pid_*")))
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: list(Path("runs").glob("search/*/told")))
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 143, out
    wait_gone(noted_pids("runs/search/trial_000"))
    # The other one was never started.
    assert not Path("runs/search/trial_001/stdout.log").exists()


def test_trials_of_a_config_save_when_stopped_and_resume_where_they_were(here):
    """The weights in the end are those of a run that nobody stopped."""
    config = ROOT / "examples" / "pack" / "mnist_small.yaml"
    for name in ("whole", "cut"):
        mapping = {"name": name, "config": str(config), "trials": [{"seed": 3}], "threads": 1}
        Path(f"{name}.yaml").write_text(json.dumps(mapping))
    assert main(["pack", "whole.yaml", "--local"]) == 0
    process = start_pack("cut.yaml", "--local")
    metrics = Path("runs/cut/trial_000/run/metrics.jsonl")
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out
    assert status(0, "cut")["state"] == "stopped"
    result = json.loads(Path("runs/cut/trial_000/run/result.json").read_text())
    assert (result["status"], 0 < result["steps"] < 64) == ("stopped", True)
    assert main(["pack", "--resume", "runs/cut", "--local"]) == 0
    results = [json.loads(Path(f"runs/{n}/trial_000/run/result.json").read_text()) for n in ("whole", "cut")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


def test_nothing_is_left_when_the_command_is_killed(here):
    write("t.yaml", trials=[{"kind": "until"}, {"kind": "leave_and_wait"}], per_gpu=2)
    process = start_pack("t.yaml", "--local")
    wait_until(lambda: len(list(Path("runs").glob("search/*/pid_*"))) == 4)
    process.kill()
    process.communicate(timeout=60)
    wait_gone([pid for trial in (0, 1) for pid in noted_pids(f"runs/search/trial_00{trial}")])
    Path("go").touch()
    assert main(["pack", "--resume", "runs/search", "--local"]) == 0


def test_trials_of_a_config_train_and_their_metrics_are_compared(here, capsys):
    example = ROOT / "examples" / "pack" / "mnist_search.yaml"
    arguments = ["num_samples=1", "env.NOTHING=x"]
    assert main(["pack", str(example), "--local", *arguments]) == 0
    results = json.loads(Path("runs/mnist_search/results.json").read_text())
    assert (results["metric"], results["mode"]) == ("eval/accuracy", "max")
    values = [trial["metrics"]["eval/accuracy"] for trial in results["trials"]]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.8
    best = results["trials"][0]["trial"]
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"trial_{best:03d}")
    assert Path(f"runs/mnist_search/trial_{best:03d}/run/result.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "0", "--", "ls"], "-n 0"),
        (["-n", "2"], "no command"),
        (["-n", "2", "--per-gpu", "0.5", "--", "ls"], "whole number of trials"),
        (["-n", "2", "--per-gpu", "0", "--", "ls"], "1 or more"),
        (["-n", "2", "--", "no-such-program"], "there is no such command"),
        (["-n", "2", "--", "python3", "x.py", "--out-dir", "o"], "one directory"),
        (["-n", "2", "--memory-gib", "100000", "--", "ls"], "more than cpu has"),
        (["-n", "2", "--storage-path", "s3://b/x", "--", "ls"], "not to an object store"),
        (["--resume", "nowhere"], "there is no pack.json"),
        ([], "nothing to run"),
        (["python3", "x.py"], "how often?"),
        (["missing.yaml"], "no such file"),
    ],
)
def test_what_is_refused_starts_nothing(here, capsys, arguments, said):
    options, command = arguments, []
    if "--" in arguments:
        place = arguments.index("--")
        options, command = arguments[:place], arguments[place:]
    assert main(["pack", "--local", *options, *command]) == 2
    assert said in capsys.readouterr().err
    assert not list(here.glob("runs/*/trial_*/status.json"))


def test_the_plan_is_shown_and_nothing_started(here, capsys):
    write("t.yaml", grid={"seed": [1, 2, 3]}, per_gpu=2, threads=1)
    assert main(["pack", "t.yaml", "--local", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "MEMORY CAP" in out
    assert "seed=2" in out
    assert "1 more wait for a slot" in out
    assert not Path("runs").exists()


def test_other_trials_under_the_same_name_are_refused(here, capsys):
    write("t.yaml", trials=[{"kind": "ok"}])
    assert main(["pack", "t.yaml", "--local"]) == 0
    write("t.yaml", trials=[{"kind": "exit3"}])
    assert main(["pack", "t.yaml", "--local"]) == 2
    assert "was begun with other trials" in capsys.readouterr().err
