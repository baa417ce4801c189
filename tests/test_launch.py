"""`raytrainer launch` with real processes: what scripts see, how they fail and stop, that none is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from raytrainer.__main__ import main
from raytrainer.cluster import script_hub, script_rank

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "launch_scripts"
ACT = str(SCRIPTS / "act.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(*arguments, num_workers=2):
    """`raytrainer launch --local` in this process; the exit code."""
    return main(["launch", "-n", str(num_workers), "--local", *map(str, arguments)])


def log(folder, rank, name="act"):
    return (folder / "runs" / name / "logs" / f"rank_{rank}.log").read_bytes()


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids, timeout_s=15):
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def noted_pids(folder):
    files = [*folder.glob("pid_*"), *folder.glob("children_*")]
    return [int(pid) for path in files for pid in path.read_text().split()]


def wait_for(folder, *names, process=None):
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, names
        time.sleep(0.02)


# What scripts see, under both launchers


def environment_of_torchrun():
    """This process's without the settings of its own that a launcher decides."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    """The scripts that need no torch, all below one torchrun, whose start costs seconds; where they wrote."""
    folder = tmp_path_factory.mktemp("torchrun")
    for name in ("exec_relative.py", "part.py"):
        shutil.copy(SCRIPTS / name, folder)
    python = f"{sys.executable} -u"
    commands = [
        f"{python} {SCRIPTS}/show.py {folder} --epochs 3 hydra.run.dir=a/b '+x={{a: 1}}' -- -m",
        f"{python} exec_relative.py",
    ]
    subprocess.run(
        [*TORCHRUN, "--no-python", "bash", "-c", " && ".join(commands)],
        cwd=folder,
        env=environment_of_torchrun(),
        check=True,
        timeout=120,
        capture_output=True,
    )
    return folder


def test_a_script_sees_what_it_sees_under_torchrun(here, torchrun, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    given = ["--epochs", "3", "hydra.run.dir=a/b", "+x={a: 1}", "--", "-m"]
    assert launch(SCRIPTS / "show.py", here, *given) == 0
    for rank in range(2):
        ours = json.loads((here / f"show_{rank}.json").read_text())
        theirs = json.loads((torchrun / f"show_{rank}.json").read_text())
        assert ours.pop("cwd") == str(here)
        assert theirs.pop("cwd") == str(torchrun)
        assert ours["argv"].pop(1) == str(here)
        assert theirs["argv"].pop(1) == str(torchrun)
        assert ours["given"] == theirs["given"]
        for name in theirs["given"]:
            del ours["env"][name], theirs["env"][name]
        ours.pop("unbuffered"), theirs.pop("unbuffered")
        assert ours == theirs
    assert ours["argv"][1:] == given


def test_a_script_that_reads_files_of_its_folder(here, torchrun):
    for name in ("exec_relative.py", "part.py"):
        shutil.copy(SCRIPTS / name, here)
    assert launch("exec_relative.py") == 0
    for rank in range(2):
        assert (here / f"exec_{rank}.json").read_text() == (torchrun / f"exec_{rank}.json").read_text()


def test_a_module_runs_as_python_m_does(here, capfd):
    (here / "pkg").mkdir()
    (here / "pkg" / "__init__.py").touch()
    (here / "pkg" / "train.py").write_text(
        "import sys\nfrom . import __name__ as package\nprint(package, __name__, sys.argv, repr(sys.path[0]))"
    )
    assert launch("-m", "pkg.train", "--epochs", "3", num_workers=1) == 0
    package, name, rest = capfd.readouterr().out.split(" ", 2)
    assert (package, name) == ("pkg", "__main__")
    assert rest == f"['{here}/pkg/train.py', '--epochs', '3'] '{here}'\n"


@pytest.mark.parametrize("argument", ["--local-rank", "--local_rank"])
def test_the_local_rank_as_an_argument(here, capfd, argument):
    assert launch(f"--local-rank-arg={argument}", SCRIPTS / "older_launcher.py", "--epochs", "3") == 0
    assert json.loads(capfd.readouterr().out) == {"local_rank": 0, "epochs": 3}
    assert json.loads(log(here, 1, "older_launcher")) == {"local_rank": 1, "epochs": 3}


def test_process_index_and_number_as_arguments(here):
    assert launch("--process-args", SCRIPTS / "show.py", here, "x") == 0
    seen = json.loads((here / "show_1.json").read_text())
    assert seen["argv"][2:] == ["x", "--process_index", "1", "--process_num", "2"]


def test_a_worker_that_must_not_look_distributed(here, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    assert launch("--no-rank-env", SCRIPTS / "show.py", here, num_workers=1) == 0
    seen = json.loads((here / "show_none.json").read_text())
    assert {name for name, value in seen["env"].items() if value} <= {"OMP_NUM_THREADS"}


def test_the_variables_of_a_yaml_reach_the_script_and_secrets_stay_out_of_the_run_directory(
    here, monkeypatch
):
    monkeypatch.setenv("TOKEN", "s3cret")
    script = here / "show.py"
    script.write_text("import os, sys; print(os.environ['TOKEN'], os.environ['A'], sys.argv[1:])")
    (here / "job.yaml").write_text(
        "name: job\nscaling: {num_workers: 2}\n"
        'script: {path: show.py, args: ["1", b], env: {TOKEN: "${oc.env:TOKEN}", A: x}}\n'
    )
    assert main(["run", "job.yaml", "--local"]) == 0
    assert log(here, 1, "job").decode() == "s3cret x ['1', 'b']\n"
    kept = [path for path in (here / "runs/job").iterdir() if path.is_file()]
    assert not any(b"s3cret" in path.read_bytes() for path in kept)
    result = json.loads((here / "runs/job/result.json").read_text())
    assert (result["status"], result["exit_code"], result["world_sizes"]) == ("finished", 0, [2])
    assert launch("--env", "TOKEN", "--env", "A=${x}", script, "${now:%Y}", num_workers=1) == 0
    assert log(here, 0, "show").decode() == "s3cret ${x} ['${now:%Y}']\n"
    assert b"s3cret" not in (here / "runs/show/config.yaml").read_bytes()


# With torch, under both launchers


@pytest.fixture
def ddp_folder(here):
    (here / "snapshot.json").write_text('{"step": 2}')
    return here


@pytest.mark.parametrize("fails", [False, True])
def test_a_ddp_script_resumes_trains_and_fails_as_under_torchrun(ddp_folder, monkeypatch, capfd, fails):
    if fails:
        monkeypatch.setenv("FAIL", "1")
    script = str(SCRIPTS / "ddp.py")
    theirs = subprocess.run(
        [*TORCHRUN, script], env=environment_of_torchrun(), capture_output=True, timeout=120, text=True
    )
    result = ddp_folder / "result.json"
    expected = result.read_text() if not fails else None
    (ddp_folder / "snapshot.json").write_text('{"step": 2}')
    result.unlink(missing_ok=True)
    assert launch(script) == theirs.returncode == (1 if fails else 0)
    if not fails:
        assert json.loads(expected)["first"] == 2
        assert result.read_text() == expected
    else:
        err = capfd.readouterr().err
        assert "error: rank 1 exited with code 1" in err
        assert err.count("ValueError: the label of sample 7 is -1") == 1
        assert "ValueError: the label of sample 7 is -1" in log(ddp_folder, 1, "ddp").decode()


def test_the_example_runs_from_its_yaml_and_goes_on_from_its_snapshot(here, capfd):
    command = ["run", str(ROOT / "examples/launch/launch.yaml"), "--local"]
    assert main(command) == 0
    first = capfd.readouterr().out
    assert first.count("on 2 ranks") == 3
    assert main([*command, "script.args=[--epochs, '4']"]) == 0
    assert capfd.readouterr().out.startswith("going on at epoch 3\nepoch 4: loss")


def test_a_script_that_spawns_processes_itself(here):
    assert launch(SCRIPTS / "spawn.py", here, num_workers=1) == 0
    assert sorted(path.name for path in here.glob("spawned_*")) == ["spawned_0", "spawned_1"]


@pytest.mark.ray
def test_a_script_that_starts_ray_itself(here, capfd):
    assert launch(SCRIPTS / "ray_inside.py", num_workers=1) == 0
    assert "sum 3 of rank 0" in capfd.readouterr().out


# Output


def run_cli(folder, *arguments, **options):
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "raytrainer", "launch", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def test_rank_0_is_shown_byte_by_byte_and_every_rank_is_logged_in_order(tmp_path):
    process = run_cli(tmp_path, "-n", 2, "--local", ACT, tmp_path, "*=print", stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=60)
    expected = b"".join(b"out %d\nerr %d\n" % (n, n) for n in range(3)) + b"\xff\x00binary\n\r10%\r100%\n"
    assert process.returncode == 0
    assert out == expected
    assert log(tmp_path, 0) == log(tmp_path, 1) == expected


def test_standard_output_and_error_stay_apart(here, capfd):
    assert launch(ACT, here, "0=print") == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("out 0\nout 1\nout 2\n")
    assert shown.err.startswith("err 0\nerr 1\nerr 2\n")


def test_tee_all_shows_every_rank_with_its_number(here, capfd):
    assert launch("--tee", "all", ACT, here, "*=print") == 0
    out = capfd.readouterr().out.splitlines()
    for rank in range(2):
        assert [line for line in out if line.startswith(f"[rank={rank}] out")] == [
            f"[rank={rank}] out {number}" for number in range(3)
        ]


def test_a_hundred_megabytes_pass(tmp_path):
    with open(tmp_path / "out", "wb") as file:
        process = run_cli(tmp_path, "-n", 1, "--local", ACT, tmp_path, "*=flood", stdout=file)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (tmp_path / "out").stat().st_size == len(log(tmp_path, 0)) == 100_000_000


def test_a_reader_that_goes_away_does_not_end_the_script(tmp_path):
    process = run_cli(tmp_path, "-n", 1, "--local", ACT, tmp_path, "*=flood")
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    process.stderr.close()
    assert len(log(tmp_path, 0)) == 100_000_000


# Failures


@pytest.mark.parametrize(("action", "code"), [("exit_3", 3), ("raise", 1), ("killed", 137)])
def test_the_first_failure_is_shown_once_and_its_code_is_the_commands(here, capfd, action, code):
    assert launch(ACT, here, f"1={action}", "0=save") == code
    err = capfd.readouterr().err
    assert err.count("error: rank 1 ") == 1
    told = {"exit_3": "about to fail", "raise": "ValueError: the label", "killed": "killed by SIGKILL"}
    assert err.count(told[action]) == 1
    assert (here / "told_0").read_text() == "SIGTERM"
    assert json.loads((here / "runs/act/result.json").read_text())["exit_code"] == code
    wait_gone(noted_pids(here), 0)


def test_what_is_on_the_console_already_is_not_repeated(here, capfd):
    assert launch(ACT, here, "0=raise") == 1
    assert capfd.readouterr().err.count("ValueError: the label of sample 7 is -1") == 1


def test_a_rank_that_ended_while_another_goes_on_is_told_of(here, capfd, monkeypatch):
    notice = script_hub.ScriptHub._notice

    def notice_and_let_go(hub):
        notice(hub)
        (here / "go").touch()

    monkeypatch.setattr(script_hub, "NOTICE_S", 0.1)
    monkeypatch.setattr(script_hub.ScriptHub, "_notice", notice_and_let_go)
    assert launch(ACT, here, "1=late") == 0
    assert (here / "go").exists(), "told before the other had ended by itself"
    assert "rank 0 ended with exit code 0 over" in capfd.readouterr().err


def test_a_script_that_ignores_sigterm_is_killed(here, monkeypatch):
    monkeypatch.setattr(script_rank, "END_GRACE_S", 0.5)
    assert launch(ACT, here, "1=exit_3", "0=ignore") == 3
    wait_gone(noted_pids(here), 0)


def test_a_new_start_counts_up(here):
    assert launch("--max-restarts", 2, ACT, here, "*=fail_once") == 0
    events = [json.loads(line) for line in (here / "runs/act/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", "worker_failed", "started", "finished"]
    assert (here / "attempt1_0").exists()
    assert (here / "attempt1_1").exists()
    result = json.loads((here / "runs/act/result.json").read_text())
    assert (result["status"], result["restarts"]) == ("finished", 1)


def test_one_start_is_not_started_again(here):
    assert launch(ACT, here, "*=fail_once") == 7
    assert not (here / "attempt1_0").exists()


def test_what_a_script_leaves_behind_is_ended(here):
    assert launch(ACT, here, "*=leave") == 0
    pids = noted_pids(here)
    assert len(pids) == 6
    wait_gone(pids, 0)


def test_two_at_once_do_not_collide(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    both = [run_cli(tmp_path, "-n", 2, "--local", ACT, tmp_path / name, "*=late") for name in "ab"]
    for name in "ab":
        wait_for(tmp_path / name, "pid_0", "pid_1")
        (tmp_path / name / "go").touch()
    for process in both:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["act", "act-2"]


# Stops, and the death of processes in between


@pytest.mark.parametrize(
    ("number", "name", "action", "code"),
    [
        (signal.SIGINT, "SIGINT", "save", 0),
        (signal.SIGTERM, "SIGTERM", "save", 0),
        (signal.SIGINT, "SIGINT", "wait", 130),
        (signal.SIGTERM, "SIGTERM", "wait", 143),
    ],
)
def test_a_signal_reaches_the_scripts_and_the_exit_code_is_theirs(tmp_path, number, name, action, code):
    process = run_cli(tmp_path, "-n", 2, "--local", ACT, tmp_path, f"*={action}")
    wait_for(tmp_path, "ready_0", "ready_1", process=process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    if action == "save":
        assert [(tmp_path / f"told_{rank}").read_text() for rank in range(2)] == [name, name]
    wait_gone(noted_pids(tmp_path), 0)
    assert json.loads((tmp_path / "runs/act/result.json").read_text())["status"] == "stopped"


def test_a_second_signal_stops_at_once(tmp_path):
    process = run_cli(tmp_path, "-n", 2, "--local", ACT, tmp_path, "*=ignore")
    wait_for(tmp_path, "ready_0", "ready_1", process=process)
    process.send_signal(signal.SIGTERM)
    wait_for(tmp_path, "told_0", "told_1", process=process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    wait_gone(noted_pids(tmp_path))


@pytest.mark.parametrize("victim", ["driver", "rank", "supervisor"])
def test_nothing_is_left_of_a_killed(tmp_path, victim):
    process = run_cli(tmp_path, "-n", 2, "--local", ACT, tmp_path, "*=children")
    wait_for(tmp_path, "ready_0", "ready_1", process=process)
    everybody = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
    assert set(noted_pids(tmp_path)) <= set(everybody)
    if victim == "driver":
        process.kill()
    else:
        supervisor = psutil.Process(int((tmp_path / "pid_0").read_text())).parent()
        # Above it is the one that waits for it, and above that the rank.
        (supervisor if victim == "supervisor" else supervisor.parent().parent()).kill()
    process.communicate(timeout=60)
    if victim != "driver":
        assert process.returncode == 1
    left = everybody
    if victim == "supervisor":
        # With its supervisor goes the knowledge of what left the script's group.
        group = noted_pids(tmp_path)
        left = [pid for pid in everybody if pid in group]
        apart = [int((tmp_path / f"children_{rank}").read_text().split()[0]) for rank in range(2)]
        left = [pid for pid in left if pid not in apart]
        for pid in everybody:
            if pid not in left and is_alive(pid):
                psutil.Process(pid).kill()
        for pid in apart:
            # Also what they have started since: it is in the session that each of them leads.
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    wait_gone(left)


# What cannot be launched


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian.py"], ["there is no script trian.py", "did you mean train.py?"]),
        (["folder"], ["folder is a directory", "no __main__.py"]),
        (["notes.txt"], ["notes.txt is not a Python file"]),
        (["-n", "0", "train.py"], ["-n 0", "1 or more"]),
        (["-n", "4:2", "train.py"], ["-n 4:2", "MIN:MAX"]),
        (["--env", "1A=2", "train.py"], ["--env 1A=2", "NAME=VALUE"]),
        (["--env", "NOT_SET_HERE", "train.py"], ["option --env", "NOT_SET_HERE is not set"]),
        (["-n", "2", "--no-rank-env", "train.py"], ["option --no-rank-env", "2 workers without their ranks"]),
        (["--tee", "some", "train.py"], ["option --tee", "rank0, all"]),
        (["--working-dir", "nowhere", "train.py"], ["nowhere does not exist on"]),
    ],
)
def test_what_cannot_be_launched_is_said_before_anything_starts(here, capfd, arguments, words):
    (here / "train.py").touch()
    (here / "folder").mkdir()
    (here / "notes.txt").write_text("not a program at all")
    assert main(["launch", "--local", *arguments]) == 2
    err = capfd.readouterr().err
    assert all(word in err for word in words), err
    assert "Traceback" not in err


def test_a_port_that_is_taken(here, capfd):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert launch("--master-port", port, ACT, here) == 2
    assert f"{port}" in capfd.readouterr().err


def test_the_ports_of_launches_are_held(here):
    """Another process may not bind what rank 0 is about to."""
    import socket
    from contextlib import ExitStack

    with ExitStack() as resources:
        rank = script_rank._ScriptRank(
            {"first_attempt": 0, "working_dir": None, "cwd": ".", "local": True, "master_port": None},
            None,
            None,
            resources,
        )
        port = rank._hold_port()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("", port)):
            pass  # as torch's store does
