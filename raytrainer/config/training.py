"""`training`: how long and how the loop trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from raytrainer.config.data import ceil_div
from raytrainer.config.monitor import Mode, broken_mode, default_mode
from raytrainer.config.section import Broken, Section, Text, rule


def _check_compile(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return value
    raise rule(
        "must be true, false or a mapping of torch.compile keywords",
        "write compile: true, or compile: {mode: max-autotune}",
    )


Compile = Annotated[
    Any, PlainValidator(_check_compile), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "object"}]})
]


class EarlyStoppingSection(Section):
    """Stop when a metric has not become better for some evaluations."""

    monitor: Text = Field(
        description="Metric to watch: `eval/<metric>`, `eval/loss` or `train/loss`.", examples=["eval/loss"]
    )
    mode: Mode | None = Field(
        None,
        description="Whether larger (`max`) or smaller (`min`) is better; a loss: `min`.",
        examples=["min"],
    )
    patience: int = Field(
        ge=1, description="Evaluations without a better value before training stops.", examples=[3]
    )
    min_delta: float = Field(
        0.0, ge=0, description="Smallest change that counts as better.", examples=[0.001]
    )

    def broken_rules(self) -> Iterator[Broken]:
        if self.mode is None and default_mode(self.monitor):
            self._fill("mode", default_mode(self.monitor))
        yield from broken_mode(self.monitor, self.mode)


class EmaSection(Section):
    """An exponential moving average of the weights, used for evaluation and export."""

    decay: float = Field(
        ge=0, lt=1, description="Share of the old average kept at each step.", examples=[0.999]
    )


class TrainingSection(Section):
    """How long and how the loop trains."""

    max_epochs: int | None = Field(
        None,
        ge=1,
        description="Passes over the training data. With `max_steps` too, whichever ends first; with "
        "neither, 1.",
        examples=[5],
    )
    max_steps: int | None = Field(
        None, ge=1, description="Optimizer steps; null: `max_epochs` decides.", examples=[1000]
    )
    precision: Literal["fp32", "bf16-mixed", "fp16-mixed"] = Field(
        "fp32", description="Number format of the forward pass; weights and optimizer stay in fp32."
    )
    tf32: bool = Field(
        False, description="Allow TF32 matrix products on the GPU: faster, 10 bits of mantissa."
    )
    gradient_clip_norm: float | None = Field(
        None, gt=0, description="Largest norm of the gradient; null: no clipping.", examples=[1.0]
    )
    compile: Compile = Field(
        False,
        description="torch.compile the model: true, or a mapping of torch.compile's keywords.",
        examples=[True],
    )
    determinism: Literal["order", "bitwise"] = Field(
        "order",
        description="`order`: the same samples in the same order, whatever the number of workers. "
        "`bitwise`: the same weights to the bit too, for every number of workers and after every resize, "
        "on nodes of one kind; with deterministic kernels, and gradients summed along a fixed tree.",
    )
    intra_op_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of a kernel under `determinism: bitwise`, where their number is part of the "
        "result; null: `scaling.cpus_per_worker`, rounded down. With `order`, the ranks share the cores.",
        examples=[1],
    )
    early_stopping: EarlyStoppingSection | None = Field(
        None,
        description="Stop when a metric has not become better for some evaluations.",
        examples=[{"monitor": "eval/loss", "patience": 3}],
    )
    ema: EmaSection | None = Field(
        None,
        description="An exponential moving average of the weights, used for evaluation and export.",
        examples=[{"decay": 0.999}],
    )
    on_nan: Literal["stop", "skip"] = Field(
        "stop", description="What to do when a step's loss is NaN or infinite; skip: no update in that step."
    )
    find_unused_parameters: bool = Field(
        False, description="Let some parameters get no gradient in a step; costs time in each step."
    )

    def broken_rules(self) -> Iterator[Broken]:
        if self.max_epochs is None and self.max_steps is None:
            self._fill("max_epochs", 1)
        if self.determinism == "bitwise":
            yield from self._broken_compile()
        elif self.intra_op_threads is not None:
            rule_text = "has a meaning with determinism: bitwise alone"
            yield Broken(("intra_op_threads",), rule_text, "leave it out, and set OMP_NUM_THREADS if need be")

    def _broken_compile(self) -> Iterator[Broken]:
        options = self.compile if isinstance(self.compile, dict) else {}
        if options.get("dynamic"):
            rule_text = "kernels for any shape do not give the same bits as those for one"
            yield Broken(("compile", "dynamic"), rule_text, "write dynamic: false, or determinism: order")
        if "max-autotune" in str(options.get("mode")) or "autotune" in str(options.get("options")):
            rule_text = "kernels chosen by a stop-watch are not the same in each process"
            yield Broken(("compile",), rule_text, "leave out autotuning, or write determinism: order")

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run, for an epoch of `steps_per_epoch` steps."""
        by_epochs = None if self.max_epochs is None else self.max_epochs * steps_per_epoch
        return min(steps for steps in (by_epochs, self.max_steps) if steps is not None)

    @property
    def compile_options(self) -> dict[str, Any]:
        """Keywords of torch.compile."""
        options = self.compile if isinstance(self.compile, dict) else {}
        return {"dynamic": False, **options} if self.determinism == "bitwise" else options

    @property
    def target(self) -> dict[str, int | None]:
        """How far the run is to go: what tells a finished run from one that goes on."""
        return {"max_epochs": self.max_epochs, "max_steps": self.max_steps}

    def num_epochs(self, steps_per_epoch: int) -> int:
        """Epochs that the run enters, the last of which `max_steps` may cut short."""
        return ceil_div(self.total_steps(steps_per_epoch), max(steps_per_epoch, 1))
