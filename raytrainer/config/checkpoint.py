"""`checkpoint`: how often the run is saved, and which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from raytrainer.config.every import EveryOrMinutes
from raytrainer.config.monitor import Mode, broken_mode, default_mode
from raytrainer.config.section import Broken, OptionalText, Section, exactly_one


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

    def broken_rules(self) -> Iterator[Broken]:
        if self.mode is None and default_mode(self.monitor):
            self._fill("mode", default_mode(self.monitor))
        yield from broken_mode(self.monitor, self.mode)
