"""Every error that raytrainer raises on purpose, and the exit code that each one gives.

    RaytrainerError                 1
    ├── UsageError                  2   a mistake in the command, the config or the data set
    │   ├── ConfigError                 a key, a value or a combination that the config rules out
    │   ├── TargetError                 a `_target_` that cannot be imported, bound or called
    │   ├── DataError                   a data set that cannot be trained on as it is
    │   ├── ResumeError                 a run directory or checkpoint that does not fit the config
    │   └── ClusterRequestError         more than the cluster can ever give
    ├── ExportError                 1   a model that cannot be written in the format asked for
    └── TrainingError               1   the run started and failed
        ├── SampleError                 a sample that cannot be loaded, or has a label outside the classes
        ├── NonFiniteLossError          NaN or infinity where the config says stop
        ├── WorkerError                 an exception in one rank's user code
        ├── ScriptError                 a launched script that failed; has the script's own exit code
        ├── WorkerLostError             a rank's process died
        ├── CheckpointError             no checkpoint can be read
        └── StorageError                the run directory cannot be written

An error that a user can mend says four things: where, which value, which rule, what to write instead.
The command line prints `str(error)` and no traceback; `exit_code` is the process's exit code.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any


class RaytrainerError(Exception):
    """The root: catch this to catch everything that raytrainer raises on purpose."""

    exit_code = 1


class UsageError(RaytrainerError):
    """Something that the user wrote cannot be done; nothing was started."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One mistake in a config.

    where: "file:line" or "override" or "config"; path: dotted key; value: as written, already printable;
    rule: what is wrong, a sentence; fix: what to write instead, or None.
    """

    where: str
    path: str
    rule: str
    value: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        head = f"{self.where}: {self.path}" if self.path else self.where
        if self.value is not None:
            head += f" = {self.value}"
        lines = [head, f"  {self.rule}"]
        if self.fix:
            lines.append(f"  {self.fix}")
        return "\n".join(lines)


class ConfigError(UsageError):
    """One or more mistakes in a config; `problems` has them one by one."""

    def __init__(self, problems: Problem | list[Problem]):
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self):
        return type(self), (self.problems,)


class TargetError(UsageError):
    """A `_target_` that cannot be imported, does not take its arguments, or raises when it is called.

    path: dotted key in the config, "" where it is not known; where: "file:line" or "override ...".
    """

    def __init__(self, message: str, path: str = "", where: str = ""):
        super().__init__(message)
        self.path, self.where = path, where

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.path, super().__str__()) if part)


class DataError(UsageError):
    """A data set that cannot be trained on as it is: empty, or iterable-only."""


class ResumeError(UsageError):
    """The run directory or the checkpoint was made by something that this config does not continue."""


class ClusterRequestError(UsageError):
    """The config asks for more than the cluster can ever give."""


class ExportError(RaytrainerError):
    """torch.export cannot turn the model into a program; what it can be exported to was written."""


class TrainingError(RaytrainerError):
    """The run started and failed."""


class SampleError(TrainingError):
    """A sample, met in training, that cannot be loaded, or has a label outside the classes."""


class NonFiniteLossError(TrainingError):
    """The loss became NaN or infinite and `training.on_nan` is `stop`."""


class WorkerError(TrainingError):
    """An exception in one rank, with the user's own frames first."""


class ScriptError(TrainingError):
    """A launched script failed: the first rank that did, its last words, and its own exit code."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self):
        return type(self), (str(self), self.exit_code)


class WorkerLostError(TrainingError):
    """A rank's process died: its signal or exit code, and what probably killed it."""


class CheckpointError(TrainingError):
    """No checkpoint of the run can be read."""


class StorageError(TrainingError):
    """The run directory cannot be written or read."""


class RaytrainerWarning(UserWarning):
    """Something that a user should know and that stops nothing; shown as one line."""


def warn(message: str) -> None:
    """Says `message` through Python's warnings, so that tests and filters see it too."""
    warnings.warn(message, RaytrainerWarning, stacklevel=3)


def show_warnings_in_one_line() -> None:
    """Has this process print raytrainer's own warnings as `warning: ...`, without Python's file and line."""
    usual = warnings.formatwarning
    if getattr(usual, "in_one_line", False):
        return

    def formatted(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
        if issubclass(category, RaytrainerWarning):
            return f"warning: {message}\n"
        return usual(message, category, *place, **line)

    formatted.in_one_line = True
    warnings.formatwarning = formatted
