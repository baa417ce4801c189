"""What a script's process is given: its command line and its environment, as torchrun's are; pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What Ray sets for the worker process that the script is below; the script is none.
_OF_THE_WORKER = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS")
_RAY_BREAKPOINT = "ray.util.rpdb.set_trace"
_RANK_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)


@dataclass(frozen=True)
class ScriptPlace:
    """Where one script stands. attempt: how often its group was started before; error_file: for `@record`."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    attempt: int
    error_file: str


def script_environment(environment: Mapping[str, str], plan: dict[str, Any], place: ScriptPlace) -> dict:
    """The script's variables. environment: of the process above it; plan: see `launch.script_plan`."""
    names = {name: value for name, value in environment.items() if name not in _OF_THE_WORKER}
    for name in _RANK_NAMES:
        names.pop(name, None)
    if names.get("PYTHONBREAKPOINT") == _RAY_BREAKPOINT:
        del names["PYTHONBREAKPOINT"]
    if plan["rank_env"]:
        names.update(_rank_variables(plan, place))
        names.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    names.setdefault("PYTHONUNBUFFERED", "1")
    names.pop("OMP_NUM_THREADS", None)
    if plan["num_threads"] is not None:
        names["OMP_NUM_THREADS"] = plan["num_threads"]
    if plan["python_path"]:
        inherited = [names["PYTHONPATH"]] if names.get("PYTHONPATH") else []
        given = [path for path in plan["python_path"] if not inherited or path not in inherited[0].split(":")]
        names["PYTHONPATH"] = os.pathsep.join([*given, *inherited])
    for name, value in plan["env"].items():
        if value is None:
            names.pop(name, None)
        else:
            names[name] = str(value)
    return names


def _rank_variables(plan: dict[str, Any], place: ScriptPlace) -> dict[str, str]:
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_RANK": str(place.rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(plan["max_restarts"]),
        "TORCHELASTIC_RUN_ID": plan["run_id"],
        # No store is served for the script: rank 0's `init_process_group` does that itself.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": place.error_file,
    }


def script_command(python: str, plan: dict[str, Any], place: ScriptPlace) -> list[str]:
    """The command line, with the arguments that older launchers add."""
    command = [python, "-u", *(["-m"] if plan["module"] else []), plan["path"]]
    if plan["local_rank_arg"] != "none":
        command.append(f"{plan['local_rank_arg']}={place.local_rank}")
    command += plan["args"]
    if plan["process_args"]:
        command += ["--process_index", str(place.rank), "--process_num", str(place.world_size)]
    return command


def num_threads(environment: Mapping[str, str], *, cpus_per_worker: float, num_workers: int) -> str | None:
    """OMP_NUM_THREADS of the scripts; None: not set.

    The user's own stays. Otherwise it is what each rank reserves, which by default is torchrun's 1; a single
    worker that reserves no more has all cores, again as under torchrun.
    """
    if "OMP_NUM_THREADS" in environment:
        return environment["OMP_NUM_THREADS"]
    reserved = int(cpus_per_worker)
    if num_workers == 1 and reserved <= 1:
        return None
    return str(max(1, reserved))
