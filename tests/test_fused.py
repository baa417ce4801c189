"""Fused trials: each is equal to its own solo run, to 1e-9 in float64, whatever becomes of the others."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from raytrainer import load_config
from raytrainer.build import build_data
from raytrainer.checkpoint import read_weights
from raytrainer.errors import RaytrainerError, UsageError
from raytrainer.fused.group import Group
from raytrainer.fused.trial import EndWish, FusedTrial
from raytrainer.trainer import Trainer


class Points(torch.utils.data.Dataset):
    """[40] points in 6 dimensions, float64, with classes that follow from them."""

    def __init__(self, num_samples=40):
        draw = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_samples, 6, generator=draw, dtype=torch.float64)
        self.targets = self.inputs[:, :3].argmax(1)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def make_model(width=8):
    """A small net in float64 with a norm, a buffer and a frozen-able first layer."""
    return nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 3)).double()


class ItemLoss(nn.Module):
    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets) * (1 + 0 * outputs.sum().item())


def config(folder, name, **keys):
    content = {
        "name": name,
        "storage_path": str(folder),
        "data": {
            "train": {"_target_": "tests.test_fused.Points"},
            "eval": {"_target_": "tests.test_fused.Points", "num_samples": 9},
            "global_batch_size": 16,
            "micro_batch_size": 6,
        },
        "model": {"_target_": "tests.test_fused.make_model"},
        "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
        "metrics": {
            "accuracy": {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 3}
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01},
        "training": {"max_epochs": 3},
        "logging": {"every_n_steps": 2, "sinks": ["jsonl"]},
        **keys,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content))
    return load_config(path)


class Wish:
    requested = None


def train_fused(configs, wish=None):
    """By name: how each trial ended."""
    ends = {}

    def ended(trial, how):
        if isinstance(how, RaytrainerError):
            trial.fail(how)
            ends[trial.config.name] = how
        else:
            ends[trial.config.name] = trial.conclude(how)

    from contextlib import ExitStack

    data = build_data(configs[0])
    with ExitStack() as stack:
        trials = []
        for number, each in enumerate(configs):
            end = EndWish(wish or Wish(), f"{each.storage_path}/{each.name}/end")
            trials.append(FusedTrial(number, each, data, end, lambda record: None))
            stack.enter_context(trials[-1].opened())
        Group(trials, ended).train()
    return ends


def differences(a, b):
    ours, theirs = read_weights(a), read_weights(b)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def records(run_dir):
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    volatile = ("time_s", "samples_per_s", "data_time_pct")
    return [{key: value for key, value in line.items() if key not in volatile} for line in lines]


OPTIMIZERS = {
    "adamw": [
        {"lr": 0.01, "weight_decay": 0.1},
        {"lr": 0.003, "weight_decay": 0.0, "betas": [0.8, 0.99]},
        {"lr": 0.03, "weight_decay": 0.01, "eps": 1e-4},
    ],
    "adam": [{"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.002, "betas": [0.5, 0.9]}],
    "sgd": [{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, {"lr": 0.3}, {"lr": 0.05, "momentum": 0.5}],
    "nesterov": [
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        {"lr": 0.2, "momentum": 0.8, "nesterov": True},
    ],
}
TARGETS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "nesterov": "SGD"}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("same_seed", [True, False])
def test_fused_trials_equal_their_solo_runs(tmp_path, kind, same_seed):
    """With several microbatches a step, a short last step, clipping, a schedule, groups, an average."""
    more = {
        "scheduler": {"_target_": "raytrainer.optim.warmup_cosine", "warmup_steps": 3},
        "training": {"max_epochs": 3, "gradient_clip_norm": 0.5, "ema": {"decay": 0.9}},
        "parameters": {"no_decay": "norms_and_biases"},
    }
    options = OPTIMIZERS[kind]
    names = range(len(options))

    def of(name, number):
        optimizer = {"_target_": f"torch.optim.{TARGETS[kind]}", **options[number]}
        seed = 5 if same_seed else number
        return config(tmp_path, f"{name}{number}", optimizer=optimizer, seed=seed, **more)

    ends = train_fused([of("fused", number) for number in names])
    for number in names:
        solo = Trainer(of("solo", number)).train()
        fused = ends[f"fused{number}"]
        assert fused.status == "finished"
        assert (fused.steps, fused.samples_seen) == (solo.steps, solo.samples_seen)
        assert differences(fused.run_dir, solo.run_dir) < 1e-9
        ours, theirs = records(fused.run_dir), records(solo.run_dir)
        assert [line.keys() for line in ours] == [line.keys() for line in theirs]
        for mine, other in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(other, abs=1e-6)


def test_a_trial_that_ends_early_or_fails_leaves_the_others_as_they_are(tmp_path):
    """One diverges, one stops early, one is told to end; the fourth equals its solo run."""
    loss_cannot_fall = {"monitor": "eval/loss", "patience": 1, "min_delta": 100.0}
    sgd = {"_target_": "torch.optim.SGD", "lr": 0.1}
    configs = [
        config(tmp_path, "healthy", optimizer=sgd, training={"max_epochs": 4}),
        config(tmp_path, "diverges", optimizer={**sgd, "lr": 1e308}, training={"max_epochs": 4}),
        config(
            tmp_path,
            "stops",
            optimizer=sgd,
            seed=1,
            training={"max_epochs": 4, "early_stopping": loss_cannot_fall},
        ),
        config(tmp_path, "told", optimizer=sgd, seed=2, training={"max_epochs": 4}),
    ]
    (tmp_path / "told").mkdir()
    (tmp_path / "told" / "end").touch()
    ends = train_fused(configs)
    assert "is nan" in str(ends["diverges"]) or "is inf" in str(ends["diverges"])
    assert json.loads((tmp_path / "diverges" / "result.json").read_text())["status"] == "failed"
    assert (ends["stops"].status, ends["stops"].steps) == ("finished", 6)
    assert (ends["told"].status, ends["told"].steps) == ("stopped", 3)
    assert ends["healthy"].steps == 12
    solo = Trainer(config(tmp_path, "solo", optimizer=sgd, training={"max_epochs": 4})).train()
    assert differences(ends["healthy"].run_dir, solo.run_dir) < 1e-9


def test_a_stopped_group_goes_on_from_its_checkpoints(tmp_path):
    class StopSoon:
        """At the fifth step."""

        count = 0

        @property
        def requested(self):
            self.count += 1
            return "SIGTERM" if self.count > 2 * 5 else None

    keys = [
        {"optimizer": {"_target_": "torch.optim.Adam", "lr": lr}, "seed": seed}
        for seed, lr in ((1, 0.1), (2, 0.01))
    ]
    first = train_fused([config(tmp_path, f"t{n}", **each) for n, each in enumerate(keys)], StopSoon())
    assert [end.status for end in first.values()] == ["stopped"] * 2
    assert 0 < first["t0"].steps < 9
    second = train_fused([config(tmp_path, f"t{n}", **each) for n, each in enumerate(keys)])
    for number, each in enumerate(keys):
        assert second[f"t{number}"].status == "finished"
        solo = Trainer(config(tmp_path, f"solo{number}", **each)).train()
        assert differences(second[f"t{number}"].run_dir, solo.run_dir) < 1e-9
        assert math.isclose(
            second[f"t{number}"].metrics["eval/loss"], solo.metrics["eval/loss"], rel_tol=1e-9
        )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"model": {"_target_": "tests.test_fused.with_batch_norm"}},
            "1 is a BatchNorm1d, with running statistics",
        ),
        ({"model": {"_target_": "tests.test_fused.with_dropout"}}, "1 is a Dropout"),
        ({"model": {"_target_": "tests.test_fused.Noise"}}, "random"),
        ({"loss": {"_target_": "tests.test_fused.ItemLoss"}}, "item"),
    ],
)
def test_what_cannot_be_fused_is_refused_before_anything_is_done(tmp_path, keys, said):
    configs = [config(tmp_path, f"t{n}", seed=n, **keys) for n in range(2)]
    with pytest.raises(UsageError, match=said):
        train_fused(configs)
    assert not (tmp_path / "t0" / "events.jsonl").exists()


def test_models_of_different_shapes_are_refused(tmp_path):
    configs = [
        config(tmp_path, f"t{width}", model={"_target_": "tests.test_fused.make_model", "width": width})
        for width in (4, 5)
    ]
    with pytest.raises(UsageError, match="differ in shape"):
        train_fused(configs)


def with_batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def with_dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3)).double()


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3).double()

    def forward(self, inputs):
        return self.linear(inputs + torch.randn_like(inputs))
