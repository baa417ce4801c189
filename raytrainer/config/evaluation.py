"""`eval`: how often the model is evaluated."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raytrainer.config.every import Every
from raytrainer.config.section import Section, exactly_one


class EvalSection(Section):
    """How often the model is evaluated on `data.eval`."""

    every: Annotated[Every, exactly_one("epochs", "steps")] = Field(
        Every(epochs=1),
        description="How often to evaluate: one of `epochs` and `steps`.",
        examples=[{"epochs": 1}],
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples of a forward pass in evaluation; null: `data.micro_batch_size`.",
        examples=[256],
    )
