"""The config that the options of `raytrainer launch` stand for."""

from __future__ import annotations

import os
import re
from typing import Any

from raytrainer.config import Config
from raytrainer.config.interpolation import escape
from raytrainer.errors import ConfigError, Problem, UsageError

# What an option is called, for the mistakes that the config finds.
_OPTIONS = {
    "scaling.num_workers": "-n",
    "scaling.cpus_per_worker": "--cpus-per-worker",
    "scaling.gpus_per_worker": "--gpus-per-worker",
    "failure.max_failures": "--max-restarts",
    "script.min_workers": "-n",
    "script.tee": "--tee",
    "script.local_rank_arg": "--local-rank-arg",
    "script.rank_env": "--no-rank-env",
    "script.master_port": "--master-port",
    "script.env": "--env",
    "script.path": "SCRIPT",
    "name": "--name",
}


def config_of_options(
    path: str,
    args: list[str],
    *,
    name: str | None,
    num_workers: str,
    cpus_per_worker: float,
    gpus_per_worker: str,
    max_restarts: int,
    env: list[str],
    storage_path: str,
    address: str | None,
    exclude: list[str],
    **script: Any,
) -> Config:
    """num_workers: "4" or "1:4"; env: "K=V", or "K" for the value that it has here. Raises ConfigError."""
    most, fewest = _parse_workers(num_workers)
    mapping = {
        "name": name or default_name(path, script["module"]),
        "storage_path": storage_path,
        "scaling": {
            "num_workers": most,
            "cpus_per_worker": cpus_per_worker,
            "gpus_per_worker": _number(gpus_per_worker),
        },
        "failure": {"max_failures": max_restarts},
        "ray": {"address": address, "runtime_env": {"excludes": exclude} if exclude else {}},
        "script": {
            "path": escape(path),
            "args": [escape(each) for each in args],
            "env": dict(_variable(each) for each in env),
            "min_workers": fewest,
            **script,
        },
    }
    try:
        return Config.from_mapping(mapping)
    except ConfigError as error:
        raise ConfigError([_as_option(problem) for problem in error.problems]) from None


def default_name(path: str, module: bool) -> str:
    """A folder's name for a script: train for jobs/train.py, pkg.train for the module of that name."""
    stem = path if module else os.path.splitext(os.path.basename(os.path.abspath(path)))[0]
    return re.sub(r"[^\w.-]+", "_", stem).strip("._") or "script"


def _parse_workers(text: str) -> tuple[int, int | None]:
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", text.strip())
    fewest, most = (int(match[1]) if match and match[1] else None), (int(match[2]) if match else 0)
    if most < 1 or fewest == 0 or (fewest or 0) > most:
        raise UsageError(
            f"-n {text}\n  must be a number of processes, 1 or more, or MIN:MAX\n  write -n 4, or -n 1:4"
        )
    return most, fewest


def _number(text: str) -> Any:
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value == int(value) else value


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[^\W\d]\w*", name):
        raise UsageError(f"--env {text}\n  must be NAME=VALUE or NAME\n  write --env NCCL_DEBUG=INFO")
    # A value from here is read when it is used, and its name is what the run directory keeps.
    return name, escape(value) if equals else f"${{oc.env:{name}}}"


def _as_option(problem: Problem) -> Problem:
    option = _OPTIONS.get(problem.path)
    if option is None:
        return problem
    return Problem(f"option {option}", problem.path, problem.rule, problem.value, problem.fix)
