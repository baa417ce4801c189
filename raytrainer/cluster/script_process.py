"""A script as a child process under its supervisor, seen from the rank above it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from raytrainer.cluster import supervise


class ScriptProcess:
    """The running script. `returncode` is None until it has ended; then as `subprocess` gives it.

    Everything that it started is gone once it has one. `lost`: the supervisor died before it could say how
    the script ended.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], directory: str, stdout: int, stderr: int
    ):
        self.returncode: int | None = None
        self.rss_gib: float | None = None
        self.error: str | None = None
        self.lost = False
        self._pid: int | None = None
        self._text = b""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", supervise.__file__, str(theirs.fileno()), *command],
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def supervisor_pid(self) -> int:
        """The process above the script and all that it starts."""
        return self._supervisor.pid

    def fileno(self) -> int:
        """Readable when there is something for `read`."""
        return self._socket.fileno()

    def read(self) -> None:
        """Take in what the supervisor says."""
        try:
            data = self._socket.recv(4096)
        except OSError:
            data = b""
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self._hear(line.decode(errors="replace"))
        if not data and self.returncode is None:
            self._supervisor_is_gone()

    def _hear(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "pid":
            self._pid = int(rest)
        elif word == "error":
            self.error = rest
        elif word == "exit":
            code, size = rest.split()
            self.rss_gib = int(size) / (2**30 if sys.platform == "darwin" else 2**20)
            self.returncode = int(code)

    def _supervisor_is_gone(self) -> None:
        self.lost = True
        if self._pid is not None:
            # The kernel has done so already, on Linux.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        self.returncode = -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        """Signal the script, not what it started: those end with it, once it has saved."""
        with suppress(OSError):
            self._socket.send(bytes([number]))

    def close(self) -> None:
        """End the script if it still runs; returns when its supervisor has ended."""
        self._socket.close()
        self._supervisor.wait()


def read_error_file(path: Path) -> str | None:
    """What torch's `@record` wrote about an exception: its traceback, else its message; None without one."""
    try:
        message = json.loads(path.read_text())["message"]
        if isinstance(message, str):
            return message
        return message.get("extraInfo", {}).get("py_callstack") or message.get("message")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
