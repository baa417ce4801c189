"""`data`: what is trained on, how many samples make a step, and how they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from raytrainer.config.section import TARGET_SCHEMA, Broken, Section, Target, _check_target, rule


def _check_pin(value: Any) -> Any:
    if isinstance(value, bool) or value == "auto":
        return value
    raise rule("must be auto, true or false", "write pin_memory: auto")


def _check_collate(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, str):
        if "." in value and all(part.isidentifier() for part in value.split(".")):
            return value
        if not value.startswith("<object "):
            raise rule("must be the dotted name of a function, or a target", "write package.module.function")
    return _check_target(value)


class LoaderSection(Section):
    """The processes that load samples ahead of the step."""

    num_workers: int = Field(
        0,
        ge=0,
        description="Loader processes of each train worker; 0 loads in the train worker itself.",
        examples=[2],
    )
    prefetch_factor: int | None = Field(
        None,
        ge=1,
        description="Batches that each loader process keeps ready; only with `num_workers` above 0 (then 2).",
        examples=[4],
    )
    pin_memory: Annotated[
        Any, PlainValidator(_check_pin), WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "boolean"}]})
    ] = Field(
        "auto",
        description="Page-locked host memory for batches, which makes copies to a GPU asynchronous. "
        "`auto`: on a GPU.",
        examples=["auto"],
    )
    persistent_workers: bool = Field(True, description="Keep loader processes from one epoch to the next.")
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = Field(
        None, description="How loader processes start; null: the platform's default."
    )
    timeout_s: float = Field(
        0.0,
        ge=0,
        description="Seconds to wait for a batch before it is an error; 0 waits for ever.",
        examples=[60],
    )

    def broken_rules(self) -> Iterator[Broken]:
        if self.prefetch_factor is not None and self.num_workers == 0:
            yield Broken(
                ("prefetch_factor",),
                "needs loader processes, and data.loader.num_workers is 0",
                "write num_workers: 2 beside it, or leave prefetch_factor out",
            )
        if self.timeout_s > 0 and self.num_workers == 0:
            yield Broken(
                ("timeout_s",),
                "needs loader processes, and data.loader.num_workers is 0",
                "write num_workers: 2 beside it, or leave timeout_s out",
            )


class DataSection(Section):
    """What is trained on, how many samples make a step, and how they are loaded."""

    train: Target = Field(
        description="The data set to train on: a map-style `torch.utils.data.Dataset`.",
        examples=[{"_target_": "raytrainer.data.MnistSubset", "split": "train"}],
    )
    eval: Target | None = Field(None, description="The data set to evaluate on; null: no evaluation.")
    global_batch_size: int = Field(
        ge=1,
        description="Samples of an optimizer step, over all workers together.",
        examples=[256],
    )
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples of a forward pass. It is part of the result (dropout and BatchNorm see it) "
        "and is kept "
        "on resume. null: ceil(global_batch_size / number of workers).",
        examples=[64],
    )
    drop_last: bool = Field(
        False,
        description="Leave out an epoch's last samples when they do not fill a step. false: the last "
        "step is shorter, "
        "each sample once.",
    )
    shuffle: bool = Field(True, description="A new order each epoch, a function of `seed` and the epoch.")
    order: Target | None = Field(
        None,
        description="A sample order of your own, a function of (seed, epoch), such as weighted sampling.",
        examples=[{"_target_": "raytrainer.data.WeightedOrder", "weights": [1, 3]}],
    )
    on_bad_sample: Literal["stop", "skip"] = Field(
        "stop", description="What to do when a sample raises. skip: count it, name it and leave it out."
    )
    collate_fn: Annotated[
        Any,
        PlainValidator(_check_collate),
        WithJsonSchema({"anyOf": [{"type": "string"}, TARGET_SCHEMA, {"type": "null"}]}),
    ] = Field(
        None,
        description="Function that makes a batch of a list of samples: its dotted name or a target; "
        "null: PyTorch's.",
        examples=["my_module.collate"],
    )
    loader: LoaderSection = Field(
        LoaderSection(), description="The processes that load samples ahead of the step."
    )

    @property
    def num_microbatches(self) -> int:
        """V: microbatches of a full step, ceil(global_batch_size / micro_batch_size)."""
        return ceil_div(self.global_batch_size, self.micro_batch_size or self.global_batch_size)

    def steps_per_epoch(self, num_samples: int) -> int:
        """Optimizer steps of an epoch over `num_samples` samples; the last one may be shorter than the "
        "others."""
        if self.drop_last:
            return num_samples // self.global_batch_size
        return ceil_div(num_samples, self.global_batch_size)

    def broken_rules(self) -> Iterator[Broken]:
        if self.micro_batch_size is not None and self.micro_batch_size > self.global_batch_size:
            yield Broken(
                ("micro_batch_size",),
                f"must not be above data.global_batch_size, which is {self.global_batch_size}",
                f"write micro_batch_size: {self.global_batch_size} or less",
            )


def shared_evenly(global_batch_size: int, num_workers: int) -> int:
    """The largest microbatch that shares a step evenly and leaves no worker without one.

    ceil(B / W), or less where ceil(B / that) would be fewer than W: 9 samples on 4 workers go as 2, 2, 2, 2,
    1.
    """
    size = ceil_div(global_batch_size, num_workers)
    if num_workers > 1 and ceil_div(global_batch_size, size) < num_workers:
        size = max(1, (global_batch_size - 1) // (num_workers - 1))
    return size


def ceil_div(numerator: int, denominator: int) -> int:
    """Integer division, rounded up."""
    return -(-numerator // denominator)
