"""The examples: every YAML is valid, and each one trains for a few steps in this process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import raytrainer
from raytrainer import Trainer, load_config
from raytrainer.checkpoint import read_weights
from raytrainer.rundir import read_result

ROOT = Path(__file__).parent.parent
# A file of trials is no config of a run: tests/test_pack.py has it.
TRIALS = ROOT / "examples" / "pack" / "mnist_search.yaml"
YAMLS = sorted({*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/**/*.yaml")} - {TRIALS})
SMALL = [
    "training.max_steps=3",
    "eval.every={steps: 2}",
    "checkpoint.every={steps: 2}",
    "logging.sinks=[jsonl]",
]


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def train(tmp_path, example, *overrides):
    config = load_config(ROOT / "examples" / example, [f"storage_path={tmp_path}", *SMALL, *overrides])
    return Trainer(config).train()


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_yaml_is_valid_and_has_a_schema_for_editors(path):
    load_config(path)
    first = path.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("=")[2]).resolve() == ROOT / "configs" / "schema.json"


def test_own_model(tmp_path):
    result = train(tmp_path, "own_model/spirals.yaml")
    assert (result.status, result.steps) == ("finished", 3)
    assert result.best["metric"] == "eval/accuracy"


def test_a_model_and_data_of_ones_own_take_twenty_lines():
    lines = (ROOT / "examples/own_model/spirals.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith(('"""', "import", "from"))]
    assert len(code) <= 20


def test_gan_trains_both_networks(tmp_path):
    result = train(tmp_path, "gan/gan.yaml", "data.global_batch_size=32", "data.micro_batch_size=16")
    assert math.isfinite(result.metrics["eval/loss"])
    first, last = (
        read_weights(str(tmp_path / "gan" / "checkpoints" / f"step_{step:08d}")) for step in (2, 3)
    )
    for name in ("generator.0.weight", "discriminator.1.weight"):
        assert not torch.equal(first[name], last[name])


def test_finetuning_starts_from_the_weights_and_keeps_the_frozen_layer(tmp_path):
    before = train(
        tmp_path, "finetune/pretrain.yaml", "data.global_batch_size=32", "data.micro_batch_size=32"
    )
    after = train(
        tmp_path, "finetune/finetune.yaml", f"init_from={before.run_dir}", "data.global_batch_size=32"
    )
    old, new = read_weights(before.run_dir), read_weights(after.run_dir)
    assert {name for name in old if torch.equal(old[name], new[name])} == {
        "features.0.weight", "features.0.bias",
    }  # fmt: skip


def test_turned_digits_lie_on_their_side(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "finetune")
    from turned import TurnedDigits

    from raytrainer.data import MnistSubset

    turned, upright = TurnedDigits("train", every=4), MnistSubset("train")
    assert torch.bincount(turned.targets).tolist() == [100] * 10
    assert torch.equal(turned[1][0].rot90(-1, dims=(1, 2)), upright[4][0])


def test_the_notebook(tmp_path):
    """As a script, so that its classes are those of `__main__`, as a notebook's are."""
    script = str(ROOT / "examples" / "notebook.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=250, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("160 steps; losses [")
    one, two = read_result(str(tmp_path / "runs/waves")), read_result(str(tmp_path / "runs/waves_2"))
    assert (one.steps, one.world_sizes, two.steps, two.world_sizes) == (160, [1], 160, [2])


def test_python_names_are_all_there():
    assert all(getattr(raytrainer, name) is not None for name in raytrainer.__all__)
