"""`failure`: how many lost workers a run survives."""

from __future__ import annotations

from pydantic import Field

from raytrainer.config.section import Section


class FailureSection(Section):
    """How many lost workers a run survives."""

    max_failures: int = Field(
        3,
        ge=-1,
        description="Restarts after a lost process, node or connection before the run fails; -1: without "
        "limit. "
        "The count starts again after each committed checkpoint. An exception in your code is never retried.",
        examples=[3],
    )
