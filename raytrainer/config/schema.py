"""The root of the config: the sections, the targets beside them, and the rules between sections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, PrivateAttr, model_validator

from raytrainer.config.checkpoint import CheckpointSection
from raytrainer.config.connection import RaySection
from raytrainer.config.data import DataSection, shared_evenly
from raytrainer.config.evaluation import EvalSection
from raytrainer.config.failure import FailureSection
from raytrainer.config.logging import LoggingSection
from raytrainer.config.monitor import broken_monitor
from raytrainer.config.origin import Origin, flattened, meaning_of, stored_mapping, to_yaml
from raytrainer.config.parameters import ParametersSection, broken_numbers
from raytrainer.config.placing import Places
from raytrainer.config.scaling import ScalingSection
from raytrainer.config.script import ScriptSection
from raytrainer.config.section import Broken, OptionalText, RulesBroken, Section, Target, Text, rule
from raytrainer.config.training import TrainingSection

INTERVALS = ("step", "epoch", "eval")
# A script stands in place of these.
SCRIPT_REPLACES = ("data", "model")
DEFAULT_OPTIMIZER = {"_target_": "torch.optim.AdamW", "lr": 1e-3}


def check_name(name: str) -> str:
    """A name that is one folder's; anything else breaks a rule."""
    if not name.strip() or name != name.strip():
        raise rule("must not be empty, nor begin or end with a space", "write name: my_run")
    if name in (".", "..") or re.search(r"[/\\\x00-\x1f\x7f]", name):
        fixed = re.sub(r"[/\\\x00-\x1f\x7f]+", "_", name).strip("._ ") or "my_run"
        raise rule(
            "names a folder, so it has no slash, no line break and is not . or ..", f"write name: {fixed}"
        )
    if len(name.encode()) > 200:
        raise rule("names a folder, so it has at most 200 bytes", "write a shorter name")
    return name


def _check_storage_path(path: str) -> str:
    if not path.strip():
        raise rule("must not be empty", "write storage_path: runs")
    return path


def _check_optimizer(optimizer: Any) -> Any:
    if isinstance(optimizer, dict) and optimizer["_target_"].startswith("torch.optim."):
        broken = list(broken_numbers(optimizer, ()))
        if broken:
            raise RulesBroken(broken)
    return optimizer


def _script_or_model(schema: dict[str, Any]) -> None:
    """For editors: a model and data are required unless there is a script."""
    schema["required"] = [name for name in schema["required"] if name not in SCRIPT_REPLACES]
    schema["anyOf"] = [{"required": ["script"]}, {"required": list(SCRIPT_REPLACES)}]


class Config(Section):
    """A run: a model, its data, and how it is trained; or a script."""

    model_config = ConfigDict(title="raytrainer config", json_schema_extra=_script_or_model)

    name: Annotated[Text, AfterValidator(check_name)] = Field(
        description="Name of the run; its directory is `<storage_path>/<name>`.", examples=["mnist"]
    )
    storage_path: Annotated[Text, AfterValidator(_check_storage_path)] = Field(
        "runs",
        description="Where run directories are: a local or shared folder, or a URL such as "
        "`s3://bucket/runs`.",
        examples=["runs"],
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Seed of everything random: weights, sample order, augmentation, dropout.",
    )
    scaling: ScalingSection = Field(
        ScalingSection(), description="How many workers train, and what each asks for."
    )
    script: ScriptSection | None = Field(
        None, description="A script of your own to launch, in place of `model` and `data`."
    )
    data: DataSection | None = Field(description="What is trained on, and how it is loaded.")
    model: Target | None = Field(
        description="The model, a `torch.nn.Module`.",
        examples=[{"_target_": "my_module.Net", "num_classes": 10}],
    )
    init_from: OptionalText = Field(
        None,
        description="Weights to start from: a run directory, a checkpoint or a safetensors file.",
        examples=["runs/mnist"],
    )
    loss: Target | None = Field(
        None,
        description="The loss, called as loss(output, target); required unless there is a task.",
        examples=[{"_target_": "torch.nn.CrossEntropyLoss"}],
    )
    metrics: dict[str, Target] = Field(
        {},
        description="Evaluation metrics by name, torchmetrics objects; shown as `eval/<name>`.",
        examples=[
            {"accuracy": {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 10}}
        ],
    )
    optimizer: Annotated[Target, AfterValidator(_check_optimizer)] = Field(
        DEFAULT_OPTIMIZER,
        description="The optimizer; it is called with the parameters first.",
        examples=[{"_target_": "torch.optim.AdamW", "lr": 0.001}],
    )
    scheduler: Target | None = Field(
        None,
        description="The learning-rate scheduler, called with the optimizer first and, if it takes it, "
        "`total_steps`. "
        "One more key, `interval`, says when it advances: `step` (default), `epoch` or `eval`.",
        examples=[{"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "interval": "epoch"}],
    )
    task: Target | None = Field(
        None, description="A `raytrainer.Task` of your own, for all that is not supervised learning."
    )
    parameters: ParametersSection = Field(
        ParametersSection(), description="Which parameters are trained, with which optimizer settings."
    )
    training: TrainingSection = Field(TrainingSection(), description="How long and how the loop trains.")
    eval: EvalSection = Field(EvalSection(), description="How often the model is evaluated.")
    checkpoint: CheckpointSection = Field(
        CheckpointSection(), description="How often the run is saved, and which checkpoints are kept."
    )
    failure: FailureSection = Field(FailureSection(), description="How many lost workers a run survives.")
    logging: LoggingSection = Field(
        LoggingSection(), description="How often metrics are recorded, and where they go."
    )
    ray: RaySection = Field(RaySection(), description="Which Ray cluster the run uses.")

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @classmethod
    def from_mapping(
        cls, mapping: dict[str, Any], overrides: Iterable[str] = (), objects: dict[str, Any] | None = None
    ) -> Config:
        """A config from nested dicts.

        objects: Python objects by dotted key ("model", "data.train", "metrics.accuracy"), standing in for
        targets; they may also lie in `mapping` itself. Raises ConfigError with every mistake found.
        """
        from raytrainer.config.loading import build

        return build(mapping, overrides=overrides, objects=objects)

    @classmethod
    def from_payload(cls, payload: dict[str, Any], overrides: Iterable[str] = ()) -> Config:
        """The config of `payload()`, in this or another process; the environment is read in this one."""
        from raytrainer.config.loading import build

        return build(payload["mapping"], overrides=overrides, places=payload["places"])

    def payload(self) -> dict[str, Any]:
        """What makes the same config in another process: values from the environment stay unresolved."""
        mapping = (
            self._origin.mapping if self._origin.mapping is not None else self._stored(keep_objects=True)
        )
        return {"mapping": mapping, "places": self._origin.places}

    def with_overrides(self, *overrides: str) -> Config:
        """This config with some values changed: `config.with_overrides("optimizer.lr=3e-4")`."""
        return type(self).from_payload(self.payload(), overrides)

    def stored_yaml(self) -> str:
        """The config as it will run, defaults filled in, as YAML that loads back to an equal config.

        Values from the environment stay `${oc.env:NAME}`; objects from Python are `<object Name>`.
        """
        return to_yaml(self._stored())

    def meaning(self) -> dict[str, Any]:
        """The flat part of the config that decides what a checkpoint means; see `difference`."""
        return meaning_of(flattened(self._stored()))

    def env_names(self) -> set[str]:
        """Names of the environment variables that the config refers to."""
        return set(self._origin.env_names)

    @property
    def source_path(self) -> str | None:
        """The YAML file that the config was read from."""
        return self._origin.places.source_path

    @property
    def places(self) -> Places:
        """Where the config's keys stand, for messages."""
        return self._origin.places

    @property
    def micro_batch_size_is_default(self) -> bool:
        """Whether `data.micro_batch_size` was filled in: a resumed run then keeps the one that it began "
        "with."""
        return self._origin.micro_batch_size_is_default

    @property
    def num_microbatches(self) -> int:
        """V: microbatches of a full step."""
        return self.data.num_microbatches

    @property
    def intra_op_threads(self) -> int:
        """CPU threads of a kernel where their number is part of the result."""
        return self.training.intra_op_threads or max(1, int(self.scaling.cpus_per_worker))

    def total_steps(self, num_samples: int) -> int:
        """Optimizer steps of the whole run over a training set of `num_samples` samples."""
        return self.training.total_steps(self.data.steps_per_epoch(num_samples))

    @property
    def scheduler_interval(self) -> str:
        """When the scheduler advances: `step`, `epoch` or `eval` (the default of ReduceLROnPlateau)."""
        default = "eval" if _is_plateau(self.scheduler) else "step"
        return self.scheduler.get("interval", default) if isinstance(self.scheduler, dict) else default

    @property
    def scheduler_target(self) -> Any:
        """`scheduler` without its `interval`, ready to be instantiated."""
        if not isinstance(self.scheduler, dict):
            return self.scheduler
        return {key: value for key, value in self.scheduler.items() if key != "interval"}

    @model_validator(mode="before")
    @classmethod
    def _script_needs_no_model(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("script") is not None:
            return {**dict.fromkeys(SCRIPT_REPLACES), **data}
        return data

    def broken_rules(self) -> Iterator[Broken]:
        if self.script is not None:
            yield from self._broken_script()
            return
        for name in SCRIPT_REPLACES:
            if getattr(self, name) is None:
                yield Broken((name,), "is required unless there is a script")
        if self.data is None:
            return
        self._fill_micro_batch_size()
        yield from self._broken_batches()
        if self.loss is None and self.task is None:
            fix = "add loss: {_target_: torch.nn.CrossEntropyLoss}, or a task that computes its own"
            yield Broken(("loss",), "is required unless there is a task", fix)
        yield from self._broken_scheduler()
        monitors = [(("checkpoint", "monitor"), self.checkpoint.monitor)]
        if self.training.early_stopping:
            monitors.append((("training", "early_stopping", "monitor"), self.training.early_stopping.monitor))
        for path, monitor in monitors:
            has_eval, has_task = self.data.eval is not None, self.task is not None
            yield from broken_monitor(monitor, path, list(self.metrics), has_eval, has_task)

    def _broken_script(self) -> Iterator[Broken]:
        if "max_failures" not in self.failure.model_fields_set:
            # A script that fails would most often fail again: only who asks for it gets new starts.
            self._fill("failure", FailureSection(max_failures=0))
        for name in (*SCRIPT_REPLACES, "task"):
            if getattr(self, name) is not None:
                yield Broken((name,), "and script cannot both be given: the script does the training itself")
        workers, fewest = self.scaling.max_workers, self.script.min_workers
        if fewest is not None and fewest > workers:
            yield Broken(
                ("script", "min_workers"),
                f"is more than scaling.num_workers, which is {workers}",
                f"write min_workers: {workers} or less",
            )
        if not self.script.rank_env and workers > 1:
            yield Broken(
                ("script", "rank_env"),
                f"{workers} workers without their ranks would all do the same",
                "write scaling.num_workers: 1, or leave rank_env out",
            )

    def _fill_micro_batch_size(self) -> None:
        if self.data.micro_batch_size is None:
            size = shared_evenly(self.data.global_batch_size, self.scaling.max_workers)
            self._fill("data", self.data.model_copy(update={"micro_batch_size": size}))

    def _broken_batches(self) -> Iterator[Broken]:
        workers, batch = self.scaling.max_workers, self.data.global_batch_size
        if self.data.num_microbatches >= workers:
            return
        if batch < workers:
            rule_text = f"a step has {batch} samples, fewer than the {workers} workers"
            fix = f"write data.global_batch_size: {workers} or more, or scaling.num_workers: {batch} or less"
            yield Broken(("data", "global_batch_size"), rule_text, fix)
            return
        rule_text = (
            f"a step has ceil({batch} / {self.data.micro_batch_size}) = {self.data.num_microbatches} "
            "microbatches, "
            f"fewer than the {workers} workers"
        )
        yield Broken(
            ("data", "micro_batch_size"),
            rule_text,
            f"write micro_batch_size: {shared_evenly(batch, workers)}, which shares it evenly",
        )

    def _broken_scheduler(self) -> Iterator[Broken]:
        path = ("scheduler", "interval")
        if isinstance(self.scheduler, dict) and self.scheduler_interval not in INTERVALS:
            yield Broken(path, f"must be one of {', '.join(INTERVALS)}", "write interval: epoch")
        elif self.scheduler is not None and self.scheduler_interval == "eval" and self.data.eval is None:
            where = (
                path if isinstance(self.scheduler, dict) and "interval" in self.scheduler else ("scheduler",)
            )
            yield Broken(where, "advances after each evaluation, and data.eval is not given", "add data.eval")
        elif _is_plateau(self.scheduler) and self.scheduler_interval != "eval":
            yield Broken(path, "ReduceLROnPlateau advances after each evaluation", "write interval: eval")

    def _stored(self, keep_objects: bool = False) -> dict[str, Any]:
        return stored_mapping(self.model_dump(), self._origin, keep_objects)

    def model_copy(self, *, update: dict[str, Any] | None = None, deep: bool = False) -> Config:
        """pydantic's copy; with `update`, the copy stands for its values and no longer for its file's "
        "text."""
        copy = super().model_copy(update=update, deep=deep)
        if update:
            copy._origin = Origin(places=self._origin.places)
        return copy

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        names = type(self).model_fields
        return all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = None

    def __reduce__(self):
        return _from_payload, (self.payload(),)

    def __str__(self) -> str:
        return self.stored_yaml()


def _from_payload(payload: dict[str, Any]) -> Config:
    return Config.from_payload(payload)


def _is_plateau(scheduler: Any) -> bool:
    return isinstance(scheduler, dict) and scheduler["_target_"].endswith(".ReduceLROnPlateau")
