"""`scaling`: how many workers train, and what each of them asks the cluster for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from raytrainer.config.section import Broken, OptionalText, RulesBroken, Section, rule


def _check_gpus(value: Any) -> Any:
    if value == "auto" and isinstance(value, str):
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise rule("must be auto or a number, 0 or more", "write auto, 0, 1 or a fraction such as 0.25")
    if value > 1 and value != int(value):
        raise rule("a number of GPUs above 1 must be whole", f"write {int(value)} or {int(value) + 1}")
    return value


Gpus = Annotated[
    Any,
    PlainValidator(_check_gpus),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "number", "minimum": 0}]}),
]


def _check_num_workers(value: Any, check_number: ValidatorFunctionWrapHandler) -> Any:
    """A number, or a range of numbers, which stays a dict of the two."""
    if not isinstance(value, dict):
        return check_number(value)
    broken = []
    for name, number in value.items():
        if name not in ("min", "max"):
            broken.append(Broken((name,), "is not a key here", "write {min: 1, max: 4}"))
        elif isinstance(number, bool) or not isinstance(number, int):
            broken.append(Broken((name,), "must be a whole number", "write {min: 1, max: 4}"))
        elif number < 1:
            broken.append(Broken((name,), "must be at least 1", f"write {name}: 1 or more"))
    broken += [
        Broken((name,), "is missing", "write {min: 1, max: 4}")
        for name in ("min", "max")
        if name not in value
    ]
    if not broken and value["min"] > value["max"]:
        low, high = value["min"], value["max"]
        broken.append(
            Broken(("min",), f"must not be above max, which is {high}", f"write {{min: {high}, max: {low}}}")
        )
    if broken:
        raise RulesBroken(broken)
    return {"min": value["min"], "max": value["max"]}


NumWorkers = Annotated[
    int,
    Field(ge=1),
    WrapValidator(_check_num_workers),
    # As it is: a number or the two of a range.
    PlainSerializer(lambda value: value, return_type=Any),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {
                    "type": "object",
                    "properties": {name: {"type": "integer", "minimum": 1} for name in ("min", "max")},
                    "required": ["min", "max"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


class ScalingSection(Section):
    """How many workers train, and what each of them asks the cluster for."""

    num_workers: NumWorkers = Field(
        1,
        description="Number of train workers (processes), or `{min, max}`: as many as there is room for, "
        "growing and shrinking without losing a step. Batch, sample order and learning rate do not depend on "
        "it; sums round differently, unless `training.determinism: bitwise`.",
        examples=[2, {"min": 1, "max": 4}],
    )
    grow_within_s: float = Field(
        30.0,
        gt=0,
        description="With `{min, max}`: seconds after which room for more workers is used at the latest.",
        examples=[30],
    )
    cpus_per_worker: float = Field(
        1.0, ge=0, description="CPU cores that each worker reserves.", examples=[1]
    )
    gpus_per_worker: Gpus = Field(
        "auto",
        description="GPUs that each worker reserves. `auto`: 1 where the cluster has GPUs, else 0. A "
        "fraction below "
        "1 only with one worker: two ranks of a job cannot share a card.",
        examples=["auto", 0, 1, 0.25],
    )
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK",
        description="PACK: as few nodes as possible; SPREAD: as many; STRICT_*: fail where that is "
        "impossible.",
    )
    resources_per_worker: dict[str, float] = Field(
        {},
        description="Further Ray resources that each worker reserves, such as `memory` (bytes) or custom "
        "names.",
        examples=[{"memory": 4e9}],
    )
    label_selector: dict[str, str] = Field(
        {},
        description="Labels that a node must have for a worker to be placed on it.",
        examples=[{"market-type": "spot"}],
    )
    accelerator_type: OptionalText = Field(
        None, description="Model of GPU that each worker needs, in Ray's spelling.", examples=["H200"]
    )

    @property
    def min_workers(self) -> int:
        """The smallest number of workers that the run goes on with."""
        return self.num_workers["min"] if isinstance(self.num_workers, dict) else self.num_workers

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return self.min_workers < self.max_workers

    @property
    def max_workers(self) -> int:
        """The largest number of workers that the run can have; the batch rules are checked for it."""
        return self.num_workers["max"] if isinstance(self.num_workers, dict) else self.num_workers

    def broken_rules(self) -> Iterator[Broken]:
        gpus = self.gpus_per_worker
        if gpus != "auto" and 0 < gpus < 1 and self.max_workers > 1:
            yield Broken(
                ("gpus_per_worker",),
                f"a fraction of a GPU needs num_workers: 1, and it is {self.max_workers}"
                f"{' at most' if self.is_elastic else ''}: "
                "two ranks of one job cannot share a GPU",
                "write gpus_per_worker: 1, or num_workers: 1",
            )
        own = {"cpu": "cpus_per_worker", "gpu": "gpus_per_worker"}
        for name, amount in self.resources_per_worker.items():
            if name.lower() in own:
                yield Broken(
                    ("resources_per_worker", name),
                    f"{name} is not a custom resource",
                    f"write scaling.{own[name.lower()]}",
                )
            elif amount < 0:
                yield Broken(("resources_per_worker", name), "must be 0 or more")
