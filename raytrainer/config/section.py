"""What every section of the config has in common: a frozen, closed pydantic model with strict types, rules
that are all checked before any is reported, and the value types that sections share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from raytrainer.config.suggest import nearest

TARGET_KEYS = ("_target_", "_partial_", "_args_")


@dataclass(frozen=True)
class Broken:
    """One rule that a value breaks: `path` is relative to the section that reports it."""

    path: tuple[str | int, ...]
    rule: str
    fix: str | None = None


class RulesBroken(ValueError):
    """Raised inside pydantic's validation; `loading` turns each entry into a `Problem` with its file "
    "and line."""

    def __init__(self, broken: list[Broken]):
        self.broken = broken
        super().__init__("; ".join(f"{'.'.join(map(str, b.path))}: {b.rule}" for b in broken))


class EnvText(str):
    """A text that came from an environment variable: an ordinary `str` whose `repr` is the text in the file,
    so that no traceback, log line or printed config shows the value."""

    raw: str

    def __new__(cls, value: str, raw: str):
        text = super().__new__(cls, value)
        text.raw = raw
        return text

    def __repr__(self) -> str:
        return repr(self.raw)

    def __reduce__(self):
        return type(self), (str(self), self.raw)


class Section(BaseModel):
    """A mapping in the YAML file. Subclasses give fields with descriptions, and `broken_rules`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=False,
    )

    def broken_rules(self) -> Iterator[Broken]:
        """Rules between this section's fields, checked once each field on its own is right."""
        return iter(())

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, data: Any) -> Any:
        """`training:` with nothing below it means the defaults; a number from the environment is a number."""
        if data is None:
            return {}
        if not isinstance(data, Mapping):
            return data
        return {key: _decoded(value, cls.model_fields.get(key)) for key, value in data.items()}

    @model_validator(mode="after")
    def _check_rules(self):
        broken = list(self.broken_rules())
        if broken:
            raise RulesBroken(broken)
        return self

    def _fill(self, name: str, value: Any) -> None:
        """Sets a field whose default depends on others; only for use during validation."""
        object.__setattr__(self, name, value)


def _decoded(value: Any, field: Any) -> Any:
    """An environment value for a field that is not a text, read as YAML would read it (`2` -> 2)."""
    if not isinstance(value, EnvText) or field is None or _holds_text(field):
        return value
    from raytrainer.config.positions import parse_value

    try:
        return parse_value(str(value))
    except ValueError:
        return value


def _holds_text(field: Any) -> bool:
    return field.annotation in (str, str | None) or any(item is _TEXT for item in field.metadata)


def _keep_env_text(value: Any, validate: Any) -> Any:
    checked = validate(value)
    return value if isinstance(value, EnvText) else checked


_TEXT = WrapValidator(_keep_env_text)
Text = Annotated[str, _TEXT]
OptionalText = Annotated[str | None, _TEXT]


def rule(text: str, fix: str | None = None, path: tuple[str | int, ...] = ()) -> RulesBroken:
    """The error that a field's validator raises for one broken rule."""
    return RulesBroken([Broken(path, text, fix)])


def kind(value: Any) -> str:
    """A value's type in the words of a YAML file."""
    names = {
        bool: "true/false",
        int: "a whole number",
        float: "a decimal number",
        str: "text",
        type(None): "nothing",
    }
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return next(
        (name for type_, name in names.items() if isinstance(value, type_)), f"a {type(value).__name__}"
    )


_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_TARGET_EXAMPLE = "write a mapping, for example {_target_: package.module.Name, keyword: value}"


def _check_target(value: Any) -> Any:
    """A mapping with `_target_`, or a Python object standing in for one (never a text or a plain "
    "container)."""
    if isinstance(value, str) and value.startswith("<object "):
        raise rule(
            f"the config was made in Python, where this was an object of type {value[8:-1]}",
            "run it from Python again, or write a _target_ that builds the object",
        )
    if isinstance(value, Mapping):
        broken = list(_broken_target(value, (), needs_target=True))
        if broken:
            raise RulesBroken(broken)
        return dict(value)
    if value is None or isinstance(
        value, str | bytes | int | float | complex | list | tuple | set | frozenset
    ):
        raise rule(f"must be a mapping with _target_, not {kind(value)}", _TARGET_EXAMPLE)
    return value


def _broken_target(value: Any, path: tuple[str | int, ...], needs_target: bool = False) -> Iterator[Broken]:
    """The broken rules of a target and of the targets nested in it, anywhere in mappings and lists."""
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _broken_target(item, (*path, index))
    if not isinstance(value, Mapping):
        return
    for key, item in value.items():
        if not isinstance(key, str):
            yield Broken((*path, key), "a key must be text", f'write "{key}": with quotes')
        elif key.startswith("_") and key.endswith("_") and key not in TARGET_KEYS:
            near = nearest(key, TARGET_KEYS) or "_target_"
            yield Broken((*path, key), f"{key} is not a key of a target", f"did you mean {near}?")
        yield from _broken_target(item, (*path, key))
    if "_target_" in value:
        yield from _broken_target_keys(value, path)
    elif needs_target:
        near = next(
            (key for key in value if str(key).strip("_") in ("target", "class", "class_path", "type")), None
        )
        fix = f"write _target_: in place of {near}:" if near else _TARGET_EXAMPLE
        yield Broken(path, "has no _target_: what to build is missing", fix)


def _broken_target_keys(value: Mapping, path: tuple[str | int, ...]) -> Iterator[Broken]:
    name = value["_target_"]
    if not isinstance(name, str) or not _DOTTED.fullmatch(name):
        yield Broken(
            (*path, "_target_"),
            "must be the dotted name of something that can be imported",
            "write package.module.Name, for example torch.nn.Linear or my_module.Net",
        )
    if not isinstance(value.get("_partial_", False), bool):
        yield Broken((*path, "_partial_"), "must be true or false", "write _partial_: true")
    if not isinstance(value.get("_args_", []), list | tuple):
        yield Broken((*path, "_args_"), "must be a list of positional arguments", "write _args_: [...]")


TARGET_SCHEMA = {
    "type": "object",
    "required": ["_target_"],
    "properties": {
        "_target_": {
            "type": "string",
            "description": "Dotted name of a class or function; the other keys are its keyword arguments.",
            "pattern": "^[A-Za-z_]\\w*(\\.[A-Za-z_]\\w*)+$",
        },
        "_partial_": {
            "type": "boolean",
            "description": "true: bind the arguments, do not call (gives a function).",
        },
        "_args_": {"type": "array", "description": "Positional arguments."},
    },
    "additionalProperties": True,
}

Target = Annotated[Any, PlainValidator(_check_target), WithJsonSchema(TARGET_SCHEMA)]


def one_of_keys(value: Any, keys: tuple[str, ...]) -> Any:
    """Refuses anything but a mapping with exactly one of `keys` (nulls do not count)."""
    if isinstance(value, Section) or value is None:
        return value
    example = f"write {{{keys[0]}: 1}}"
    if not isinstance(value, Mapping):
        raise rule(f"must be a mapping with one of {', '.join(keys)}, not {kind(value)}", example)
    given = [key for key in keys if value.get(key) is not None]
    unknown = [key for key in value if key not in keys]
    if unknown or len(given) != 1:
        raise rule(f"must have exactly one of {', '.join(keys)}", example)
    return value


def exactly_one(*keys: str) -> BeforeValidator:
    """The validator of an `every:` mapping."""
    return BeforeValidator(lambda value: one_of_keys(value, keys))
