"""Where in the YAML file, or in which override, a value stands: what an error message begins with."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from raytrainer.config.positions import KeyPath
from raytrainer.errors import TargetError

if TYPE_CHECKING:
    from raytrainer.config.schema import Config

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Places:
    """source_path and lines of the file's keys; overrides: the text of each override by its path."""

    source_path: str | None = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def of(self, path: KeyPath) -> str:
        """`file:line` of a key, or of the nearest mapping around it; `override '...'` for a value from
        there."""
        inside = [text for key, text in self.overrides.items() if path and key[: len(path)] == path]
        if inside and path not in self.lines:  # a mapping that only overrides have made
            return f"override {inside[0]!r}"
        for length in range(len(path), -1, -1):
            if path[:length] in self.overrides:
                return f"override {self.overrides[path[:length]]!r}"
            if path[:length] in self.lines:
                return f"{self.source_path}:{self.lines[path[:length]]}"
        return self.source_path or "config"

    def with_overrides(self, overrides: dict[KeyPath, str]) -> Places:
        """These, and what further overrides put over them."""
        return replace(self, overrides={**self.overrides, **overrides})

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Inside, a TargetError that knows its key gets the file and the line of it too."""
        try:
            yield
        except TargetError as error:
            if error.path and not error.where and (self.source_path or self.overrides):
                error.where = self.of(_key_path(error.path))
            raise


def _key_path(dotted: str) -> KeyPath:
    return tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))


def names_places(function: F) -> F:
    """For functions of a Config: what they raise of its targets says where in its file they stand."""

    @functools.wraps(function)
    def call(config: Config, *args: Any, **kwargs: Any) -> Any:
        with config.places.named():
            return function(config, *args, **kwargs)

    return call
