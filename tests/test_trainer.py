"""The loop in one process: what a step computes, when things are due, and that a resume is exact."""

import errno
import json
import os
import threading

import pytest
import torch
from torch import nn

from raytrainer import checkpoint
from raytrainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteLossError,
    RaytrainerWarning,
    ResumeError,
    SampleError,
    StorageError,
)
from raytrainer.manifest import list_checkpoints
from raytrainer.rundir import RunDirectory
from raytrainer.storage import Storage, open_storage
from raytrainer.task import Task
from raytrainer.trainer import Trainer
from tests.training import Blobs, Net, config, train

EVAL = {
    "train": {"_target_": "tests.training.Blobs"},
    "eval": {"_target_": "tests.training.Blobs", "seed": 1},
}
ACCURACY = {"accuracy": {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 4}}


def records(tmp_path, file="metrics.jsonl", name="run"):
    return [json.loads(line) for line in (tmp_path / name / file).read_text().splitlines()]


def weights(tmp_path, step, name="run"):
    return torch.load(tmp_path / name / f"checkpoints/step_{step:08d}/model.pt", weights_only=True)


def same(result, other):
    return (result.weights_sha256, result.state_sha256) == (other.weights_sha256, other.state_sha256)


def test_a_run_learns_and_its_records_add_up(tmp_path):
    result = train(config(tmp_path, "training.max_epochs=6"))
    lines = records(tmp_path)
    assert (result.status, result.steps, result.epochs, result.samples_seen) == ("finished", 30, 6, 420)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert {"epoch", "time_s", "lr", "samples_per_s", "data_time_pct", "world_size", "total_steps"} <= set(
        lines[0]
    )
    assert [line["event"] for line in records(tmp_path, "events.jsonl")] == [
        "started",
        *["checkpointed"] * 6,
        "finished",
    ]


RESUMES = {
    "sgd": [],
    "adamw, warm-up": [
        "optimizer={_target_: torch.optim.AdamW, lr: 0.01}",
        "scheduler={_target_: raytrainer.optim.warmup_cosine, warmup_steps: 4}",
        "training.gradient_clip_norm=0.5",
    ],
    "onecycle, ema": [
        "scheduler={_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.2}",
        "training.ema.decay=0.9",
    ],
    "epochs, loader workers": [
        "scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 1, interval: epoch}",
        "data.loader.num_workers=1",
    ],
    "fp16": ["training.precision=fp16-mixed"],
    "bf16": ["training.precision=bf16-mixed"],
}


@pytest.mark.parametrize("overrides", RESUMES.values(), ids=RESUMES)
def test_a_stopped_run_ends_with_the_same_bits(tmp_path, overrides):
    whole = train(config(tmp_path / "whole", *overrides))
    parts = config(tmp_path / "parts", *overrides)
    for stop_at, step in ((2, 2), (3, 5), (2, 7)):  # in mid-epoch, after an epoch's last step, in mid-epoch
        stopped = train(parts, stop_at)
        assert (stopped.status, stopped.steps) == ("stopped", step)
    finished = train(parts)
    assert finished.status == "finished"
    assert same(finished, whole)
    assert not same(stopped, whole)
    assert [line["step"] for line in records(tmp_path / "parts")] == list(range(1, 16))


def test_records_of_a_lost_attempt_are_forgotten(tmp_path):
    train(config(tmp_path), stop_at=7)
    folder = tmp_path / "run/checkpoints/step_00000007"
    (folder / "manifest.json").unlink()
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    result = train(config(tmp_path))
    assert [line["step"] for line in records(tmp_path)] == list(range(1, 16))
    assert result.lost_steps == 2


def test_a_step_is_the_weighted_mean_whatever_the_microbatch(tmp_path):
    sizes = (4, 16, 3)
    for size in sizes:
        overrides = [
            f"data.micro_batch_size={size}",
            "model={_target_: tests.training.Net, dropout: 0, norm: false}",
        ]
        train(config(tmp_path / str(size), *overrides, "data.train.noise=0", "training.max_epochs=1"))
    ends = [weights(tmp_path / str(size), 5) for size in sizes]
    for name, value in ends[0].items():
        for other in ends[1:]:
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


def test_weights_of_a_task_make_the_mean(tmp_path):
    """Microbatches with few counted samples must not count as much as full ones."""
    model = "model={_target_: tests.training.Net, dropout: 0, norm: false}"
    ends = []
    for size in (4, 16):
        task = {"task": {"_target_": "tests.training.WeightedTask"}}
        overrides = [f"data.micro_batch_size={size}", model, "data.train.noise=0", "training.max_epochs=1"]
        train(config(tmp_path / str(size), *overrides, **task))
        ends.append((weights(tmp_path / str(size), 5), records(tmp_path / str(size))))
    for name, value in ends[0][0].items():
        torch.testing.assert_close(ends[1][0][name], value, rtol=1e-5, atol=1e-6)
    for line, other in zip(ends[0][1], ends[1][1], strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert "counted" in ends[0][1][0]


def test_evaluation_counts_each_sample_once_and_keeps_the_best(tmp_path):
    mapping = {"data": {**config(tmp_path).model_dump()["data"], **EVAL}, "metrics": ACCURACY}
    run = config(
        tmp_path,
        "checkpoint.monitor=eval/accuracy",
        "checkpoint.mode=max",
        "checkpoint.num_to_keep=1",
        **mapping,
    )
    result = train(run)
    evaluations = [line for line in records(tmp_path) if "eval/accuracy" in line]
    assert [line["step"] for line in evaluations] == [5, 10, 15]
    best = max(evaluations, key=lambda line: line["eval/accuracy"])
    assert result.best == {
        "step": best["step"],
        "metric": "eval/accuracy",
        "value": best["eval/accuracy"],
        "checkpoint": f"step_{best['step']:08d}",
    }
    assert {info.step for info in list_checkpoints(open_storage(str(tmp_path / "run")))} == {best["step"], 15}


def test_early_stopping_ends_the_run(tmp_path):
    stopping = "training.early_stopping={monitor: eval/loss, mode: min, patience: 2}"
    data = {"data": {**config(tmp_path).model_dump()["data"], **EVAL}}
    result = train(config(tmp_path, stopping, "training.max_epochs=50", "optimizer.lr=0", **data))
    assert (result.status, result.steps) == ("finished", 15)


@pytest.mark.parametrize("seen", ["stop", "skip"])
def test_a_loss_that_is_not_finite(tmp_path, seen):
    bad = Blobs()
    bad.points[11] = float("nan")
    run = config(tmp_path, f"training.on_nan={seen}", "training.max_epochs=1", objects={"data.train": bad})
    if seen == "stop":
        with pytest.raises(NonFiniteLossError, match=r"the loss of step \d is nan"):
            train(run)
        assert not list_checkpoints(open_storage(str(tmp_path / "run")))
    else:
        with pytest.warns(UserWarning, match="update is left out"):
            result = train(run)
        assert result.steps == 5
        state = weights(tmp_path, 5)
        assert all(torch.isfinite(state[name]).all() for name in ("first.weight", "head.weight", "head.bias"))


def test_unreadable_samples_are_left_out_and_counted(tmp_path, capsys):
    class Torn(Blobs):
        def __getitem__(self, index):
            if index in (3, 4):
                raise OSError(f"sample {index} is torn")
            return super().__getitem__(index)

    run = config(tmp_path, "data.on_bad_sample=skip", "training.max_epochs=1", objects={"data.train": Torn()})
    with pytest.warns(
        RaytrainerWarning, match=r"sample [34] is left out: OSError: sample [34] is torn"
    ) as told:
        result = train(run)
    assert result.skipped_samples == 2
    assert len(told) == 2
    with pytest.raises(SampleError, match="is torn"):
        train(config(tmp_path / "stop", objects={"data.train": Torn()}))


class Alternating(Task):
    """Two optimizers, each with a loss of its own."""

    def configure_optimizers(self, parameters, build):
        return {
            "body": build(list(self.model.first.parameters()) + list(self.model.norm.parameters())),
            "head": build(list(self.model.head.parameters()), lr=0.01),
        }

    def training_step(self, batch, optimizer):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        return loss if optimizer == "body" else 2 * loss


def test_several_optimizers_take_turns_and_resume(tmp_path):
    whole = train(config(tmp_path / "whole", objects={"task": Alternating}))
    parts = config(tmp_path / "parts", objects={"task": Alternating})
    train(parts, stop_at=4)
    assert same(train(parts), whole)


def test_groups_frozen_layers_and_weights_to_start_from(tmp_path):
    first = train(config(tmp_path / "first", "training.max_epochs=1"))
    tuned = config(
        tmp_path / "tuned",
        f"init_from={first.run_dir}",
        "parameters.freeze=['^first']",
        "parameters.no_decay=norms_and_biases",
        "parameters.groups=[{match: '^head', lr: 0.01}]",
        "optimizer.weight_decay=0.1",
        "training.max_epochs=1",
    )
    trainer = Trainer(tuned)
    trainer.train()
    groups = {
        tuple(
            name for name, p in trainer.state.model.named_parameters() if any(p is q for q in group["params"])
        ): (
            group["lr"],
            group["weight_decay"],
        )
        for group in trainer.state.optimizers[""].param_groups
    }
    assert groups == {
        ("norm.weight", "norm.bias"): (0.1, 0.0),
        ("head.weight",): (0.01, 0.1),
        ("head.bias",): (0.01, 0.0),
    }
    before, after = weights(tmp_path / "first", 5), weights(tmp_path / "tuned", 5)
    assert torch.equal(before["first.weight"], after["first.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])
    with pytest.raises(ConfigError, match="no parameter of the model has a name"):
        train(config(tmp_path / "typo", "parameters.freeze=['^frist']"))
    with pytest.raises(ConfigError, match=r"head.weight is \(4, 16\), the model's is \(3, 16\)"):
        train(config(tmp_path / "other", f"init_from={first.run_dir}", "model.num_classes=3"))


def test_compiled_training_gives_the_same_names(tmp_path):
    compiled = train(config(tmp_path, "training.compile={backend: eager}", "training.max_epochs=1"))
    plain = train(config(tmp_path / "plain", "training.max_epochs=1"))
    assert compiled.weights_sha256 == plain.weights_sha256


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path):
    whole = train(config(tmp_path / "whole"))
    train(config(tmp_path), stop_at=12)
    path = tmp_path / "run/checkpoints/step_00000012/model.pt"
    path.write_bytes(path.read_bytes()[:-10] + b"0123456789")
    with pytest.warns(UserWarning, match="step_00000012/model.pt is damaged"):
        again = train(config(tmp_path))
    assert same(again, whole)


def test_when_every_checkpoint_is_damaged_nothing_is_overwritten(tmp_path):
    train(config(tmp_path), stop_at=7)
    for path in (tmp_path / "run/checkpoints").glob("*/training.pt"):
        path.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(CheckpointError, match="every checkpoint"),
    ):
        train(config(tmp_path))
    assert (tmp_path / "run/checkpoints/step_00000007/model.pt").exists()


def test_half_written_checkpoints_are_removed(tmp_path):
    train(config(tmp_path), stop_at=7)
    orphan = tmp_path / "run/checkpoints/step_00000009"
    orphan.mkdir()
    (orphan / "model.pt").write_bytes(b"half")
    train(config(tmp_path))
    assert not orphan.exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed=1", "seed: 0 -> 1"),
        ("data.global_batch_size=20", "data.global_batch_size: 16 -> 20"),
        ("model.dropout=0.5", r"model.dropout: \(not given\) -> 0.5"),
        ("data.train.size=80", r"data.train.size: \(not given\) -> 80"),
        ("optimizer.lr=0.01", "optimizer.lr: 0.1 -> 0.01"),
        ("scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 1}", "scheduler: null ->"),
    ],
)
def test_a_config_that_means_something_else_is_refused(tmp_path, override, line):
    train(config(tmp_path), stop_at=2)
    with pytest.raises(ResumeError, match=line):
        train(config(tmp_path, override))


def test_data_of_another_length_is_refused(tmp_path):
    train(config(tmp_path, objects={"data.train": Blobs(70)}), stop_at=2)
    with pytest.raises(ResumeError, match=r"data.train.length: 70 -> 60"):
        train(config(tmp_path, objects={"data.train": Blobs(60)}))


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path):
    assert train(config(tmp_path)).steps == 15
    longer = train(config(tmp_path, "training.max_epochs=4"))
    assert longer.steps == 20
    assert same(longer, train(config(tmp_path / "whole", "training.max_epochs=4")))


def test_a_schedule_made_for_fewer_steps_cannot_go_on(tmp_path):
    schedule = "scheduler={_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.2}"
    train(config(tmp_path, schedule))
    with pytest.raises(ResumeError, match="made for 15 steps, and this config has 20"):
        train(config(tmp_path, schedule, "training.max_epochs=4"))


def test_a_damaged_manifest_is_told(tmp_path):
    whole = train(config(tmp_path / "whole"))
    train(config(tmp_path), stop_at=7)
    (tmp_path / "run/checkpoints/step_00000007/manifest.json").write_text('{"format": 1, "ste')
    with pytest.warns(RaytrainerWarning, match="step_00000007/manifest.json is damaged"):
        assert same(train(config(tmp_path)), whole)


def test_an_object_store_holds_a_run_too(tmp_path):
    memory = "storage_path=memory://bucket/" + tmp_path.name
    whole = train(config(tmp_path))
    train(config(tmp_path, memory), stop_at=7)
    assert same(train(config(tmp_path, memory)), whole)
    storage = open_storage("memory://bucket/" + tmp_path.name + "/run")
    assert [info.step for info in list_checkpoints(storage)] == [7, 10, 15]


def test_a_full_disk_ends_the_run_with_the_reason(tmp_path, monkeypatch):
    def full(self, name):
        raise StorageError(f"cannot write {name}: No space left on device") from OSError(28, "No space left")

    monkeypatch.setattr(Storage, "writing", full)
    with pytest.raises(StorageError, match="No space left on device"):
        train(config(tmp_path))


def test_a_disk_that_fills_inside_torch_save_is_named(tmp_path, monkeypatch):
    """torch.save hides the error of the file behind one of its own."""
    written = checkpoint._HashingFile.write

    def full(self, content):
        if self.num_bytes > 500:
            self._file = FullFile()
        return written(self, content)

    class FullFile:
        def write(self, content):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint._HashingFile, "write", full)
    with pytest.raises(StorageError, match=r"cannot write .*model.pt: No space left on device"):
        train(config(tmp_path))
    assert not (tmp_path / "run/checkpoints/step_00000005").exists()


def test_storage_that_comes_back_loses_nothing(tmp_path, monkeypatch):
    whole = train(config(tmp_path / "whole"))
    monkeypatch.setattr("raytrainer.storage.RETRY_WAITS_S", (0.01, 0.01, 0.01))
    failures = iter([OSError(5, "Input/output error")] * 2)
    writing = Storage.writing

    def sometimes(self, name):
        error = next(failures, None) if name.endswith("model.pt") else None
        if error is not None:
            raise StorageError(f"cannot write {name}") from error
        return writing(self, name)

    monkeypatch.setattr(Storage, "writing", sometimes)
    with pytest.warns(UserWarning, match="trying again in"):
        result = train(config(tmp_path))
    assert same(result, whole)
    assert len(list_checkpoints(open_storage(str(tmp_path / "run")))) == 3


def test_a_run_directory_that_is_away_for_a_while_loses_nothing(tmp_path, monkeypatch):
    """As a network share is: nothing may be written where it was, and nothing may be left out."""
    monkeypatch.setattr("raytrainer.storage.RETRY_WAITS_S", (0.05,) * 100)
    monkeypatch.setattr("raytrainer.loggers._FLUSH_INTERVAL_S", 0.01)
    run_dir, away = tmp_path / "run", tmp_path / "away"
    whole = train(config(tmp_path / "whole"))
    coming_back = threading.Timer(0.5, lambda: os.rename(away, run_dir))

    def observe(record):
        if record.get("step") == 6 and "loss" in record:
            os.rename(run_dir, away)
            coming_back.start()

    every = "checkpoint={every: {steps: 2}, num_to_keep: null}"
    with pytest.warns(UserWarning, match="trying again in"):
        result = Trainer(config(tmp_path, every), observer=observe).train()
    assert same(result, whole)
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 16))
    saved = [event["step"] for event in RunDirectory(str(run_dir), "").events() if "checkpoint" in event]
    assert saved == [2, 4, 6, 8, 10, 12, 14, 15]
    assert [info.step for info in list_checkpoints(open_storage(str(run_dir)))] == saved


def test_a_run_directory_that_is_away_at_a_new_start_is_waited_for(tmp_path, monkeypatch):
    """It looks like one without checkpoints, and the run must not begin anew."""
    monkeypatch.setattr("raytrainer.storage.RETRY_WAITS_S", (0.05,) * 100)
    whole = train(config(tmp_path / "whole"))
    train(config(tmp_path, "checkpoint.every={steps: 2}"), stop_at=7)
    run_dir, away = tmp_path / "run", tmp_path / "away"
    with RunDirectory.open(config(tmp_path)) as opened:
        os.rename(run_dir, away)
        coming_back = threading.Timer(0.3, lambda: os.rename(away, run_dir))
        coming_back.start()
        with pytest.warns(UserWarning, match="trying again in"):
            result = Trainer(config(tmp_path), run_dir=opened).train()
    assert same(result, whole)
    assert [event["step"] for event in opened.events() if event["event"] == "resumed"] == [7]


def test_what_cannot_be_looked_for_is_not_taken_for_absent(tmp_path, monkeypatch):
    def stale(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    storage = open_storage(str(tmp_path))
    for name in ("stat", "listdir"):
        monkeypatch.setattr(os, name, stale)
    with pytest.raises(StorageError, match="Stale file handle"):
        storage.exists("checkpoints")
    with pytest.raises(StorageError, match="Stale file handle"):
        storage.list("checkpoints")
    monkeypatch.undo()
    assert not storage.exists("checkpoints/x")
    assert storage.list("checkpoints") == []


def test_two_runs_of_one_name_are_refused(tmp_path):
    class SecondRun(Blobs):
        def __getitem__(self, index):
            with pytest.raises(ResumeError, match="in use by process"):
                train(config(tmp_path))
            return super().__getitem__(index)

    train(config(tmp_path, "training.max_steps=1", objects={"data.train": SecondRun()}))


def test_a_label_outside_the_classes_is_named(tmp_path):
    data = Blobs()
    data.targets[42] = 9
    with pytest.raises(SampleError, match=r"sample 42 has the label 9\n.*4 outputs"):
        train(config(tmp_path, objects={"data.train": data}))


def test_what_cannot_be_trained_on_is_refused(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(DataError, match="map-style"):
        train(config(tmp_path, objects={"data.train": Stream()}))
    with pytest.raises(DataError, match="Blobs has 0 samples"):
        train(config(tmp_path, objects={"data.train": Blobs(0)}))


def test_a_model_object_is_used_as_it_is(tmp_path):
    model = Net(norm=False)
    train(config(tmp_path, "training.max_steps=1", objects={"model": model}))
    assert torch.equal(model.head.bias.detach(), weights(tmp_path, 1)["head.bias"])
