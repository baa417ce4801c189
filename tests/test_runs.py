"""`raytrainer runs`: how each run directory stands, and that looking disturbs no run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from raytrainer import runs
from raytrainer.__main__ import main
from raytrainer.errors import NonFiniteLossError, ResumeError
from raytrainer.result import Result
from raytrainer.rundir import RunDirectory, is_live, read_result
from tests.training import config as small_config
from tests.training import train

BLOBS = {"_target_": "tests.training.Blobs"}
ACCURACY = {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 4}


def config(tmp_path, name, *overrides):
    monitored = "checkpoint={monitor: eval/accuracy, mode: max}"
    data = {"train": BLOBS, "eval": BLOBS, "global_batch_size": 16}
    return small_config(
        tmp_path, f"name={name}", monitored, *overrides, data=data, metrics={"accuracy": ACCURACY}
    )


def begin(tmp_path, name, start_s=1000.0, metrics=(), checkpoints=()):
    """A run directory as an attempt that goes on has it; the caller closes it."""
    run_dir = RunDirectory.open(config(tmp_path, name))
    run_dir.write_description(config(tmp_path, name))
    for time_s, event in ((start_s, "started"), (start_s + 5, "checkpointed")):
        line = {"event": event, "time_s": time_s, "step": 5 if event == "checkpointed" else 0}
        run_dir.storage.append("events.jsonl", json.dumps(line).encode() + b"\n")
    for line in metrics:
        run_dir.storage.append("metrics.jsonl", line + b"\n")
    for step, values in checkpoints:
        manifest = {"format": 1, "step": step, "epoch": 0, "files": {}, "meaning": {}, "metrics": values}
        run_dir.storage.make_folder(f"checkpoints/step_{step:08d}")
        run_dir.storage.write(f"checkpoints/step_{step:08d}/manifest.json", json.dumps(manifest).encode())
    return run_dir


def statuses(tmp_path):
    return {run.name: run.status for run in runs.list_runs(str(tmp_path))}


def test_a_run_is_running_while_a_process_holds_it_and_interrupted_after(tmp_path):
    run_dir = begin(tmp_path, "a")
    assert is_live(run_dir.root) is True
    assert statuses(tmp_path) == {"a": "running"}
    run_dir.close()
    assert is_live(run_dir.root) is False
    assert statuses(tmp_path) == {"a": "interrupted"}


def test_a_result_says_how_the_run_ended_until_it_is_begun_again(tmp_path):
    for status in ("finished", "failed", "stopped"):
        with begin(tmp_path, status) as run_dir:
            run_dir.write_result(Result(status, steps=7, wall_s=61.0))
    assert statuses(tmp_path) == {name: name for name in ("finished", "failed", "stopped")}
    with begin(tmp_path, "finished"):
        assert statuses(tmp_path)["finished"] == "running"
    assert statuses(tmp_path)["finished"] == "interrupted"


def test_steps_best_and_times_of_a_run_that_goes_on(tmp_path):
    metrics = [b'{"step": 40, "time_s": 1030.0, "loss": 1.0}', b'{"step": 50, "time_s": 1090.0, "lo']
    values = [(10, {"eval/accuracy": 0.5}), (20, {"eval/accuracy": 0.75}), (30, {"eval/accuracy": 0.7})]
    with begin(tmp_path, "a", metrics=metrics, checkpoints=values):
        [run] = runs.list_runs(str(tmp_path))
    assert (run.steps, run.best, run.time_s, run.last_active_s) == (40, ("eval/accuracy", 0.75), 30.0, 1030.0)
    assert runs.as_rows([run], now_s=1030.0 + 7500)[0] == [
        "a", "running", "40", "eval/accuracy 0.75", "30 s", "2 h 5 min",
    ]  # fmt: skip


def test_only_the_end_of_a_long_metrics_file_is_read(tmp_path):
    lines = [json.dumps({"step": step, "time_s": 1000.0 + step}).encode() for step in range(5000)]
    with begin(tmp_path, "a", metrics=lines):
        assert runs.list_runs(str(tmp_path))[0].steps == 4999


def test_the_latest_active_comes_first_and_other_folders_are_no_runs(tmp_path):
    for name, start_s in (("old", 10.0), ("new", 5000.0), ("middle", 700.0)):
        begin(tmp_path, name, start_s).close()
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").write_text("")
    assert [run.name for run in runs.list_runs(str(tmp_path))] == ["new", "middle", "old"]


def test_damaged_files_cost_their_columns_alone(tmp_path):
    with begin(tmp_path, "a", checkpoints=[(3, {"eval/loss": 0.5})]) as run_dir:
        run_dir.storage.write("config.yaml", b"checkpoint: [")
        run_dir.storage.write("result.json", b"{")
        run_dir.storage.append("events.jsonl", b"\xff[1]\n[2]\n")
    [run] = runs.list_runs(str(tmp_path))
    assert (run.status, run.best, run.steps) == ("interrupted", ("eval/loss", 0.5), 5)


def test_looking_does_not_keep_a_run_from_starting(tmp_path):
    """A reader shares the lock for an instant; a run that begins in that instant waits for it, no longer."""
    import fcntl
    import threading

    begin(tmp_path, "a").close()
    with open(tmp_path / "a" / "lock") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        release = threading.Timer(0.05, fcntl.flock, (reader, fcntl.LOCK_UN))
        release.start()
        with RunDirectory.open(config(tmp_path, "a")):
            release.join()
            with pytest.raises(ResumeError, match="in use"):
                RunDirectory.open(config(tmp_path, "a"))


def test_training_in_this_process_leaves_a_result_too(tmp_path):
    result = train(config(tmp_path, "good"))
    assert read_result(result.run_dir) == result
    with pytest.raises(NonFiniteLossError):
        train(config(tmp_path, "bad", "optimizer.lr=1e38"))
    failed = read_result(str(tmp_path / "bad"))
    assert (failed.status, failed.exit_code) == ("failed", 1)
    assert "training.on_nan" in failed.error
    stopped = train(config(tmp_path, "half"), stop_at=3)
    assert stopped.status == "stopped"
    assert statuses(tmp_path) == {"good": "finished", "bad": "failed", "half": "stopped"}
    best = next(run.best for run in runs.list_runs(str(tmp_path)) if run.name == "good")
    assert best == ("eval/accuracy", result.best["value"])


def test_the_table_the_json_and_an_empty_storage(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs under {tmp_path}\n"
    begin(tmp_path, "a", checkpoints=[(3, {"eval/accuracy": 0.5})]).close()
    assert main(["runs", str(tmp_path)]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "STATUS", "STEPS", "BEST", "TIME", "AGE"]
    assert row.startswith("a     interrupted  5      eval/accuracy 0.5  5 s")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)
    assert entry["best"] == {"metric": "eval/accuracy", "value": 0.5}


def test_a_folder_that_is_not_there(tmp_path, capsys):
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_an_object_store(tmp_path):
    train(config(tmp_path, "remote", "storage_path=memory://listing", "training.max_epochs=1"))
    [run] = runs.list_runs("memory://listing")
    assert (run.name, run.status, run.steps) == ("remote", "finished", 5)
    assert is_live("memory://listing/remote") is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.4, "0 s"),
        (59.6, "1 min"),
        (3599, "59 min 59 s"),
        (7260, "2 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations(seconds, text):
    assert runs.duration(seconds) == text


def test_the_listing_loads_neither_torch_nor_ray(tmp_path):
    begin(tmp_path, "a").close()
    code = """
import sys
from raytrainer.__main__ import main
assert main(["runs", sys.argv[1]]) == 0
print(sorted({"torch", "ray", "numpy", "torchmetrics", "omegaconf", "rich"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
