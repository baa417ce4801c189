"""Pydantic's validation errors in the words of a YAML file: where, which value, which rule, what to write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from raytrainer.config.placing import Places
from raytrainer.config.positions import KeyPath, dotted
from raytrainer.config.reference import all_keys, field_at
from raytrainer.config.section import Broken, RulesBroken, kind
from raytrainer.config.suggest import nearest, right_key
from raytrainer.errors import Problem

_ABSENT = object()


def problem(broken: Broken, mapping: dict[str, Any], places: Places) -> Problem:
    """A broken rule with its place and, as it was written, its value."""
    value = value_at(mapping, broken.path)
    shown = None if value is _ABSENT else _shown(value)
    return Problem(places.of(broken.path), dotted(broken.path), broken.rule, shown, broken.fix)


def value_at(mapping: Any, path: KeyPath) -> Any:
    """The value at a path of the unresolved mapping, or a marker when there is none."""
    for part in path:
        try:
            mapping = mapping[part]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return mapping


def _shown(value: Any) -> str | None:
    """A value as YAML would have it; long ones and mappings are left to the line number."""
    if isinstance(value, dict | list | tuple) or value is _ABSENT:
        return None
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = str(value) if isinstance(value, str | int | float) else type(value).__name__
    if isinstance(value, str) and (not text or text != text.strip() or _looks_like_another_type(text)):
        text = json.dumps(text)
    text = text.replace("\n", "\\n")
    return text if len(text) <= 80 else text[:77] + "..."


def _looks_like_another_type(text: str) -> bool:
    from raytrainer.config.positions import parse_value

    try:
        return not isinstance(parse_value(text), str)
    except ValueError:
        return False


def problems_of(
    error: ValidationError,
    mapping: dict[str, Any],
    places: Places,
    skip: set[KeyPath],
    keys: tuple[str, ...] | None = None,
) -> list[Problem]:
    """Every mistake of a validation, but for values at the paths in `skip`, which are reported already.

    keys: the dotted keys of the file, where it is no config of a run.
    """
    problems = []
    for item in error.errors(include_url=False):
        for broken in _broken(item, mapping, keys):
            if broken.path not in skip:
                problems.append(problem(broken, mapping, places))
    return problems


def _broken(item: dict[str, Any], mapping: dict[str, Any], keys: tuple[str, ...] | None) -> Iterator[Broken]:
    path = tuple(part for part in item["loc"] if part != "[key]")
    inner = item.get("ctx", {}).get("error")
    if isinstance(inner, RulesBroken):
        for broken in inner.broken:
            yield Broken((*path, *broken.path), broken.rule, broken.fix)
        return
    value, field = value_at(mapping, path), field_at(path) if keys is None else None
    if item["type"] == "extra_forbidden":
        yield _unknown_key(path, all_keys() if keys is None else keys)
    elif item["type"] == "missing":
        yield Broken(path, "is required", _example(path, field))
    else:
        rule, fix = _rule(item, value)
        yield Broken(path, rule, fix or _example(path, field))


def _unknown_key(path: KeyPath, keys: tuple[str, ...]) -> Broken:
    near = right_key(dotted(path), keys)
    parent = dotted(path[:-1])
    beside = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == parent]
    rule = f"there is no such key in {parent}" if parent else "there is no such key"
    fix = f"did you mean {near}?" if near else f"the keys here are: {', '.join(beside)}"
    return Broken(path, rule, fix)


def _example(path: KeyPath, field: FieldInfo | None) -> str | None:
    if field is None or not field.examples:
        return None
    return f"write, for example, {path[-1]}: {_flow(field.examples[0])}"


def _flow(value: Any) -> str:
    """A value in YAML's one-line style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


_WHAT = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping of keys and values",
    "model_type": "a mapping of keys and values",
    "model_attributes_type": "a mapping of keys and values",
}


def _rule(item: dict[str, Any], value: Any) -> tuple[str, str | None]:
    """The rule and, where it follows from the value, what to write."""
    type_, ctx = item["type"], item.get("ctx", {})
    if type_ in _WHAT:
        return f"must be {_WHAT[type_]}, not {kind(value)}", _conversion(type_, value)
    for name, words in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        if name in ctx:
            return f"must be {words} {ctx[name]}", None
    if type_ == "literal_error":
        choices = [choice.strip(" '") for choice in ctx["expected"].replace(" or ", ", ").split(",")]
        near = nearest(str(value), choices) or next(
            (c for c in choices if c.startswith(str(value))), choices[0]
        )
        return f"must be one of {', '.join(choices)}", f"write {near}"
    return item["msg"][0].lower() + item["msg"][1:], None


def _conversion(type_: str, value: Any) -> str | None:
    if type_ == "string_type" and isinstance(value, bool | int | float):
        return f'write it in quotes: "{value}"'
    if type_.startswith("int") and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if type_.startswith(("int", "float")) and isinstance(value, str) and _looks_like_another_type(value):
        return f"write it without quotes: {value}"
    if type_ == "list_type" and not isinstance(value, dict):
        return f"write [{value}]"
    return None
