"""Opens a run directory for use after training: its config, a checkpoint, the model that evaluation uses."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raytrainer import build
from raytrainer.config import add_importable, callable_from, instantiate, load_config
from raytrainer.data import EvalBatches, build_loader
from raytrainer.distributed import Process
from raytrainer.errors import CheckpointError, ConfigError, Problem, ResumeError, UsageError
from raytrainer.evaluation import evaluate
from raytrainer.manifest import (
    FOLDER,
    MODEL_FILE,
    TRAINING_FILE,
    CheckpointInfo,
    choose_best,
    folder_name,
    list_checkpoints,
)
from raytrainer.rundir import CONFIG_FILE, ENVIRONMENT_FILE
from raytrainer.storage import Storage, open_storage
from raytrainer.task import Task
from raytrainer.transfer import ahead_of_use

if TYPE_CHECKING:
    from raytrainer.config import Config

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


@dataclass
class FinishedRun:
    """A run's model as one of its checkpoints has it, in eval mode on `device`; the task's `model` is this.

    root: the run directory; checkpoint: which one; uses_ema: whether the weights are the moving average;
    trained_metrics: the numbers that the training's own evaluation of this very checkpoint gave, if any.
    """

    root: str
    config: Config
    checkpoint: CheckpointInfo
    model: nn.Module
    task: Task
    device: torch.device
    uses_ema: bool
    trained_metrics: dict[str, float]

    def evaluate(self) -> dict[str, float]:
        """The loss and the metrics over the evaluation data, named as in training: "eval/accuracy".

        At the same batch size they equal those of the training. Raises ConfigError without evaluation data.
        """
        config = self.config
        data = build.build_eval_data(config)
        if data is None:
            raise ConfigError(
                Problem("config", "data.eval", "is not given: there is nothing to evaluate on",
                        fix="add data.eval to a config and name it: raytrainer eval RUN_DIR CONFIG")
            )  # fmt: skip
        batches = EvalBatches(len(data), config.eval.batch_size or config.data.micro_batch_size)
        loader = build_loader(
            data,
            batches,
            config.data.loader,
            collate_fn=callable_from(config.data.collate_fn, at="data.collate_fn"),
            seed=config.seed,
            on_bad_sample=config.data.on_bad_sample,
            device_type=self.device.type,
            where="data.eval",
        )
        loaded = ahead_of_use(iter(loader), self.device)
        metrics = build.build_metrics(config, self.device)
        self._compute_as_in_training()
        values = evaluate(self.model, self.task, loaded, metrics, Process(), self.device, self.autocast)
        return {f"eval/{name}": value for name, value in values.items()}

    def example_data(self) -> tuple[Any, str]:
        """The data set that shows what the model takes, and its key: of evaluation, else of training."""
        data = build.build_eval_data(self.config)
        if data is not None:
            return data, "data.eval"
        with self.config.places.named():
            return instantiate(self.config.data.train, at="data.train"), "data.train"

    def _compute_as_in_training(self) -> None:
        """A compiled model, or one in TF32, rounds differently."""
        training = self.config.training
        if training.tf32:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        if training.compile and not self.uses_ema:
            self.model.compile(**(training.compile if isinstance(training.compile, dict) else {}))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The number format of the training's forward pass."""
        dtype = _AUTOCAST.get(self.config.training.precision)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


def open_run(
    run_dir: str | os.PathLike[str],
    *,
    config: Config | str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
    checkpoint: str = "best",
    device: torch.device | None = None,
) -> FinishedRun:
    """Opens a run directory, whether the run has ended or goes on.

    config: in place of the stored one. checkpoint: "best" (by `checkpoint.monitor`, else the newest), "last"
    or a name such as step_00000120. device: by default where the training would run.
    Raises UsageError when there is no such run directory or checkpoint, CheckpointError when there is none
    yet or it is damaged, ResumeError when it is another model's.
    """
    storage = _find(os.fspath(run_dir))
    loaded = _load_config(storage, config, overrides)
    info = _choose_checkpoint(storage, loaded, checkpoint)
    if device is None:
        gpus = loaded.scaling.gpus_per_worker
        device = Process().device(None if gpus == "auto" else gpus > 0)
    # The weights come from the checkpoint; those that the training began with may no longer be there.
    model = build.build_model(loaded.model_copy(update={"init_from": None}), torch.device("cpu"))
    weights, training = _read(storage, info)
    ema = training["ema"] if loaded.training.ema is not None else None
    if ema is not None:
        weights = {name.removeprefix("module."): v for name, v in ema.items() if name.startswith("module.")}
    misfit = build.describe_misfit(model, weights)
    if misfit:
        raise ResumeError(
            f"{storage.path(f'{FOLDER}/{info.name}')} does not fit the config's model: {misfit}\n"
            "  the model's code or its arguments have changed since; give the config that it was trained with"
        )
    model.load_state_dict(weights)
    model.to(device).eval()
    task = build.build_task(loaded, model, device)
    task.load_state_dict(training["task"])
    task.step = info.step
    evaluated_here = training["progress"]["last_evaluation_step"] == info.step
    trained = {k: v for k, v in info.metrics.items() if evaluated_here and k.startswith("eval/")}
    return FinishedRun(storage.root, loaded, info, model, task, device, ema is not None, trained)


def _find(address: str) -> Storage:
    storage = open_storage(address)
    if storage.exists(CONFIG_FILE):
        return storage
    if not storage.is_remote and not storage.exists():
        parent = Path(address).absolute().parent
        there = [path.parent.name for path in sorted(parent.glob(f"*/{CONFIG_FILE}"))][:8]
        known = f"\n  {parent} has: {', '.join(there)}" if there else ""
        raise UsageError(f"{address}: there is no such run directory{known}")
    raise UsageError(
        f"{address} is not a run directory: it has no {CONFIG_FILE}\n"
        "  a run directory is <storage_path>/<name>, such as runs/mnist; `raytrainer runs` lists them"
    )


def load_run_config(run_dir: str) -> Config:
    """The stored config of a run directory."""
    return _load_config(open_storage(run_dir), None, ())


def _load_config(
    storage: Storage, config: Config | str | os.PathLike[str] | None, overrides: Iterable[str]
) -> Config:
    """The stored config or the one given, with the folders importable that the training imported from."""
    environment = json.loads(storage.read(ENVIRONMENT_FILE)) if storage.exists(ENVIRONMENT_FILE) else {}
    trained_from = [path for path in environment.get("import_paths", ()) if os.path.isdir(path)]
    sys.path += [path for path in trained_from if path not in sys.path]
    if config is None:
        loaded = _load_stored(storage, overrides)
    elif isinstance(config, str | os.PathLike):
        loaded = load_config(config, overrides)
    else:
        loaded = config.with_overrides(*overrides) if overrides else config
    add_importable(loaded)
    return loaded


def _load_stored(storage: Storage, overrides: Iterable[str]) -> Config:
    if not storage.is_remote:
        return load_config(storage.path(CONFIG_FILE), overrides)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, CONFIG_FILE)
        copy.write_bytes(storage.read(CONFIG_FILE))
        return load_config(copy, overrides)


def _choose_checkpoint(storage: Storage, config: Config, wanted: str) -> CheckpointInfo:
    infos = list_checkpoints(storage)
    if not infos:
        raise CheckpointError(
            f"{storage.root} has no checkpoint yet\n"
            "  the first is written after checkpoint.every; train it further with `raytrainer run`"
        )
    if wanted == "last":
        return infos[-1]
    if wanted == "best":
        best = choose_best(infos, config.checkpoint.monitor, config.checkpoint.mode)
        return best or infos[-1]
    names = {wanted, folder_name(int(wanted))} if wanted.isdecimal() else {wanted.rstrip("/").split("/")[-1]}
    chosen = next((info for info in infos if info.name in names), None)
    if chosen is None:
        there = ", ".join(info.name for info in infos)
        raise UsageError(f"{storage.root} has no checkpoint {wanted}\n  it is best, last or one of: {there}")
    return chosen


def _read(storage: Storage, info: CheckpointInfo) -> list[Any]:
    """(model state, training state)."""
    from raytrainer.checkpoint import load_files

    try:
        return load_files(storage, f"{FOLDER}/{info.name}", info, (MODEL_FILE, TRAINING_FILE))
    except CheckpointError as error:
        others = [other.name for other in list_checkpoints(storage) if other.name != info.name]
        fix = f"choose another with --checkpoint: {', '.join(others)}" if others else "there is no other one"
        raise CheckpointError(f"{error}\n  {fix}") from error
