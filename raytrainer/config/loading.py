"""From a YAML file or a mapping, with overrides, to a `Config`: every mistake is reported at once, each
with its file and line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raytrainer.config.interpolation import Resolved, resolve
from raytrainer.config.origin import Origin
from raytrainer.config.overrides import apply_overrides
from raytrainer.config.placing import Places
from raytrainer.config.positions import KeyPath, read_yaml
from raytrainer.config.problems import problem, problems_of
from raytrainer.config.schema import DEFAULT_OPTIMIZER, Config
from raytrainer.errors import ConfigError, Problem

DEFAULTS = {"optimizer": DEFAULT_OPTIMIZER}


def load_config(
    path: str | os.PathLike, overrides: Iterable[str] = (), objects: dict[str, Any] | None = None
) -> Config:
    """The config in a YAML file, with `key=value` overrides. Raises ConfigError with every mistake found.

    objects: Python objects by dotted key, standing in for targets; see `Config.from_mapping`.
    """
    mapping, lines = read_yaml(Path(path))
    return build(mapping, overrides, objects, Places(os.fspath(path), lines))


def build(
    mapping: dict[str, Any],
    overrides: Iterable[str] = (),
    objects: dict[str, Any] | None = None,
    places: Places | None = None,
) -> Config:
    """The one way from a mapping to a Config: overrides, `${...}`, validation."""
    if not isinstance(mapping, dict):
        raise ConfigError(Problem("config", "", f"must be a mapping, not a {type(mapping).__name__}"))
    unresolved, texts, problems = apply_overrides(mapping, list(_texts(overrides)), DEFAULTS)
    problems += _put_objects(unresolved, objects or {})
    places = (places or Places()).with_overrides(texts)
    resolved = resolve(unresolved)
    problems += [problem(broken, unresolved, places) for broken in resolved.broken]
    try:
        config = Config.model_validate(resolved.values)
    except ValidationError as error:
        unresolvable = {broken.path for broken in resolved.broken}
        problems += problems_of(error, unresolved, places, skip=unresolvable)
        raise ConfigError(_sorted(problems)) from None
    if problems:
        raise ConfigError(_sorted(problems))
    config._origin = _origin(config, unresolved, resolved, places)
    return config


def _texts(overrides: Iterable[str]) -> Iterable[str]:
    return [overrides] if isinstance(overrides, str) else overrides


def _put_objects(mapping: dict[str, Any], objects: dict[str, Any]) -> list[Problem]:
    """Puts Python objects at their dotted keys."""
    for key, value in objects.items():
        place = mapping
        *parents, last = key.split(".")
        for part in parents:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                return [Problem("config", key, f"{part} is not a mapping: no object can be put into it")]
        place[last] = value
    return []


def _sorted(problems: list[Problem]) -> list[Problem]:
    """In the order of the file's lines, overrides after them, each once."""

    def line(problem: Problem) -> tuple[bool, int]:
        last = problem.where.rpartition(":")[2]
        return (not last.isdigit(), int(last) if last.isdigit() else 0)

    return sorted(dict.fromkeys(problems), key=line)


def _origin(config: Config, unresolved: dict, resolved: Resolved, places: Places) -> Origin:
    dumped = config.model_dump()
    texts = {path: (raw, _at(dumped, path)) for path, raw in resolved.raw.items()}
    given = _at(unresolved, ("data", "micro_batch_size"))
    return Origin(unresolved, texts, frozenset(resolved.env_names), places, given is None)


def _at(value: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value
