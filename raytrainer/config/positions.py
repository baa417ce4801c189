"""YAML text to plain values, with the line of every key: what an error message points at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from raytrainer.errors import ConfigError, Problem

KeyPath = tuple[str | int, ...]
MAX_NODES = 100_000


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without its surprises: `1e-3` is a number; dates, base-60 numbers and numbers with
    leading zeros are text."""


def _resolvers() -> dict[str, list[tuple[str, re.Pattern]]]:
    dropped = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    table = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in dropped]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    integer = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)")
    number = re.compile(
        r"[-+]?(([0-9][0-9_]*)?\.[0-9]+([eE][-+]?[0-9]+)?|[0-9][0-9_]*\.([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
    )
    for tag, pattern, firsts in (
        ("tag:yaml.org,2002:int", integer, "-+0123456789"),
        ("tag:yaml.org,2002:float", number, "-+0123456789."),
    ):
        for first in firsts:
            table.setdefault(first, []).append((tag, re.compile(rf"^(?:{pattern.pattern})$")))
    return table


_Loader.yaml_implicit_resolvers = _resolvers()


def parse_value(text: str) -> Any:
    """The value that `text` has in a YAML file; ValueError says what is wrong with it."""
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(getattr(error, "problem", None) or str(error)) from error
    return value


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """A YAML file's mapping and the line of each key and list item (from 1).

    Raises ConfigError for a file that is missing, empty, no text or no YAML, for a top level that is no
    mapping, and for duplicate keys.
    """
    text = _read_text(path)
    try:
        return _parse(path, text)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_problem(path, error)) from error
    except RecursionError as error:
        raise ConfigError(Problem(str(path), "", "is nested too deeply to be read")) from error


def _read_text(path: Path) -> str:
    where = str(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(Problem(where, "", "no such file", fix=_files_beside(path))) from error
    except IsADirectoryError as error:
        raise ConfigError(
            Problem(where, "", "is a directory, not a YAML file", fix=_files_beside(path))
        ) from error
    except OSError as error:
        raise ConfigError(Problem(where, "", f"cannot be read: {error.strerror or error}")) from error
    except ValueError as error:
        raise ConfigError(Problem(repr(where), "", f"is no file name: {error}")) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = Problem(f"{where}:{line}", "", "is not UTF-8 text", fix="save the file as UTF-8")
        raise ConfigError(problem) from error
    if not text.strip():
        raise ConfigError(
            Problem(where, "", "the file is empty", fix="see configs/mnist.yaml for a small example")
        )
    return text


def _files_beside(path: Path) -> str | None:
    """The YAML files that may have been meant, as a hint."""
    folder = path if path.is_dir() else path.parent
    names = sorted(str(item) for item in folder.glob("*.y*ml")) if folder.is_dir() else []
    return f"there are: {', '.join(names[:8])}" if names else None


def _syntax_problem(path: Path, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    parts = [
        getattr(error, "context", None),
        getattr(error, "problem", None) or getattr(error, "reason", None),
    ]
    what = ", ".join(part for part in parts if part) or str(error)
    fix = "indent with spaces, not tabs" if "\\t" in what else None
    if "expected a single document" in what:
        fix = "one file has one config: leave out the line ---"
    return Problem(where, "", f"is not valid YAML: {what}", fix=fix)


def _parse(path: Path, text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(_not_a_mapping(path, node))
        keys = list(_keys(node, (), []))
        problems = list(_duplicates(path, keys))
        mapping = loader.construct_document(node)
    finally:
        loader.dispose()
    problems += _keys_that_are_not_text(path, mapping, {key: line for key, line, _ in keys})
    if problems:
        raise ConfigError(problems)
    # Constructing has put merged keys (`<<`) in their place; theirs is the line where they are written.
    lines: dict[KeyPath, int] = {}
    for key, line, _ in _keys(node, (), []):
        lines[key] = line
    return mapping, lines


def _not_a_mapping(path: Path, node: yaml.Node | None) -> Problem:
    if node is None:
        return Problem(str(path), "", "the file has no keys, only comments")
    what = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
    return Problem(
        f"{path}:{node.start_mark.line + 1}",
        "",
        f"a config is a mapping of keys and values, and this is {what}",
        fix="write key: value lines, beginning with name:",
    )


def _keys(node: yaml.Node, path: KeyPath, above: list[int], count: list[int] | None = None) -> Iterator:
    """(path, line, key text) of every key and list item, in the order of the file."""
    count = [0] if count is None else count
    count[0] += 1
    if id(node) in above or count[0] > MAX_NODES:
        what = "an alias inside its own anchor" if id(node) in above else f"more than {MAX_NODES} values"
        raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
    above = [*above, id(node)]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key.value)
            yield (*path, name), key.start_mark.line + 1, name
            yield from _keys(value, (*path, name), above, count)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1, None
            yield from _keys(value, (*path, index), above, count)


def _duplicates(path: Path, keys: list) -> Iterator[Problem]:
    first: dict[KeyPath, int] = {}
    for key, line, name in keys:
        if key in first and name is not None and name != "<<":
            yield Problem(
                f"{path}:{line}",
                dotted(key),
                f"the key is there twice: in line {first[key]} and in line {line}",
                fix="keep one of them",
            )
        first.setdefault(key, line)


def _keys_that_are_not_text(path: Path, value: Any, lines: dict, at: KeyPath = ()) -> list[Problem]:
    """Keys such as `1:` or `on:`, which YAML reads as a number or as true."""
    problems = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(value, dict) and not isinstance(key, str):
            line = next((line for k, line in lines.items() if k[: len(at)] == at), 1) if at else 1
            problems.append(
                Problem(
                    f"{path}:{line}",
                    dotted(at),
                    f"a key must be text, not {key!r}",
                    fix=f'write "{key}": ...',
                )
            )
        problems += _keys_that_are_not_text(path, item, lines, (*at, key))
    return problems


def dotted(path: KeyPath) -> str:
    """A path as it is written in messages and overrides: `metrics.accuracy`, `parameters.groups.0.lr`."""
    return ".".join(str(part) for part in path)
