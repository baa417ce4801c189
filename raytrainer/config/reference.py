"""What the schema says about itself: its keys, the JSON Schema for editors, and the reference in the docs."""

from __future__ import annotations

import functools
import json
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from raytrainer.config.section import Section


def _root() -> type[Section]:
    from raytrainer.config.schema import Config

    return Config


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds (also where it may be null or is in a list), or None for a value."""
    candidates = [field.annotation]
    while candidates:
        candidate = candidates.pop()
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
        if typing.get_origin(candidate) in (typing.Union, types.UnionType, list, typing.Annotated):
            candidates += [item for item in typing.get_args(candidate) if item is not type(None)]
    return None


def fields(section: type[Section] | None = None, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field) of every key, in the order of the schema, sections before their keys."""
    for name, field in (section or _root()).model_fields.items():
        yield prefix + name, field
        inner = section_of(field)
        if inner is not None and typing.get_origin(field.annotation) is not list:
            yield from fields(inner, f"{prefix}{name}.")


@functools.cache
def all_keys() -> tuple[str, ...]:
    """Every dotted key of the config."""
    return tuple(key for key, _ in fields())


def field_at(path: tuple[str | int, ...]) -> FieldInfo | None:
    """The field at a path, or None where the schema has none (inside targets and free mappings)."""
    section, field = _root(), None
    for part in path:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part) if section else None
        section = section_of(field) if field else None
    return field


def json_schema() -> dict[str, Any]:
    """The config's JSON Schema (draft 2020-12), for editors: closed sections, targets open but for "
    "`_target_`."""
    schema = _root().model_json_schema()
    _allow_interpolation(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}


def _allow_interpolation(schema: Any) -> None:
    """Lets `${...}` stand where a number, a truth value or a choice is asked for, as it may in a file."""
    for properties in [
        schema.get("properties", {}),
        *(d.get("properties", {}) for d in schema.get("$defs", {}).values()),
    ]:
        for name, value in properties.items():
            alternatives = value.get("anyOf", [value])
            if not any(_is_scalar(item) for item in alternatives):
                continue
            outer = {
                key: value[key] for key in ("description", "title", "default", "examples") if key in value
            }
            inner = [{k: v for k, v in item.items() if k not in outer} for item in alternatives]
            properties[name] = {**outer, "anyOf": [*inner, _INTERPOLATION]}


def _is_scalar(item: dict[str, Any]) -> bool:
    return item.get("type") in ("integer", "number", "boolean") or "enum" in item or "const" in item


def reference_markdown() -> str:
    """The config reference: a table for each section, with type, default and meaning of every key."""
    root = _root()
    parts = [_table("The top level", root, "")]
    for key, field in fields():
        inner = section_of(field)
        if inner is not None:
            parts.append(_table(f"`{key}`", inner, (inner.__doc__ or "").strip().split("\n\n")[0]))
    return "\n\n".join(parts) + "\n"


def _table(title: str, section: type[Section], text: str) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner is not None and field.default is not None and not field.is_required():
            default = ""
        else:
            default = "**required**" if field.is_required() else f"`{_default(field)}`"
        meaning = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_type(field)} | {default} | {meaning} |")
    head = f"### {title}\n\n" + (f"{' '.join(text.split())}\n\n" if text else "")
    return head + "\n".join(rows)


def _default(field: FieldInfo) -> str:
    return json.dumps(field.get_default(call_default_factory=True)).replace("|", "\\|")


def _type(field: FieldInfo) -> str:
    """A field's type in the words of a YAML file."""
    from pydantic import TypeAdapter

    if section_of(field) is not None:
        return "list of mappings" if typing.get_origin(field.annotation) is list else "mapping"
    annotated = typing.Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return _schema_type(TypeAdapter(annotated).json_schema())


_WORDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true/false",
    "string": "text",
    "null": "null",
}


def _schema_type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_schema_type(item) for item in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{item}`" for item in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_schema_type(schema.get('items', {}))}"
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        if "_target_" in schema.get("properties", {}):
            return "target"
        return f"mapping of {_schema_type(inner)}" if isinstance(inner, dict) else "mapping"
    text = _WORDS.get(schema.get("type", ""), "any")
    limits = [
        f"{sign} {schema[name]:g}"
        for name, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("exclusiveMaximum", "<"))
        if name in schema and schema[name] < 2**60
    ]
    return re.sub(r"\s+", " ", f"{text} {' '.join(limits)}").strip()
