"""`optimizer.lr=3e-4`: a value of the config given on the command line or from Python."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from raytrainer.config.positions import KeyPath, dotted, parse_value
from raytrainer.config.section import kind
from raytrainer.errors import Problem

_KEY = re.compile(r"([^\s=\[\]]+(\[\d+\])*)+")


def parse_override(text: str) -> tuple[KeyPath, Any] | Problem:
    """The path and the value of one override, or what is wrong with it."""

    def wrong(rule: str, fix: str = "write key=value, for example optimizer.lr=3e-4") -> Problem:
        return Problem(f"override {text!r}", "", rule, fix=fix)

    if not isinstance(text, str):
        return Problem(f"override {text!r}", "", "must be text", fix="write 'optimizer.lr=3e-4'")
    key, equals, value = text.partition("=")
    if key.startswith("-"):
        return wrong("there is no such option, and an override does not begin with a dash")
    if key[:1] in ("+", "~"):
        fix = f"write {text[1:]}" if key[0] == "+" else f"write {key[1:]}=null"
        return wrong(f"an override has no {key[0]} before its key", fix)
    if not equals:
        return wrong("has no = sign")
    parts = re.split(r"[.\[]", key.replace("]", ""))
    if not _KEY.fullmatch(key) or "" in parts:
        return wrong("is not a key")
    if not value.strip():
        return wrong("has no value", f"write {key}=null for nothing, or {key}='\"\"' for an empty text")
    try:
        parsed = parse_value(value)
    except ValueError as error:
        return wrong(f"the value is not valid YAML: {error}", f"quote it: {key}='\"...\"'")
    return tuple(int(part) if part.isdigit() else part for part in parts), parsed


def apply_overrides(
    mapping: dict[str, Any], overrides: Sequence[str], defaults: dict[str, Any]
) -> tuple[dict[str, Any], dict[KeyPath, str], list[Problem]]:
    """A copy of `mapping` with the overrides put in, the text of each by its path, and those that are wrong.

    defaults: the mappings of keys that are not in the file, into which an override may reach (`optimizer`).
    """
    result, texts, problems = _copied(mapping), {}, []
    for text in [overrides] if isinstance(overrides, str) else overrides:
        parsed = parse_override(text)
        problem = parsed if isinstance(parsed, Problem) else _put(result, *parsed, text, defaults)
        if problem:
            problems.append(problem)
        else:
            texts[parsed[0]] = text
    return result, texts, problems


def _copied(value: Any) -> Any:
    """Mappings and lists copied, everything else shared (objects from Python are not copied)."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) in (list, tuple) else value


def _put(mapping: dict, path: KeyPath, value: Any, text: str, defaults: dict) -> Problem | None:
    place: Any = mapping
    for depth, part in enumerate(path[:-1]):
        here = path[: depth + 1]
        if isinstance(place, list):
            if not isinstance(part, int) or part >= len(place):
                return _no_such_item(text, path[:depth], place)
            place = place[part]
        else:
            if place.get(str(part)) is None:
                place[str(part)] = copy.deepcopy(defaults.get(dotted(here), {}))
            place = place[str(part)]
        if not isinstance(place, dict | list):
            what = kind(place) if isinstance(place, str | int | float) else "an object from Python"
            return Problem(f"override {text!r}", dotted(here), f"is {what}, and has no keys below it")
    last = path[-1]
    if isinstance(place, list):
        if not isinstance(last, int) or last >= len(place):
            return _no_such_item(text, path[:-1], place)
        place[last] = value
    else:
        place[str(last)] = value
    return None


def _no_such_item(text: str, path: KeyPath, items: list) -> Problem:
    return Problem(
        f"override {text!r}",
        dotted(path),
        f"is a list of {len(items)}",
        fix=f"give an index from 0 to {len(items) - 1}, or the whole list: {dotted(path)}=[...]",
    )
