"""`parameters`: which parameters are trained, and with which optimizer settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ConfigDict, Field

from raytrainer.config.section import Broken, Section, Text

NUMBER_KEYWORDS = ("lr", "weight_decay", "momentum", "eps", "alpha", "dampening", "rho", "lr_decay")


def broken_numbers(keywords: dict[str, Any], path: tuple[str | int, ...]) -> Iterator[Broken]:
    """torch.optim keywords that must be numbers and are not: known without importing torch."""
    for key, value in keywords.items():
        if key in NUMBER_KEYWORDS and not _is_number(value):
            fix = "write a number, for example 1e-3"
            if isinstance(value, str) and _reads_as_number(value):
                fix = "write it without quotes; from the environment: ${oc.decode:${oc.env:NAME}}"
            yield Broken((*path, key), "must be a number", fix)
        elif key == "betas" and not _are_betas(value):
            yield Broken((*path, key), "must be a list of two numbers", "write betas: [0.9, 0.999]")


def _is_number(value: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return not isinstance(value, bool | str | list | tuple | dict | type(None))


def _reads_as_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _are_betas(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return not isinstance(value, bool | str | int | float | dict | type(None))
    return len(value) in (2, 3) and all(_is_number(item) for item in value)


def broken_pattern(pattern: str, path: tuple[str | int, ...]) -> Iterator[Broken]:
    """A regular expression that does not compile."""
    try:
        re.compile(pattern)
    except re.error as error:
        yield Broken(
            path, f"is not a regular expression: {error}", "escape special characters with a backslash"
        )


class ParameterGroup(Section):
    """Parameters whose name matches, with optimizer keywords of their own (`lr`, `weight_decay`, ...)."""

    model_config = ConfigDict(extra="allow")

    match: Text = Field(
        description="Regular expression searched for in parameter names; the first group that matches wins.",
        examples=["^head\\."],
    )

    @property
    def keywords(self) -> dict[str, Any]:
        """The optimizer keywords of this group."""
        return dict(self.__pydantic_extra__ or {})

    def broken_rules(self) -> Iterator[Broken]:
        yield from broken_pattern(self.match, ("match",))
        yield from broken_numbers(self.keywords, ())


class ParametersSection(Section):
    """Which parameters are trained, and with which optimizer settings."""

    freeze: list[str] = Field(
        [],
        description="Regular expressions; parameters whose name contains a match are not trained.",
        examples=[["^backbone\\."]],
    )
    no_decay: Literal["none", "norms_and_biases"] = Field(
        "none",
        description="norms_and_biases: no weight decay on biases and on parameters of normalisation layers.",
    )
    groups: list[ParameterGroup] = Field(
        [],
        description="Groups with optimizer settings of their own: `{match: regex, lr: 1e-4, ...}`.",
        examples=[[{"match": "^head\\.", "lr": 1e-2}]],
    )

    def broken_rules(self) -> Iterator[Broken]:
        for index, pattern in enumerate(self.freeze):
            yield from broken_pattern(pattern, ("freeze", index))
