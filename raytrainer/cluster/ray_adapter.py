"""Every private name of Ray core in use: to start a lean local Ray, to connect, and the key-value store.

Written against the versions in `ray_session.TRIED_RAY_VERSIONS`; `tests/test_ray_adapter.py` says what to
check for another one. The parts of Ray Train are in `ray_train`, which costs a second to import and only the
driver needs.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import psutil
import ray
from ray._private import parameter, services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._private.authentication import authentication_token_setup as ray_auth
from ray._private.node import Node
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.state import state as ray_state
from ray.experimental import internal_kv

from raytrainer.cluster.ray_request import NodeCapacity
from raytrainer.errors import TrainingError

CONNECT_TIMEOUT_S = 5.0
END_TIMEOUT_S = 5.0

_KV_NAMESPACE = b"raytrainer"
_TEMP_PREFIX = "rt-"
_LOCK_NAME = "driver.lock"
_NODE_GROUP_LABEL = "ray.io/node-group"
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
    """A connection to Ray.

    address: "host:port" of the cluster; started_here: this process started it; connected_here: this process's
    connection is this session's alone; ships_files: workers get a copy of the working directory.
    """

    address: str
    started_here: bool
    connected_here: bool = True
    node: Node | None = None
    temp_dir: str | None = None
    lock: TextIO | None = None
    ships_files: bool = False

    @property
    def nodes(self) -> list[NodeCapacity]:
        """The cluster's live nodes."""
        return [
            NodeCapacity(dict(node["Resources"]), dict(node["Labels"]))
            for node in ray.nodes()
            if node["Alive"]
        ]

    @property
    def staying_nodes(self) -> list[NodeCapacity]:
        """The live nodes that nobody is about to take away."""
        leaving = ray_state.get_draining_nodes()
        return [
            NodeCapacity(dict(node["Resources"]), dict(node["Labels"]))
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] not in leaving
        ]

    @property
    def free_nodes(self) -> list[NodeCapacity]:
        """What nobody uses at the moment of the nodes that stay."""
        leaving, free = ray_state.get_draining_nodes(), ray_state.available_resources_per_node()
        return [
            NodeCapacity(dict(free.get(node["NodeID"], {})), dict(node["Labels"]))
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] not in leaving
        ]

    @property
    def free_by_node(self) -> dict[str, tuple[str, dict[str, float]]]:
        """By node ID, of the nodes that stay: their address, and what nobody uses at the moment."""
        leaving, free = ray_state.get_draining_nodes(), ray_state.available_resources_per_node()
        return {
            node["NodeID"]: (node["NodeManagerAddress"], dict(free.get(node["NodeID"], {})))
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] not in leaving
        }

    @property
    def leaving_node_ids(self) -> set[str]:
        """Nodes that are being drained: a preemption with notice, or maintenance."""
        return set(ray_state.get_draining_nodes())

    @property
    def may_grow(self) -> bool:
        """Whether an autoscaler, KubeRay or a launcher looks after the cluster: its nodes are in groups."""
        return any(_NODE_GROUP_LABEL in node.labels for node in self.nodes)

    @property
    def is_this_machine(self) -> bool:
        """Whether every node is this one, so that all files are where the driver sees them."""
        here = node_ip()
        return all(node["NodeManagerAddress"] == here for node in ray.nodes() if node["Alive"])

    def close(self) -> None:
        """Disconnects, and ends the Ray that was started here with all its processes."""
        processes = [] if self.node is None else _descendants(self.node)
        if self.connected_here:
            ray.shutdown()
        if self.node is not None:
            end_node(self.node, processes)
        if self.temp_dir is not None:
            shutil.rmtree(self.temp_dir, ignore_errors=True)
        if self.lock is not None:
            self.lock.close()


def connect(address: str, init: dict[str, Any], runtime_env: dict[str, Any], verbose: bool) -> Session:
    """Joins the cluster at `address` ("host:port", or "auto" for one on this machine) as a driver of its own.

    Raises ConnectionError when nothing answers there, ray.exceptions.AuthenticationError without the right
    token.
    """
    if address == "auto":
        address = services.canonicalize_bootstrap_address_or_die(None)
    # Ray itself would try for minutes, and write about each try.
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S):
        pass
    context = _init(runtime_env, verbose, address=address, **init)
    return Session(context.address_info["gcs_address"], started_here=False)


def start(init: dict[str, Any], runtime_env: dict[str, Any], verbose: bool) -> Session:
    """Starts a Ray on this machine for this process alone, in a temporary directory of its own."""
    # The path ends up in socket names, which may have 107 bytes; macOS's own temporary folder is too long.
    parent = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    remove_abandoned(parent)
    temp_dir = tempfile.mkdtemp(prefix=_TEMP_PREFIX, dir=parent)
    # Held open, and so locked, as long as this process lives, however it ends.
    lock = open(os.path.join(temp_dir, _LOCK_NAME), "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        if set(init) - _NODE_KEYWORDS:
            options = {"include_dashboard": False, **init, "_temp_dir": temp_dir}
            _init(runtime_env, verbose, **options)
            node = ray_worker._global_node
            return Session(node.address, True, node=node, temp_dir=temp_dir, lock=lock)
        node = start_node(init, temp_dir)
        try:
            _init(runtime_env, verbose, address=node.address, _temp_dir=temp_dir)
        except BaseException:
            end_node(node)
            raise
        return Session(node.address, True, node=node, temp_dir=temp_dir, lock=lock)
    except BaseException:
        shutil.rmtree(temp_dir, ignore_errors=True)
        lock.close()
        raise


def remove_abandoned(parent: str) -> None:
    """Removes what the Rays of killed drivers have left in `parent`."""
    for path in Path(parent).glob(f"{_TEMP_PREFIX}*/{_LOCK_NAME}"):
        # Another user's, or just removed by another driver.
        with contextlib.suppress(OSError), open(path, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A driver that has made the file and not yet locked it is at most moments old.
            if time.time() - path.stat().st_mtime > 60:
                shutil.rmtree(path.parent, ignore_errors=True)


def current_session() -> Session | None:
    """The connection that this process already has (a notebook's own `ray.init`), left open by `close`."""
    if not ray.is_initialized():
        return None
    return Session(ray.get_runtime_context().gcs_address, started_here=False, connected_here=False)


def end_node(node: Node, processes: Sequence[psutil.Process] = ()) -> None:
    """Ends a node's processes, its workers and whatever those started, and waits until they are gone.

    Ray by itself kills the raylet and leaves it to the workers to notice. processes: found earlier, to end as
    well.
    """
    processes = {*processes, *_descendants(node)}
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=END_TIMEOUT_S)


def _descendants(node: Node) -> list[psutil.Process]:
    found = []
    for _, process in node.live_processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += psutil.Process(process.pid).children(recursive=True)
    return found


def in_submitted_job() -> bool:
    """Whether this driver is the entrypoint of a Ray job, whose runtime_env holds for the run too."""
    return RAY_JOB_CONFIG_JSON_ENV_VAR in os.environ


def _init(runtime_env: dict[str, Any], verbose: bool, **options):
    # Ray warns of a change to come for workers without a GPU; their CUDA_VISIBLE_DEVICES is ours anyway.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    level = logging.INFO if verbose else logging.CRITICAL
    options = {
        "runtime_env": runtime_env or None,
        "log_to_driver": verbose,
        "logging_level": level,
        **options,
    }
    if verbose:
        return ray.init(**options)
    with (
        quiet(ray_auth.logger, logging.getLogger("ray")),
        _replaced(ray_worker, "listen_error_messages", _show_no_messages),
    ):
        return ray.init(**options)


def start_node(init: dict[str, Any], temp_dir: str) -> Node:
    """A Ray of one node, without a driver. init: keywords of `ray.init` among `_NODE_KEYWORDS`."""
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
    # Told that the dashboard's packages are missing, the node's agent loads half as much.
    with _replaced(ray_utils, "get_dashboard_dependency_error", _missing_packages):
        return _started(params)


def _started(params: parameter.RayParams) -> Node:
    """The node, once its processes have found each other; they end again where Ray gives up waiting.

    Ray waits for a fixed 30 s, which a busy machine can need, and gives up with a bare Exception.
    """
    node = LeanNode.__new__(LeanNode)
    try:
        node.__init__(params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
    except Exception as error:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        if "timed out during startup" not in str(error):
            raise
        raise TrainingError(
            "Ray did not start within 30 s on this machine, which seems to be busy\n"
            "  try again when it is less so; or train without Ray: --local"
        ) from error
    return node


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _missing_packages() -> ImportError:
    return ImportError("not needed by a private Ray")


def _show_no_messages(worker: Any, threads_stopped: Any) -> None:
    """Stands for the thread that prints what raylets complain of."""


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


def node_ip() -> str:
    """This node's address, as the cluster knows it."""
    return ray.util.get_node_ip_address()


def kv_put(key: str, value: bytes) -> None:
    internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=_KV_NAMESPACE)


def kv_get(key: str) -> bytes | None:
    return internal_kv._internal_kv_get(key.encode(), namespace=_KV_NAMESPACE)


def kv_delete_prefix(prefix: str) -> None:
    internal_kv._internal_kv_del(prefix.encode(), del_by_prefix=True, namespace=_KV_NAMESPACE)


def kv_delete(key: str) -> None:
    internal_kv._internal_kv_del(key.encode(), namespace=_KV_NAMESPACE)
