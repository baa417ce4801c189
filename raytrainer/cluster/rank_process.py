"""One rank's process of the local backend, seen from its parent: its start, its channel and its end.

It has a session, and so a process group, of its own: the terminal's Ctrl-C does not reach it, and whatever it
starts ends with it.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from raytrainer.cluster import worker
from raytrainer.cluster.channel import Channel

# Without waitid (macOS before Python 3.13) a process is collected as it ends, and its number may be given
# away before its group is killed.
_CAN_PEEK = hasattr(os, "waitid")


def payload_as_file(payload: dict) -> IO[bytes]:
    """The payload in a nameless file, which every rank reads in its own time."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(pickle.dumps({name: payload[name] for name in ("import_paths", "env") if name in payload}))
    file.write(_pickled(payload))
    file.flush()
    return file


def _pickled(payload: dict) -> bytes:
    try:
        content = pickle.dumps(payload)
        if b"__main__" not in content:
            return content
    except (pickle.PicklingError, AttributeError, TypeError):
        pass
    # A notebook's or a script's own classes exist in this process alone: they have to go by value.
    from ray import cloudpickle

    return cloudpickle.dumps(payload)


def group_environment(num_workers: int, port: int, attempt: int) -> dict[str, str]:
    """This process's environment with what torch reads in all ranks of a group on one machine."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Rank 0 serves the store before the process group starts, so every rank is a client of it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    if sys.platform == "linux":
        # Everything is on this machine; a host name that does not resolve must not matter.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


class RankProcess:
    """The process of rank `rank`; `channel` talks to it, `reported` says that it told how it ended.

    payload_file: from `payload_as_file`; store_fd: a listening socket, for rank 0; log_dir: for rank_N.log.
    """

    def __init__(
        self,
        rank: int,
        environment: dict[str, str],
        payload_file: IO[bytes],
        store_fd: int | None,
        log_dir: Path | None,
    ):
        self.rank = rank
        self.reported = False
        self.exited = False
        ours, theirs = socket.socketpair()
        life_read, self._life_write = os.pipe()
        self.channel = Channel(ours)
        fds = {"control-fd": theirs.fileno(), "life-fd": life_read, "payload-fd": payload_file.fileno()}
        if store_fd is not None:
            fds["store-fd"] = store_fd
        size = os.fstat(payload_file.fileno()).st_size
        numbers = {"rank": rank, "world-size": int(environment["WORLD_SIZE"]), "payload-size": size, **fds}
        with ExitStack() as after:
            after.callback(theirs.close)
            after.callback(os.close, life_read)
            log = after.enter_context(_log_file(log_dir, rank))
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    worker.__file__,
                    *(f"--{name}={value}" for name, value in numbers.items()),
                ],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=list(fds.values()),
                start_new_session=True,
            )

    def call_at_exit(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from a thread, when the process has ended."""
        threading.Thread(target=self._wait, args=(wake,), daemon=True).start()

    def _wait(self, wake: Callable[[], None]) -> None:
        # Leaves the zombie: while it is there, its number, which is its group's too, is not given away.
        if _CAN_PEEK:
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        wake()

    def has_ended(self) -> bool:
        if not _CAN_PEEK:
            return self._process.poll() is not None
        try:
            options = os.WEXITED | os.WNOWAIT | os.WNOHANG
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        except ChildProcessError:
            return True

    def collect(self) -> tuple[int, float | None]:
        """Of the ended process: the exit code as `subprocess` gives it, and the peak resident size in GiB."""
        self.exited = True
        if self._process.returncode is not None:
            return self._process.returncode, None
        try:
            _, status, usage = os.wait4(self._process.pid, 0)
        except ChildProcessError:
            # Collected behind our back, by a SIGCHLD setting of the program that we run in.
            self._process.returncode = 0
            return 0, None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        unit = 1 if sys.platform == "darwin" else 1024
        return self._process.returncode, usage.ru_maxrss * unit / 2**30

    def kill_group(self) -> None:
        """End the process and all that it started; only before `collect`."""
        # Gone already, or (macOS) only the zombie is left.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the connections; a process that is still there is ended by this."""
        self.channel.close()
        os.close(self._life_write)


def _log_file(log_dir: Path | None, rank: int) -> IO[bytes]:
    if log_dir is None:
        return open(os.devnull, "ab")
    log_dir.mkdir(parents=True, exist_ok=True)
    return open(log_dir / f"rank_{rank}.log", "ab")
