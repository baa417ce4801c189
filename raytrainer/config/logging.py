"""`logging`: how often metrics are recorded, and where they go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raytrainer.config.section import Section

Sink = Literal["console", "jsonl", "tensorboard"]


class LoggingSection(Section):
    """How often metrics are recorded, and where they go."""

    every_n_steps: int = Field(
        50, ge=1, description="Steps between two records of training metrics.", examples=[50]
    )
    sinks: list[Sink] = Field(
        ["console", "jsonl", "tensorboard"],
        description="Where metrics go: the console, `metrics.jsonl`, TensorBoard files.",
        examples=[["console", "jsonl"]],
    )
    ledger: bool = Field(
        False,
        description="Write down which samples each committed step consumed, for `raytrainer audit`.",
        examples=[True],
    )
