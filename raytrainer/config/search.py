"""The `search:` section of a file of trials: which trials are ended early, and by what they are judged."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raytrainer.config.section import OptionalText, Section


class SearchSection(Section):
    """Ends trials early that will not be the best. A trial is judged each time it reports the metric."""

    scheduler: Literal["none", "asha", "median"] = Field(
        "asha",
        description="asha: at its 1st, 4th, 16th ... report (by grace_period and reduction_factor) a trial "
        "goes on if it is among the best 1 in reduction_factor so far. median: it ends when its best value "
        "is worse than the median of the others' averages. none: all run to their end.",
    )
    metric: OptionalText = Field(None, description="What trials are judged by; null: the file's `metric`.")
    mode: Literal["min", "max"] | None = Field(
        None, description="Whether less or more of it is better; null: the file's `metric_mode`."
    )
    num_samples: int | None = Field(None, ge=1, description="In place of the file's `num_samples`.")
    grace_period: int = Field(1, ge=1, description="Reports of the metric before which no trial is ended.")
    reduction_factor: float = Field(4, gt=1, description="asha: 4 lets a quarter go on at each rung.")
    min_trials: int = Field(3, ge=1, description="median: other trials needed for a median.")
