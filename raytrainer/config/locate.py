"""From a dotted name to what it stands for, and the folders from which a config's names are imported."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import traceback
from types import ModuleType
from typing import Any

from raytrainer.config.suggest import nearest
from raytrainer.errors import TargetError


def locate(dotted: str, at: str = "") -> Any:
    """What a dotted name stands for: the longest prefix that is a module, then attributes of it.

    at: the place in the config, for the message. Raises TargetError with the nearest right name.
    """
    parts = dotted.split(".")
    found, count = _longest_module(parts, at, dotted)
    for index in range(count, len(parts)):
        try:
            found = getattr(found, parts[index])
        except AttributeError:
            raise TargetError(_not_found(found, parts[:index], parts[index], dotted), at) from None
    return found


def _longest_module(parts: list[str], at: str, dotted: str) -> tuple[ModuleType, int]:
    importlib.invalidate_caches()  # a module written since the last import is found
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        try:
            return importlib.import_module(name), count
        except ModuleNotFoundError as error:
            # A missing module that is no part of this name is one that the user's module imports: its fault.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise TargetError(raised(f"importing {name}", error, dotted), at) from error
        except (
            Exception,
            SystemExit,
        ) as error:  # a module's code may raise anything: it is told, with its cause
            raise TargetError(raised(f"importing {name}", error, dotted), at) from error
    raise TargetError(_no_module(parts[0], dotted), at)


def _no_module(name: str, dotted: str) -> str:
    near = nearest(name, {module.name for module in pkgutil.iter_modules()} | set(sys.stdlib_module_names))
    folders = ", ".join(path or os.getcwd() for path in sys.path[:2])
    fix = f"did you mean {near}?" if near else f"your own modules are looked for in {folders}"
    return f"_target_ {dotted}: there is no module {name}\n  {fix}"


def _not_found(owner: Any, parts: list[str], missing: str, dotted: str) -> str:
    names = set(dir(owner)) | {module.name for module in pkgutil.iter_modules(getattr(owner, "__path__", []))}
    near = nearest(missing, sorted(name for name in names if not name.startswith("_")))
    where = ".".join(parts)
    file = getattr(owner, "__file__", None)
    fix = f"did you mean {where}.{near}?" if near else f"{where} is {file}" if file else None
    return f"_target_ {dotted}: {where} has no {missing}" + (f"\n  {fix}" if fix else "")


def raised(doing: str, error: BaseException, name: str) -> str:
    """Type, message and the user's own frames (those outside the standard library and installed packages)."""
    text = f"_target_ {name}: {doing} raised {type(error).__name__}: {error}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    lines = [f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-5:]]
    return text + "".join(lines)


_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = os.path.dirname(os.__file__)


def _is_users(filename: str) -> bool:
    installed = ("site-packages", "dist-packages")
    known = filename.startswith(("<frozen", _OWN_FOLDER, _LIBRARY))
    return not known and not any(folder in filename for folder in installed)


def importable(config: Any) -> list[str]:
    """Folders that a config's targets are imported from: the working directory and the YAML file's folder."""
    folders = [os.getcwd()]
    if config.source_path is not None:
        folders.append(os.path.dirname(os.path.abspath(config.source_path)))
    return list(dict.fromkeys(folders))


def add_importable(config: Any) -> None:
    """Puts `importable(config)` first on `sys.path` in this process."""
    folders = importable(config)
    sys.path[:] = [*folders, *(path for path in sys.path if path not in folders)]
