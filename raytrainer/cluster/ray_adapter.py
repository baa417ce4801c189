"""Every private name of Ray core that raytrainer leans on: starting a lean local Ray, connecting, the key-value store.

Written against the versions in `TRIED_RAY_VERSIONS`; `tests/test_ray_adapter.py` says what to check for another one.
The parts of Ray Train are in `ray_train`, which costs a second to import and only the driver needs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private import parameter, services
from ray._private import utils as ray_utils
from ray._private.authentication import authentication_token_setup as ray_auth
from ray._private.node import Node
from ray.experimental import internal_kv

TRIED_RAY_VERSIONS = ("2.60.0",)

_KV_NAMESPACE = b"raytrainer"
# Keywords of `ray.init` that the lean node takes as they are; any other one leads to a plain `ray.init`.
_NODE_KEYWORDS = frozenset({"num_cpus", "num_gpus", "resources", "labels", "object_store_memory"})


class LeanNode(Node):
    """A head node with none of the processes that only a shared cluster needs.

    No dashboard, no autoscaler monitor, no log monitor: each is a Python process of its own, and together
    they cost more CPU time than both workers of a small run need to import torch.
    """

    def start_api_server(self, **kwargs) -> None:
        """A private Ray has no dashboard."""


@dataclass
class Session:
    """A connection to Ray. address: "host:port" of the cluster; started_here: this process started it."""

    address: str
    started_here: bool
    connected_here: bool = True
    node: Node | None = None
    temp_dir: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def close(self) -> None:
        """Disconnects, and ends the Ray that was started here with all its processes."""
        if self.connected_here:
            ray.shutdown()
        if self.node is not None:
            self.node.kill_all_processes(check_alive=False, allow_graceful=False)
        if self.temp_dir is not None:
            shutil.rmtree(self.temp_dir, ignore_errors=True)


def connect(address: str, init: dict[str, Any], runtime_env: dict[str, Any], verbose: bool) -> Session:
    """Joins the cluster at `address` ("host:port", "auto") as a driver of its own."""
    context = ray.init(
        address=address,
        runtime_env=runtime_env or None,
        log_to_driver=verbose,
        logging_level=logging.INFO if verbose else logging.ERROR,
        **init,
    )
    return Session(context.address_info["gcs_address"], started_here=False)


def start(init: dict[str, Any], runtime_env: dict[str, Any], verbose: bool) -> Session:
    """Starts a Ray on this machine for this process alone, in a temporary directory of its own."""
    # The path ends up in socket names, which may have 107 bytes; macOS's own temporary folder is too long.
    temp_dir = tempfile.mkdtemp(prefix="rt", dir="/tmp" if os.path.isdir("/tmp") else None)
    try:
        if set(init) - _NODE_KEYWORDS:
            options = {"include_dashboard": False, **init, "_temp_dir": temp_dir}
            context = _init(runtime_env, verbose, **options)
            return Session(context.address_info["gcs_address"], True, temp_dir=temp_dir)
        node = _start_lean_node(init, temp_dir)
        try:
            _init(runtime_env, verbose, address=node.address, _temp_dir=temp_dir)
        except BaseException:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
            raise
        return Session(node.address, True, node=node, temp_dir=temp_dir)
    except BaseException:
        shutil.rmtree(temp_dir, ignore_errors=True)
        raise


def current_session() -> Session | None:
    """The connection that this process already has (a notebook's own `ray.init`), left open by `close`."""
    if not ray.is_initialized():
        return None
    return Session(ray.get_runtime_context().gcs_address, started_here=False, connected_here=False)


def _init(runtime_env: dict[str, Any], verbose: bool, **options):
    return ray.init(
        runtime_env=runtime_env or None,
        log_to_driver=verbose,
        logging_level=logging.INFO if verbose else logging.ERROR,
        **options,
    )


def _start_lean_node(init: dict[str, Any], temp_dir: str) -> Node:
    with quiet(ray_auth.logger):
        ray_auth.enable_token_auth_by_default()
        ray_auth.ensure_token_if_auth_enabled({}, create_token_if_missing=True)
    ports = _free_ports(3)
    params = parameter.RayParams(
        **init,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        temp_dir=temp_dir,
        # With port 0 the raylet registers only after both agents have started and written theirs down.
        metrics_agent_port=ports[0],
        runtime_env_agent_port=ports[1],
        dashboard_agent_listen_port=ports[2],
    )
    with _without_dashboard_packages():
        return LeanNode(params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)


@contextlib.contextmanager
def _without_dashboard_packages() -> Iterator[None]:
    """Inside, Ray believes that the dashboard's packages are missing: its agent then loads half as much."""
    probe = ray_utils.get_dashboard_dependency_error
    ray_utils.get_dashboard_dependency_error = lambda: ImportError("not needed by a private Ray")
    try:
        yield
    finally:
        ray_utils.get_dashboard_dependency_error = probe


@contextlib.contextmanager
def quiet(*loggers: logging.Logger) -> Iterator[None]:
    """Inside, these loggers let through errors alone."""
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def kv_put(key: str, value: bytes) -> None:
    internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=_KV_NAMESPACE)


def kv_get(key: str) -> bytes | None:
    return internal_kv._internal_kv_get(key.encode(), namespace=_KV_NAMESPACE)


def kv_delete_prefix(prefix: str) -> None:
    internal_kv._internal_kv_del(prefix.encode(), del_by_prefix=True, namespace=_KV_NAMESPACE)


def kv_delete(key: str) -> None:
    internal_kv._internal_kv_del(key.encode(), namespace=_KV_NAMESPACE)
