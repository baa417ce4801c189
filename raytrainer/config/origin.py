"""Where a config came from, and the config written back: as YAML to store, and as the part that decides what
a checkpoint means. Nothing here writes a value that came from the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from raytrainer.config.interpolation import escape
from raytrainer.config.placing import Places
from raytrainer.config.positions import KeyPath
from raytrainer.config.section import EnvText


@dataclass(frozen=True)
class Origin:
    """mapping: the unresolved mapping with overrides applied; texts: (text in the file, value) of nodes that
    came from the environment, by path; places: where its keys stand."""

    mapping: dict[str, Any] | None = None
    texts: dict[KeyPath, tuple[str, Any]] = field(default_factory=dict)
    env_names: frozenset[str] = frozenset()
    places: Places = field(default_factory=Places)
    micro_batch_size_is_default: bool = False


def stored_mapping(values: dict[str, Any], origin: Origin, keep_objects: bool = False) -> dict[str, Any]:
    """Plain dicts and lists that load back to the same config: what came from the environment as its text."""

    def stored(value: Any, path: KeyPath) -> Any:
        text, resolved = origin.texts.get(path, (None, None))
        if text is not None and value == resolved:
            return text
        if isinstance(value, EnvText):
            return value.raw
        if isinstance(value, dict):
            return {key: stored(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [stored(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, str):
            return escape(str(value))
        if value is None or isinstance(value, bool | int | float) or keep_objects:
            return value
        return object_marker(value)

    return stored(values, ())


def object_marker(value: Any) -> str:
    """`<object Net>` for an instance of Net, or for the class or function Net itself."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"<object {named.__qualname__}>"


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper without aliases, with floats and texts that read back as they were."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    if value != value or value in (float("inf"), float("-inf")):
        return yaml.SafeDumper.represent_float(dumper, value)
    return dumper.represent_scalar("tag:yaml.org,2002:float", repr(value))


def _represent_str(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # In any other style PyYAML loses byte order marks and line breaks, of which Unicode has several.
    style = None if value.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(float, _represent_float)
_Dumper.add_representer(str, _represent_str)


def to_yaml(mapping: dict[str, Any]) -> str:
    """YAML text that `load_config` reads back; every text that YAML could take for something else is "
    "quoted."""
    from raytrainer.config.positions import _Loader

    # The dumper quotes by its own table of what looks like a number: it must be the loader's.
    _Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
    return yaml.dump(mapping, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


MEANING = (
    "seed",
    "model",
    "task",
    "data.train",
    "data.global_batch_size",
    "data.micro_batch_size",
    "data.drop_last",
    "data.shuffle",
    "data.order",
    "optimizer",
    "scheduler",
    "parameters",
    "training.precision",
    "training.ema",
    "training.determinism",
)


def flattened(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves by dotted key; empty mappings and lists are leaves."""
    if isinstance(value, dict) and value:
        pairs = value.items()
    elif isinstance(value, list) and value:
        pairs = enumerate(value)
    else:
        return {path: value}
    flat: dict[str, Any] = {}
    for key, item in pairs:
        flat |= flattened(item, f"{path}.{key}" if path else str(key))
    return flat


def meaning_of(flat: dict[str, Any]) -> dict[str, Any]:
    """The entries of a flat config that decide what a checkpoint means."""
    return {key: value for key, value in flat.items() if any(f"{key}.".startswith(f"{m}.") for m in MEANING)}


_ABSENT = object()


def difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two `Config.meaning()`, a line each: `seed: 0 -> 1`."""

    def shown(value: Any) -> str:
        return "(not given)" if value is _ABSENT else "null" if value is None else str(value)

    keys = [*before, *(key for key in after if key not in before)]
    pairs = [(key, before.get(key, _ABSENT), after.get(key, _ABSENT)) for key in keys]
    return [f"{key}: {shown(a)} -> {shown(b)}" for key, a, b in pairs if type(a) is not type(b) or a != b]
