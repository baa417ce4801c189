"""Which file a `script` section means, and whether it is a script at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from raytrainer.errors import UsageError

_PYTHON = (".py", ".pyw", ".pyc", ".pyz", ".zip")


def find_script(script: Any, directory: str, source_path: str | None) -> str:
    """The path to run, as it was written where that works: from the working directory, else beside the YAML.

    directory: where the command was given; source_path: the YAML file. Raises UsageError for what is no
    script.
    """
    if script.module:
        return script.path
    working_dir = os.path.join(directory, script.working_dir) if script.working_dir else directory
    if script.working_dir and not os.path.isdir(working_dir):
        # It may be there on the cluster's nodes alone, which look again.
        return script.path
    path = Path(working_dir, script.path)
    if not path.exists() and source_path is not None:
        beside = Path(directory, source_path).parent / script.path
        if beside.exists():
            check_script(beside, script.path)
            return os.path.abspath(beside)
    check_script(path, script.path)
    return script.path


def check_script(path: Path, shown: str) -> None:
    """Raises UsageError unless Python can run `path`; shown: the path as the user wrote it."""
    if not path.exists():
        near = _nearest_script(path)
        raise UsageError(
            f"there is no script {shown}\n  looked for {os.path.abspath(path)}\n"
            + (f"  did you mean {near}?" if near else "  for a module, write -m package.module")
        )
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise UsageError(
                f"{shown} is a directory, and has no __main__.py to run\n"
                "  name the script in it, as in launch folder/train.py"
            )
        return
    if path.suffix.lower() not in _PYTHON and not _is_python(path):
        raise UsageError(
            f"{shown} is not a Python file\n"
            "  launch runs it with Python; for a program of another kind, write a script that calls it"
        )


def _is_python(path: Path) -> bool:
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return True


def _nearest_script(path: Path) -> str | None:
    from raytrainer.config.suggest import nearest

    try:
        names = [each.name for each in path.parent.iterdir() if each.suffix == ".py"]
    except OSError:
        return None
    return nearest(path.name, names)
