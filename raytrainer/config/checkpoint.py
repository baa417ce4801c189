"""`checkpoint`: how often the run is saved, and which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from raytrainer.config.every import EveryOrMinutes
from raytrainer.config.monitor import Mode, broken_mode, default_mode
from raytrainer.config.section import Broken, OptionalText, Section, exactly_one, rule


def _check_snapshot(value: Any) -> Any:
    if value is False:  # YAML's reading of a bare `off`
        return "off"
    if value in ("auto", "off") and isinstance(value, str):
        return value
    steps = value.get("steps") if isinstance(value, dict) and len(value) == 1 else None
    if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1:
        return {"steps": steps}
    raise rule("must be auto, off or {steps: N} with N from 1 on", "write auto, off or {steps: 100}")


_SNAPSHOT_SCHEMA = {
    "anyOf": [
        {"enum": ["auto", "off"]},
        {
            "type": "object",
            "properties": {"steps": {"type": "integer", "minimum": 1}},
            "required": ["steps"],
            "additionalProperties": False,
        },
    ]
}


class CheckpointSection(Section):
    """How often the run is saved, and which checkpoints are kept."""

    every: Annotated[EveryOrMinutes, exactly_one("epochs", "steps", "minutes")] = Field(
        EveryOrMinutes(epochs=1),
        description="How often to save: one of `epochs`, `steps` and `minutes`.",
        examples=[{"epochs": 1}],
    )
    num_to_keep: int | None = Field(
        3,
        ge=1,
        description="Newest checkpoints that are kept, beside the best one; null: all.",
        examples=[3],
    )
    monitor: OptionalText = Field(
        None,
        description="Metric that says which checkpoint is best: `eval/<metric>`, `eval/loss` or "
        "`train/loss`.",
        examples=["eval/accuracy"],
    )
    mode: Mode | None = Field(
        None,
        description="Whether larger (`max`) or smaller (`min`) is better; a loss: `min`.",
        examples=["max"],
    )

    snapshot: Annotated[Any, PlainValidator(_check_snapshot), WithJsonSchema(_SNAPSHOT_SCHEMA)] = Field(
        "auto",
        description="How often the state is copied to memory of the machine that outlives the workers, for "
        "when all of them die at once (when one is left, it saves the last finished step). `auto`: as often "
        "as 1% of the time allows; `{steps: N}`; `off`.",
        examples=["auto", {"steps": 100}],
    )

    def broken_rules(self) -> Iterator[Broken]:
        if self.mode is None and default_mode(self.monitor):
            self._fill("mode", default_mode(self.monitor))
        yield from broken_mode(self.monitor, self.mode)
