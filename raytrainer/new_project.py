"""`raytrainer init`: a new project folder from the template in the package."""

from __future__ import annotations

import re
import shutil
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from raytrainer.errors import StorageError, UsageError

_PLACEHOLDER = "PROJECT_NAME"


def create_project(folder: str) -> list[str]:
    """Creates `folder` with a config, a model and its data, a test and a README; returns the files' paths.

    Raises UsageError when there is such a folder already or its name is none for a run, StorageError when it
    cannot be written; then nothing is left behind.
    """
    path = Path(folder)
    name = path.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UsageError(
            f"init {folder}\n  {name!r} is to be the name of the run too: letters, digits, _, - and . only"
        )
    try:
        path.mkdir(parents=True)
    except FileExistsError as error:
        raise UsageError(f"{folder} is there already\n  choose another name") from error
    except OSError as error:
        raise StorageError(f"cannot create {folder}: {error.strerror or error}") from error
    try:
        return [
            _write(path / file.name, file, name) for file in sorted(_template(), key=lambda file: file.name)
        ]
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, OSError):
            raise StorageError(f"cannot write to {folder}: {error.strerror or error}") from error
        raise


def _template() -> list[Traversable]:
    template = resources.files("raytrainer").joinpath("templates/project")
    return [file for file in template.iterdir() if file.is_file()]


def _write(path: Path, file: Traversable, name: str) -> str:
    path.write_text(file.read_text(encoding="utf-8").replace(_PLACEHOLDER, name), encoding="utf-8")
    return str(path)
