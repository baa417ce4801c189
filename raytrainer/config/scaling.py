"""`scaling`: how many workers train, and what each of them asks the cluster for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from raytrainer.config.section import Broken, OptionalText, Section, rule


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


class ScalingSection(Section):
    """How many workers train, and what each of them asks the cluster for."""

    num_workers: int = Field(
        1,
        ge=1,
        description="Number of train workers (processes). The result does not depend on it: the batch of "
        "a step "
        "is `data.global_batch_size` samples whatever it is.",
        examples=[2],
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
        return self.num_workers

    @property
    def max_workers(self) -> int:
        """The largest number of workers that the run can have; the batch rules are checked for it."""
        return self.num_workers

    def broken_rules(self) -> Iterator[Broken]:
        gpus = self.gpus_per_worker
        if gpus != "auto" and 0 < gpus < 1 and self.max_workers > 1:
            yield Broken(
                ("gpus_per_worker",),
                f"a fraction of a GPU needs num_workers: 1, and it is {self.max_workers}: "
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
