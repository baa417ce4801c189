"""`mode: fused` in a file of trials: one process for many trials, each with its own results."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raytrainer import load_config
from raytrainer.__main__ import main
from raytrainer.config.pack import pack_file
from raytrainer.pack.fusible import why_not, with_groups
from raytrainer.pack.trials import base_config, trials_of
from tests.test_fused import config, differences
from tests.test_pack import ROOT, here, status, wait_until

assert here  # a fixture


@pytest.fixture
def fused(here, monkeypatch):
    """Writes the config and the file of trials."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def write(keys=None, **more):
        config(here, "base", **(keys or {}))
        content = {"name": "s", "config": "base.json", "mode": "fused", "metric": "eval/accuracy"}
        Path("t.yaml").write_text(json.dumps({**content, **more}))

    return write


GRID = {"optimizer.lr": [0.01, 0.003], "seed": [0, 1, 2]}


def test_a_grid_trains_as_one_model_with_results_of_its_own(fused, here, capsys):
    fused(grid=GRID)
    assert main(["pack", "t.yaml", "--local"]) == 0
    out = capsys.readouterr().out
    assert "6 trials, 1 group fused on 1 card" in out
    assert "fused_0 starts on cpu, slot 0: trial_000 to trial_005, 6 trials as one model" in out
    assert [status(trial, "s")["state"] for trial in range(6)] == ["finished"] * 6
    assert len(Path("runs/s/results.csv").read_text().splitlines()) == 7
    assert "eval/accuracy" in status(0, "s")["metrics"]
    assert status(0, "s")["step"] == 9
    # Each has a run directory like any other, equal to a run of that trial alone.
    assert main(["eval", "runs/s/trial_004/run"]) == 0
    assert main(["run", "runs/s/trial_004/config.yaml", "--local", "storage_path=alone"]) == 0
    assert differences("runs/s/trial_004/run", "alone/run") < 1e-9
    assert main(["pack", "t.yaml", "--local"]) == 0
    assert "is finished: 6 finished" in capsys.readouterr().out


def test_what_cannot_be_fused_is_said_and_runs_as_processes(fused, here, capsys):
    dropout = {"model": {"_target_": "tests.test_fused.with_dropout"}, "training": {"max_epochs": 1}}
    fused(dropout, grid={"seed": [0, 1]})
    assert main(["pack", "t.yaml", "--local"]) == 0
    out = capsys.readouterr().out
    assert "fused_0: 2 trials not fused, run as processes: 1 is a Dropout" in out
    assert "trial_001 starts on cpu" in out
    assert [status(trial, "s")["state"] for trial in range(2)] == ["finished"] * 2
    assert len(status(0, "s")["attempts"]) == 1


def test_a_search_ends_one_of_a_group_early_and_another_diverges(fused, here, capsys):
    sgd = {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}, "training": {"max_epochs": 8}}
    search = {"scheduler": "asha", "metric": "loss", "reduction_factor": 2}
    rates = [{"optimizer.lr": lr} for lr in (0.3, 1e-7, 1e308)]
    fused(sgd, trials=rates, search=search, metric=None)
    assert main(["pack", "t.yaml", "--local"]) == 1
    assert [status(trial, "s")["state"] for trial in range(3)] in (
        ["finished", "pruned", "failed"],
        # It was through before it could be told.
        ["finished", "finished", "failed"],
    )
    assert "trial_001 is ended early, loss" in capsys.readouterr().out
    assert "the loss of step" in status(2, "s")["message"]


def test_an_interrupted_group_goes_on(fused, here):
    """SIGTERM to the command: all are saved, and --resume finishes them."""
    fused({"training": {"max_epochs": 3000}}, grid=GRID)
    command = [sys.executable, "-m", "raytrainer", "pack", "t.yaml", "--local"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: any(Path("runs/s").glob("trial_005/run/metrics.jsonl")) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 143, out
    steps = [json.loads(Path(f"runs/s/trial_00{n}/run/result.json").read_text())["steps"] for n in range(6)]
    assert steps[0] > 0
    assert steps == [steps[0]] * 6
    assert [status(trial, "s")["state"] for trial in range(6)] == ["stopped"] * 6
    for trial in range(6):
        path = Path(f"runs/s/trial_00{trial}/config.yaml")
        path.write_text(path.read_text().replace("3000", str(steps[0] // 3 + 2)))
    content = json.loads(Path("runs/s/pack.json").read_text())
    for trial in content["trials"]:
        trial["config_yaml"] = trial["config_yaml"].replace("3000", str(steps[0] // 3 + 2))
    Path("runs/s/pack.json").write_text(json.dumps(content))
    assert main(["pack", "--resume", "runs/s", "--local"]) == 0
    assert {status(trial, "s")["step"] for trial in range(6)} == {(steps[0] // 3 + 2) * 3}


def test_groups_are_trials_that_differ_in_seed_and_optimizer_numbers_alone(here):
    config(here, "base")
    grid = {"optimizer.lr": [0.1, 0.2], "model.width": [4, 8], "seed": [1]}
    content = {"name": "s", "config": "base.json", "grid": grid, "mode": "fused"}
    file = pack_file(content, source_path=str(here / "t.yaml"))
    trials, notes = with_groups(trials_of(file), base_config(file))
    assert [trial.group for trial in trials] == [0, 1, 0, 1]
    assert notes == []
    content["grid"] = {"model.width": [4, 8]}
    file = pack_file(content, source_path=str(here / "t.yaml"))
    trials, notes = with_groups(trials_of(file), base_config(file))
    assert [trial.group for trial in trials] == [None, None]
    assert notes[0].startswith(
        "trial_000, trial_001: not fused, since no other trial differs from it in seed"
    )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"optimizer": {"_target_": "torch.optim.RMSprop", "lr": 0.1}}, "optimizer: torch.optim.RMSprop"),
        ({"optimizer": {"_target_": "torch.optim.Adam", "amsgrad": True}}, "amsgrad"),
        ({"training": {"precision": "bf16-mixed"}}, "training.precision: bf16-mixed"),
        ({"training": {"determinism": "bitwise"}}, "training.determinism: bitwise"),
        ({"logging": {"ledger": True}}, "logging.ledger"),
        ({}, None),
    ],
)
def test_why_a_config_cannot_be_fused(here, keys, said):
    found = why_not(load_config(str(Path(config(here, "c", **keys).storage_path) / "c.json")))
    assert found is None if said is None else said in found


def test_a_dry_run_shows_the_groups(fused, here, capsys):
    fused(grid=GRID)
    assert main(["pack", "t.yaml", "--local", "--dry-run"]) == 0
    assert "fused_0: trial_000 to trial_005, 6 trials as one model" in capsys.readouterr().out
