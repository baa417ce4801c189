"""From `{_target_: package.module.Name, keyword: value}` to the object: locate, bind, call. Every mistake is
a TargetError that names the place in the config.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from raytrainer.config.locate import locate, raised
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
        is_called = isinstance(target, type) or (callable(target) and bool(args or kwargs))
        return _call(target, args, kwargs, at, _name(target)) if is_called else target
    function, positional, keywords = _parts(target, at)
    args, kwargs, name = (*args, *positional), {**keywords, **kwargs}, target["_target_"]
    if target.get("_partial_", False):
        _bind(function, args, kwargs, at, name, partial=True)
        return functools.partial(function, *args, **kwargs)
    return _call(function, args, kwargs, at, name)


def check_target(target: Any, /, *args: Any, at: str = "", **kwargs: Any) -> None:
    """Imports a target and those nested in it and binds their arguments, calling nothing. Raises TargetError.

    args, kwargs: what the caller of `instantiate` will add; their values do not matter.
    """
    if not isinstance(target, dict):
        return
    for key, value in target.items():
        _check_nested(value, _join(at, key))
    keywords = {key: value for key, value in target.items() if key not in TARGET_KEYS}
    function = _callable(target["_target_"], at)
    partial = target.get("_partial_", False)
    args, kwargs = (*args, *target.get("_args_", ())), {**keywords, **kwargs}
    _bind(function, args, kwargs, at, target["_target_"], partial)


def _check_nested(value: Any, at: str) -> None:
    if isinstance(value, dict) and "_target_" in value:
        check_target(value, at=at)
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_nested(item, _join(at, key))


def callable_from(value: Any, at: str = "") -> Any:
    """A function given by its dotted name, by a target that builds it, or as itself; None stays None."""
    if isinstance(value, str):
        return _callable(str(value), at)
    function = instantiate(value, at=at) if isinstance(value, dict) else value
    if function is not None and not callable(function):
        raise TargetError(f"cannot be called: its type is {type(function).__name__}", at)
    return function


def takes(target: Any, keyword: str, at: str = "") -> bool:
    """Whether what a target (or an object from Python) stands for takes a keyword argument of this name."""
    function = locate(target["_target_"], at) if isinstance(target, dict) else target
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):
        return False
    return keyword in parameters and parameters[keyword].kind is not inspect.Parameter.POSITIONAL_ONLY


def _parts(target: dict[str, Any], at: str) -> tuple[Callable, list[Any], dict[str, Any]]:
    """What to call, the positional and the keyword arguments from the config."""
    keywords = {key: _built(item, _join(at, key)) for key, item in target.items() if key not in TARGET_KEYS}
    positional = [_built(item, _join(at, "_args_", i)) for i, item in enumerate(target.get("_args_", ()))]
    return _callable(target["_target_"], at), positional, keywords


def _callable(name: str, at: str) -> Callable:
    function = locate(name, at)
    if not callable(function):
        raise TargetError(f"{name} cannot be called: its type is {type(function).__name__}", at)
    return function


def _built(value: Any, at: str) -> Any:
    """A value from the config with the targets in it built; everything else plain Python."""
    if isinstance(value, dict):
        if "_target_" in value:
            return instantiate(value, at=at)
        return {key: _built(item, _join(at, key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_built(item, _join(at, index)) for index, item in enumerate(value)]
    return str(value) if isinstance(value, EnvText) else value


def _join(*parts: str | int) -> str:
    return ".".join(str(part) for part in parts if part != "")


def _call(function: Callable, args: tuple, kwargs: dict, at: str, name: str) -> Any:
    _bind(function, args, kwargs, at, name)
    try:
        return function(*args, **kwargs)
    except RaytrainerError:
        raise
    except Exception as error:  # the user's code may raise anything: it is told, with its cause
        raise TargetError(raised("calling it", error, name), at) from error


def _bind(function: Callable, args: tuple, kwargs: dict, at: str, name: str, partial: bool = False) -> None:
    """Refuses arguments that a call could not take, before anything is called."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some builtins have none: calling them will tell
        return
    try:
        (signature.bind_partial if partial else signature.bind)(*args, **kwargs)
    except TypeError as error:
        message, key = _misfit(signature, args, kwargs, name, str(error))
        raise TargetError(message, _join(at, key)) from None


def _misfit(
    signature: inspect.Signature, args: tuple, kwargs: dict, name: str, message: str
) -> tuple[str, str]:
    """(what does not fit, the key that it is about or "")."""
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = named[len(args) :]
    unknown = [] if is_open else [key for key in kwargs if key not in named]
    if unknown:
        near = nearest(unknown[0], taken)
        fix = f"did you mean {near}?" if near else f"it takes: {', '.join(taken) or 'no keywords'}"
        return f"{name} takes no keyword {unknown[0]}\n  {fix}", unknown[0]
    missing = [
        p.name for p in parameters if p.default is p.empty and p.name in taken and p.name not in kwargs
    ]
    if missing:
        fix = f"write {missing[0]}: ..., or _partial_: true to pass the function itself"
        return f"{name} needs {', '.join(missing)}\n  {fix}", ""
    return f"{name} cannot be called with these arguments: {message}", ""


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
