"""`${...}` in a config: resolved through OmegaConf, with a note of what came from the environment.

Values from the environment stay apart from the rest: the text `${oc.env:NAME}` is what is stored and shown,
the value is only in memory, in the process that uses it.
"""

from __future__ import annotations

import contextvars
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raytrainer.config.positions import KeyPath, dotted
from raytrainer.config.section import Broken, EnvText

_ENV = re.compile(r"(?<!\\)\$\{\s*oc\.env\s*:")
_names_read: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("names_read", default=None)
_UNSET = object()


class _UnsetVariable(Exception):
    """An environment variable that is not set and has no default."""


def _read_env(name: str, default: Any = _UNSET) -> str | None:
    """OmegaConf's `oc.env`, which also notes the name."""
    read = _names_read.get()
    if read is not None:
        read.add(name)
    if name in os.environ:
        return os.environ[name]
    if default is _UNSET:
        raise _UnsetVariable(name)
    return None if default is None else str(default)


@dataclass
class Resolved:
    """values: the mapping with every `${...}` replaced; raw: the text of the nodes that are stored as text;
    env_names: the environment variables that are referred to; broken: what could not be resolved."""

    values: Any = None
    raw: dict[KeyPath, str] = field(default_factory=dict)
    env_names: set[str] = field(default_factory=set)
    broken: list[Broken] = field(default_factory=list)


def resolve(mapping: dict[str, Any]) -> Resolved:
    """Resolves every `${...}`; mistakes are collected in `broken`, not raised."""
    result = Resolved()
    root: Any = None
    if _has_interpolation(mapping):
        # Imported here: it costs a fifth of a second. replace=True: its registry may have been cleared.
        from omegaconf import OmegaConf

        OmegaConf.register_resolver("raytrainer.env", _read_env, replace=True)
        root = OmegaConf.create(_map_leaves(mapping, lambda path, leaf: _for_omegaconf(path, leaf, result)))

    def resolve_leaf(path: KeyPath, leaf: Any) -> Any:
        if leaf == "???" and isinstance(leaf, str):
            fix = f"give it in the file, or as an override: {dotted(path)}=..."
            result.broken.append(Broken(path, "has no value yet (???)", fix))
            return None
        if (
            not isinstance(leaf, str)
            or "${" not in leaf
            or any(broken.path == path for broken in result.broken)
        ):
            return leaf
        return _resolve_text(root, path, leaf, result)

    result.values = _map_leaves(mapping, resolve_leaf)
    return result


def _map_leaves(value: Any, change: Callable[[KeyPath, Any], Any], path: KeyPath = ()) -> Any:
    """A copy of nested mappings and lists with every leaf changed."""
    if isinstance(value, dict):
        return {key: _map_leaves(item, change, (*path, key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_map_leaves(item, change, (*path, index)) for index, item in enumerate(value)]
    return change(path, value)


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_interpolation(item) for item in value.values())
    if type(value) in (list, tuple):
        return any(_has_interpolation(item) for item in value)
    return isinstance(value, str) and "${" in value


def _for_omegaconf(path: KeyPath, leaf: Any, result: Resolved) -> Any:
    """A leaf that OmegaConf can hold: objects from Python are left out, bad syntax is noted."""
    if not isinstance(leaf, str):
        return leaf if leaf is None or type(leaf) in (bool, int, float) else None
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text = _ENV.sub("${raytrainer.env:", leaf)
    if "${" in text:
        try:
            OmegaConf.create({"text": text})
        except OmegaConfBaseException:
            rule = "is not a valid ${...} expression"
            result.broken.append(Broken(path, rule, "write ${oc.env:NAME}, ${oc.env:NAME,default} or ${key}"))
            return None
    return text


def _resolve_text(root: Any, path: KeyPath, leaf: str, result: Resolved) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    read: set[str] = set()
    token = _names_read.set(read)
    try:
        parent = root
        for part in path[:-1]:
            parent = parent[part]
        value = parent[path[-1]]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException as error:
        result.broken.append(_broken(path, error))
        return None
    except RecursionError:
        result.broken.append(Broken(path, "refers to itself"))
        return None
    finally:
        _names_read.reset(token)
        result.env_names |= read
    if read:
        result.raw[path] = leaf
        return _map_leaves(value, lambda _, item: EnvText(item, leaf) if isinstance(item, str) else item)
    return value


def _broken(path: KeyPath, error: Exception) -> Broken:
    """What an error of OmegaConf's means for the user."""
    from omegaconf.errors import InterpolationKeyError, UnsupportedInterpolationType

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, _UnsetVariable):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        name = str(cause)
        return Broken(
            path,
            f"the environment variable {name} is not set",
            f"set it (export {name}=...), or give a default: ${{oc.env:{name},default}}",
        )
    first_line = str(error).splitlines()[0]
    if isinstance(error, InterpolationKeyError):
        return Broken(
            path, first_line[0].lower() + first_line[1:], "refer to a key by its whole path: ${data.train}"
        )
    if isinstance(error, UnsupportedInterpolationType):
        return Broken(path, f"{first_line[0].lower()}{first_line[1:]}", "write ${oc.env:NAME} or ${key}")
    if "recursive" in first_line.lower():
        return Broken(path, "refers to itself")
    return Broken(path, f"cannot be resolved: {first_line}")


def escape(text: str) -> str:
    """Text that OmegaConf reads back as `text`, whatever `${` is in it."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)
