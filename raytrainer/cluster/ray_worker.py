"""The Ray actor that is one rank: says where it stands, then runs the training in its main thread.

It travels to the workers by value, so that a worker process that Ray started in advance needs nothing but Ray
to take it, and imports no part of Ray Train.
"""

from __future__ import annotations

import os
import socket
import sys
import threading


class RankActor:
    """One rank's process. Ray calls `describe` once and then `run` once, both in the main thread."""

    def __init__(
        self,
        import_paths: list[str],
        environment: dict[str, str],
        preload: list[str],
        directory: str | None,
    ):
        """import_paths: added to the end of sys.path where they exist; environment: variables of every rank.

        preload: modules to import in the background while the other ranks start; directory: to work in, if it
        exists.
        """
        # The driver's own paths are right for this machine only if it is the same one, so they come last.
        sys.path.extend(path for path in import_paths if path not in sys.path and os.path.isdir(path))
        os.environ.update(environment)
        if directory is not None and os.path.isdir(directory):
            os.chdir(directory)
        # The socket keeps the port until rank 0 serves its store on it: no other run can take it in between.
        self._listener = socket.create_server(("", 0), backlog=4096)
        self._rescues = socket.create_server(("", 0))
        self._preloading = threading.Thread(target=_preload, args=(preload,), daemon=True)
        self._preloading.start()

    def describe(self) -> dict:
        """Where this process runs, in plain values."""
        import ray

        context = ray.get_runtime_context()
        return {
            "hostname": socket.gethostname(),
            "node_id": context.get_node_id(),
            "node_ip": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "accelerator_ids": context.get_accelerator_ids(),
            "port": self._listener.getsockname()[1],
            "rescue_port": self._rescues.getsockname()[1],
        }

    def run(self, payload: dict, place: tuple, environment: dict[str, str], link: dict) -> dict:
        """Runs rank `place[0]`: {"result": dict} or {"failure": RankFailure as a dict}; raises nothing.

        environment: what torchrun would set; link: how `ray_link` reaches the driver.
        """
        os.environ.update(environment)
        if place[0] == 0:
            payload = {**payload, "store_fd": self._listener.detach()}
        else:
            self._listener.close()
        # A half imported torch must not be met by anybody.
        self._preloading.join()
        try:
            from raytrainer.cluster.ray_link import run_linked
        except ImportError as error:
            message = (
                f"raytrainer cannot be imported on {socket.gethostname()} ({error}): install it on every node"
            )
            return {
                "failure": {"rank": place[0], "kind": "usage", "error_type": "UsageError", "message": message}
            }
        return run_linked(payload, place, link, self._rescues)


def _preload(modules: list[str]) -> None:
    import importlib

    for name in modules:
        # A missing module is reported where the training asks for it, with the right words.
        try:
            importlib.import_module(name)
        except ImportError:
            return
