"""Which Ray a run uses: the cluster that its settings name, or one started for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any

from raytrainer.cluster import shipping
from raytrainer.errors import UsageError

if TYPE_CHECKING:
    from raytrainer.cluster.ray_adapter import Session

# Those with which the private names in `ray_adapter` and `ray_train` were tried.
TRIED_RAY_VERSIONS = ("2.60.0",)
# Not shipped to other machines with the working directory.
EXCLUDED = [".git", ".venv", "venv", "__pycache__", ".pytest_cache", ".ruff_cache"]


def open_session(
    settings: Any, storage_path: str, verbose: bool, on_ship: Callable[[str], None] = lambda text: None
) -> Session:
    """A connection to the cluster that the settings name, else to RAY_ADDRESS, else to a Ray started here.

    on_ship: told what goes along to other machines, before the upload.
    """
    from ray.exceptions import AuthenticationError

    from raytrainer.cluster import ray_adapter

    address = settings.address or os.environ.get("RAY_ADDRESS") or "local"
    runtime_env, init = dict(settings.runtime_env), dict(settings.init)
    current = ray_adapter.current_session()
    if current is not None:
        return current
    if address == "local":
        return ray_adapter.start(init, runtime_env, verbose)
    where = "ray.address" if settings.address else "RAY_ADDRESS"
    if "://" in address:
        raise UsageError(
            f"{where} = {address}\n"
            "  only the address of the cluster itself works here, not Ray Client or a dashboard\n"
            "  write host:port of the head node (by default port 6379), or auto on a machine of the cluster"
        )
    try:
        session = ray_adapter.connect(address, init, runtime_env, verbose)
        if session.is_this_machine or "working_dir" in runtime_env or ray_adapter.in_submitted_job():
            session.ships_files = "working_dir" in runtime_env or ray_adapter.in_submitted_job()
            return session
        session.close()
        shipped = shipped_directory(os.getcwd(), storage_path, runtime_env)
        parcel = shipping.measure(shipped["working_dir"], shipped["excludes"])
        shipping.check(parcel, shipped["working_dir"])
        on_ship(shipping.describe(parcel, shipped["working_dir"], shipped["excludes"]))
        runtime_env = {**runtime_env, **shipped}
        session = ray_adapter.connect(address, init, runtime_env, verbose)
        session.ships_files = True
        return session
    except AuthenticationError as error:
        raise UsageError(
            f"{where} = {address}\n  the cluster wants a token, and none that it accepts was found\n"
            "  put it into ~/.ray/auth_token or RAY_AUTH_TOKEN, and set RAY_AUTH_MODE=token"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{where} = {address}\n  no Ray cluster answers there ({error})\n"
            "  start one with `ray start --head`, correct it, or leave it out for a Ray of the run's own"
        ) from error


def shipped_directory(directory: str, storage_path: str, runtime_env: dict[str, Any]) -> dict[str, Any]:
    """What a runtime_env needs to bring `directory` to other machines, without the runs in it."""
    excludes = [*runtime_env.get("excludes", []), *EXCLUDED]
    relative = os.path.relpath(os.path.abspath(storage_path), directory)
    if "://" not in storage_path and not relative.startswith("..") and relative != ".":
        excludes.append("/" + relative)
    return {"working_dir": directory, "excludes": excludes}


def explain_missing(error: ImportError) -> Exception:
    """The error to raise for `error`: what to install when it is Ray, or a part of it, that is missing."""
    if not (error.name or "").startswith("ray.") and error.name != "ray":
        return error
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return UsageError(
        f"Ray ({version}) lacks {error.name}: {error}\n"
        f"  raytrainer was tried with Ray {', '.join(TRIED_RAY_VERSIONS)}\n"
        f"  pip install 'ray[default,train]=={TRIED_RAY_VERSIONS[-1]}', or use --local, which needs no Ray"
    )
