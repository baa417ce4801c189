"""From `{_target_: package.module.Name, keyword: value}` to the object: locate, bind, call. Every mistake is a
TargetError that names the place in the config.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from raytrainer.config.section import TARGET_KEYS, EnvText
from raytrainer.config.suggest import nearest
from raytrainer.errors import RaytrainerError, TargetError


def instantiate(target: Any, /, *args: Any, at: str = "", **kwargs: Any) -> Any:
    """Builds what a target describes, nested targets (anywhere in mappings and lists) first.

    args, kwargs: further arguments of the outermost call, before and over those in the config. `at`: the
    target's place in the config, for messages. An object from Python is returned as it is, but a class is
    called, and with arguments so is any callable. Raises TargetError.
    """
    if not isinstance(target, dict):
        called = isinstance(target, type) or (callable(target) and bool(args or kwargs))
        return _call(target, args, kwargs, at, _name(target)) if called else target
    name = target["_target_"]
    keywords = {key: _built(item, f"{at}.{key}") for key, item in target.items() if key not in TARGET_KEYS}
    positional = [_built(item, f"{at}._args_.{i}") for i, item in enumerate(target.get("_args_", ()))]
    function = locate(name, at=at)
    if not callable(function):
        raise TargetError(
            f"{_place(at)}_target_ {name} is a {type(function).__name__}, which cannot be called"
        )
    args, kwargs = (*args, *positional), {**keywords, **kwargs}
    if target.get("_partial_", False):
        _bind(function, args, kwargs, at, name, partial=True)
        return functools.partial(function, *args, **kwargs)
    return _call(function, args, kwargs, at, name)


def _built(value: Any, at: str) -> Any:
    """A value from the config with the targets in it built; everything else plain Python."""
    if isinstance(value, dict):
        if "_target_" in value:
            return instantiate(value, at=at)
        return {key: _built(item, f"{at}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_built(item, f"{at}.{index}") for index, item in enumerate(value)]
    return str(value) if isinstance(value, EnvText) else value


def callable_from(value: Any, at: str = "") -> Any:
    """A function given by its dotted name, by a target that builds it, or as itself; None stays None."""
    if isinstance(value, str):
        function = locate(str(value), at=at)
    else:
        function = instantiate(value, at=at) if isinstance(value, dict) else value
    if function is not None and not callable(function):
        raise TargetError(f"{_place(at)}{value!r} is a {type(function).__name__}, which cannot be called")
    return function


def locate(dotted: str, at: str = "") -> Any:
    """What a dotted name stands for: the longest prefix that is a module, then attributes of it."""
    parts = dotted.split(".")
    found, rest = _longest_module(parts, at, dotted)
    for index, part in enumerate(rest):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise TargetError(
                _not_found(found, parts[: len(parts) - len(rest) + index], part, at, dotted)
            ) from None
    return found


def _longest_module(parts: list[str], at: str, dotted: str) -> tuple[ModuleType, list[str]]:
    module = None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if module is not None and hasattr(module, parts[count - 1]) and name not in sys.modules:
            if not hasattr(module, "__path__") or not isinstance(
                getattr(module, parts[count - 1]), ModuleType
            ):
                return module, parts[count - 1 :]
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Only the module that was asked for may be missing; one that it imports is the user's own fault.
            if error.name != name and not (error.name or "").startswith(f"{name}."):
                if module is not None and "is not a package" in str(error):
                    return module, parts[count - 1 :]
                raise TargetError(_raised(f"importing {name}", error, at, dotted)) from error
            if module is None:
                raise TargetError(_no_module(name, at, dotted)) from None
            return module, parts[count - 1 :]
        except (
            Exception,
            SystemExit,
        ) as error:  # a module's code may raise anything: it is told, with its cause
            raise TargetError(_raised(f"importing {name}", error, at, dotted)) from error
    assert module is not None
    return module, []


def _no_module(name: str, at: str, dotted: str) -> str:
    near = nearest(name, _top_level_modules())
    fix = (
        f"did you mean {near}?"
        if near
        else f"modules are looked for in {', '.join(p or '.' for p in sys.path[:2])}"
    )
    return f"{_place(at)}_target_ {dotted}: there is no module {name}\n  {fix}"


def _top_level_modules() -> set[str]:
    """Names that could be imported: installed packages and the modules of the folders that come first."""
    import pkgutil

    return {module.name for module in pkgutil.iter_modules()}


def _not_found(owner: Any, parts: list[str], missing: str, at: str, dotted: str) -> str:
    import pkgutil

    names = set(dir(owner)) | {module.name for module in pkgutil.iter_modules(getattr(owner, "__path__", []))}
    near = nearest(missing, [name for name in names if not name.startswith("_")])
    place = ".".join(parts)
    fix = f"\n  did you mean {place}.{near}?" if near else ""
    return f"{_place(at)}_target_ {dotted}: {place} has no {missing}{fix}"


def _call(function: Callable, args: tuple, kwargs: dict, at: str, name: str) -> Any:
    _bind(function, args, kwargs, at, name)
    try:
        return function(*args, **kwargs)
    except RaytrainerError:
        raise
    except Exception as error:  # the user's code may raise anything: it is told, with its cause
        raise TargetError(_raised("calling it", error, at, name)) from error


def _bind(function: Callable, args: tuple, kwargs: dict, at: str, name: str, partial: bool = False) -> None:
    """Refuses arguments that a call could not take, before anything is called."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some builtins have none: calling them will tell
        return
    try:
        (signature.bind_partial if partial else signature.bind)(*args, **kwargs)
    except TypeError as error:
        raise TargetError(_misfit(signature, args, kwargs, at, name, str(error))) from None


def _misfit(signature: inspect.Signature, args: tuple, kwargs: dict, at: str, name: str, message: str) -> str:
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if open_ended else [key for key in kwargs if key not in named]
    taken = named[len(args) :]
    if unknown:
        near = nearest(unknown[0], taken)
        fix = f"did you mean {near}?" if near else f"it takes: {', '.join(taken) or 'no keywords'}"
        return f"{_place(at, unknown[0])}{name} takes no keyword {unknown[0]}\n  {fix}"
    required = [p.name for p in parameters if p.default is p.empty and p.name in taken]
    missing = [key for key in required if key not in kwargs]
    if missing:
        fix = f"write {missing[0]}: ..., or _partial_: true to pass the function itself"
        return f"{_place(at)}{name} needs {', '.join(missing)}\n  {fix}"
    return f"{_place(at)}{name} cannot be called so: {message}"


def _raised(doing: str, error: BaseException, at: str, name: str) -> str:
    """Type, message and the user's own frames (those outside the standard library and installed packages)."""
    text = f"{_place(at)}_target_ {name}: {doing} raised {type(error).__name__}: {error}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    lines = [f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-5:]]
    return text + "".join(lines)


_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = os.path.dirname(os.__file__)


def _is_users(filename: str) -> bool:
    installed = ("site-packages", "dist-packages")
    return not (
        filename.startswith(("<frozen", _OWN_FOLDER, _LIBRARY))
        or any(folder in filename for folder in installed)
    )


def _place(at: str, key: str = "") -> str:
    path = ".".join(part for part in (at, key) if part)
    return f"{path}: " if path else ""


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def importable(config: Any) -> list[str]:
    """Folders from which a config's targets are imported: the working directory and the YAML file's folder."""
    folders = [os.getcwd()]
    if config.source_path is not None:
        folders.append(os.path.dirname(os.path.abspath(config.source_path)))
    return list(dict.fromkeys(folders))


def add_importable(config: Any) -> None:
    """Puts `importable(config)` first on `sys.path` in this process."""
    folders = importable(config)
    sys.path[:] = [*folders, *(path for path in sys.path if path not in folders)]
