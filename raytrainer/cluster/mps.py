"""NVIDIA's Multi-Process Service for the trials of a machine: a daemon of our own, and who is served by it.

Commands and variables: NVIDIA's "Multi-Process Service" manual, appendix "Tools and interface reference".
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
import time

import psutil

from raytrainer.cluster.script_process import ScriptProcess

CONTROL = "nvidia-cuda-mps-control"
READY_S = 15.0
ANSWER_S = 5.0


class MpsDaemon:
    """Runs until `close`, or until this process ends. `environment`: for those it is to serve, empty where it
    could not be started, and then `why` says why not. Its pipes and logs are in a directory of its own, so
    that neither it nor another user's daemon is taken for the other.
    """

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.why = ""
        self._process: ScriptProcess | None = None
        # Short: the name of a socket below it has to fit in 108 bytes.
        self._folder = tempfile.mkdtemp(prefix="rt-mps-")
        environment = dict(os.environ)
        # A daemon's own list would renumber the cards for those it serves.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        self._own = {**environment, **self._variables()}
        if shutil.which(CONTROL) is None:
            self.why = f"there is no {CONTROL} here"
            return
        self._start()

    def _variables(self) -> dict[str, str]:
        return {
            "CUDA_MPS_PIPE_DIRECTORY": os.path.join(self._folder, "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": os.path.join(self._folder, "log"),
        }

    def _start(self) -> None:
        for folder in self._variables().values():
            os.mkdir(folder)
        log = os.open(os.path.join(self._folder, "daemon.log"), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            self._process = ScriptProcess([CONTROL, "-f"], self._own, self._folder, log, log)
        finally:
            os.close(log)
        until_s = time.monotonic() + READY_S
        while self._ask("get_server_list") is None:
            # It is not up yet, or has ended.
            if select.select([self._process], [], [], 0.1)[0]:
                self._process.read()
            if self._process.returncode is not None or time.monotonic() > until_s:
                with open(os.path.join(self._folder, "daemon.log"), errors="replace") as file:
                    said = file.read().strip().splitlines()
                self.why = f"{CONTROL} does not answer" + (f": {said[-1]}" if said else "")
                return
        self.environment = self._variables()

    def _ask(self, command: str) -> list[str] | None:
        """The lines of an answer; None without one."""
        try:
            answer = subprocess.run(
                [CONTROL],
                input=f"{command}\n",
                env=self._own,
                capture_output=True,
                text=True,
                timeout=ANSWER_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return answer.stdout.split()

    def serves(self, supervisor_pid: int) -> bool:
        """Whether a process below this one is a client of the daemon's."""
        try:
            below = {process.pid for process in psutil.Process(supervisor_pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            return False
        servers = self._ask("get_server_list") or []
        clients = [client for server in servers for client in self._ask(f"get_client_list {server}") or []]
        return any(client.isdigit() and int(client) in below for client in clients)

    def close(self) -> None:
        """The daemon and its servers end; nothing is left of its files."""
        if self._process is not None:
            if self._process.returncode is None:
                self._ask("quit")
            self._process.close()
        shutil.rmtree(self._folder, ignore_errors=True)
