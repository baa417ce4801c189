"""`every: {epochs: 1}`: how often something happens, in exactly one unit."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_serializer

from raytrainer.config.section import Section


class Every(Section):
    """How often: exactly one of `epochs` and `steps`."""

    epochs: int | None = Field(None, ge=1, description="Every so many epochs.", examples=[1])
    steps: int | None = Field(None, ge=1, description="Every so many optimizer steps.", examples=[500])

    @property
    def unit(self) -> str:
        """`epochs`, `steps` or `minutes`."""
        return next(name for name, value in self if value is not None)

    @property
    def count(self) -> int | float:
        """How many of `unit`."""
        return getattr(self, self.unit)

    @model_serializer
    def _only_what_is_given(self) -> dict[str, Any]:
        return {name: value for name, value in self if value is not None}


class EveryOrMinutes(Every):
    """How often: exactly one of `epochs`, `steps` and `minutes`."""

    minutes: float | None = Field(None, gt=0, description="Every so many minutes.", examples=[10])
