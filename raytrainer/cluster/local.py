"""Runs the ranks as processes of our own on this machine, without Ray: start, watch, stop, start again.

Each rank has a session, and so a process group, of its own: the terminal's Ctrl-C does not reach it, and what it
starts ends with it. The parent waits on sockets only, and imports no torch.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from raytrainer.cluster import worker
from raytrainer.cluster.channel import Channel
from raytrainer.cluster.outcome import (
    Outcome,
    RankFailure,
    choose_cause,
    describe_exit,
    is_retryable,
    to_error,
)
from raytrainer.cluster.signals import EXIT_CODES, StopSignal

# After the first failure the others get this long to notice and to write out their logs.
GRACE_S = 5.0
# After the last result, for exit hooks and loader workers.
EXIT_S = 10.0
# For the kernel to end a killed process; one stuck in a device's driver cannot be waited for.
KILL_S = 5.0


def run_local(
    payload: dict,
    num_workers: int,
    *,
    on_record: Callable[[dict], None],
    stop: StopSignal,
    max_failures: int,
    log_dir: Path | str | None,
    committed_step: Callable[[], int | None],
) -> Outcome:
    """Run `num_workers` ranks until they finish, stop or fail for good; no process of theirs is left.

    payload: see `worker.run_rank`; plain picklable values. on_record: called here with each record of rank 0, with
    its output lines ({"output": ..., "stream": ...}) and with a "worker_failed" event for each new start.
    max_failures: new starts after a lost process, without a newly committed step in between; -1 for no limit.
    log_dir: where rank N's output goes, to rank_N.log. committed_step: the step a new start would resume at.
    """
    payload = {**payload, "log_dir": None}
    restarts: list[RankFailure] = []
    num_failures = 0
    last_step = committed_step()
    while not stop.requested:
        payload["attempt"] = len(restarts)
        with _Group(payload, num_workers, on_record, stop, Path(log_dir) if log_dir else None) as group:
            group.watch()
        if group.all_finished:
            return _outcome_of(group.results, stop, tuple(restarts))
        if not group.failures:
            break
        cause = choose_cause(group.failures)
        step = committed_step()
        num_failures = 1 if step != last_step else num_failures + 1
        last_step = step
        if stop.requested or not is_retryable(cause) or 0 <= max_failures < num_failures:
            return Outcome("failed", to_error(cause).exit_code, failure=cause, restarts=tuple(restarts))
        restarts.append(cause)
        on_record(_restart_record(cause, step, num_failures, max_failures))
    return Outcome("stopped", stop.exit_code, restarts=tuple(restarts))


def _restart_record(cause: RankFailure, step: int | None, num_failures: int, max_failures: int) -> dict:
    return {
        "event": "worker_failed",
        "rank": cause.rank,
        "kind": cause.kind,
        "message": cause.summary,
        "step": step,
        "num_failures": num_failures,
        "max_failures": max_failures,
    }


def _outcome_of(results: dict[int, dict], stop: StopSignal, restarts: tuple[RankFailure, ...]) -> Outcome:
    result = results[0] or {}
    status = result.get("status", "finished")
    if status != "stopped":
        return Outcome(status, result.get("exit_code", 0), result, restarts=restarts)
    # A rank may have been told by a signal of its own: the whole job's processes often get one.
    reason = stop.requested or result.get("stop_reason", "")
    return Outcome(status, EXIT_CODES.get(reason, result.get("exit_code", 0)), result, restarts=restarts)


@dataclass(eq=False)
class _Rank:
    """One rank's process, seen from the parent."""

    rank: int
    process: subprocess.Popen
    channel: Channel
    reported: bool = False
    exited: bool = False


class _Group:
    """The ranks of one start: launched on entry, gone with all that they started on exit."""

    def __init__(
        self,
        payload: dict,
        num_workers: int,
        on_record: Callable[[dict], None],
        stop: StopSignal,
        log_dir: Path | None,
    ):
        self.results: dict[int, dict] = {}
        self.failures: list[RankFailure] = []
        self._payload = payload
        self._num_workers = num_workers
        self._on_record = on_record
        self._stop = stop
        self._log_dir = log_dir
        self._ranks: list[_Rank] = []
        self._resources = ExitStack()
        self._training = False
        self._killed = False
        self._stop_sent = False
        self._deadline: float | None = None

    @property
    def all_finished(self) -> bool:
        return len(self.results) == self._num_workers

    def __enter__(self) -> _Group:
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            self._resources.callback(end.close)
            end.setblocking(False)
        self._selector = self._resources.enter_context(selectors.DefaultSelector())
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._resources.enter_context(self._stop.listening(self._wake))
        try:
            self._launch()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._on_record = lambda record: None
        self._kill()
        while self._wait():
            pass
        self._resources.close()

    def watch(self) -> None:
        """Wait until every rank has ended, passing on what they say and ending those that should."""
        self._apply_stop()
        while self._wait():
            self._apply_stop()

    def _wait(self) -> bool:
        """Wait for the next thing to happen and take it in; False when nothing is left to wait for."""
        if all(rank.exited for rank in self._ranks):
            return False
        timeout_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._wake_read:
                self._drain_wake()
            else:
                self._read(key.data)
                if key.data.channel.closed:
                    self._selector.unregister(key.fileobj)
        self._reap()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            if self._killed:
                return False
            self._kill()
        return True

    # Starting

    def _launch(self) -> None:
        payload_file = self._resources.enter_context(tempfile.TemporaryFile())
        payload_file.write(pickle.dumps(self._payload))
        payload_file.flush()
        # The listening socket keeps the port until rank 0 serves its store on it: no other run can take it.
        listener = self._resources.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
        environment = self._environment(listener.getsockname()[1])
        for rank in range(self._num_workers):
            self._start_rank(rank, environment, payload_file, listener)
        listener.close()

    def _environment(self, port: int) -> dict[str, str]:
        size = str(self._num_workers)
        environment = {
            **os.environ,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # Rank 0 serves the store before the process group starts, so every rank connects to it as a client.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._payload["attempt"]),
        }
        if sys.platform == "linux":
            # Everything is on this machine; a host name that does not resolve must not matter.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environment

    def _start_rank(
        self, rank: int, environment: dict[str, str], payload_file, listener: socket.socket
    ) -> None:
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        self._resources.callback(channel.close)
        life_read, life_write = os.pipe()
        self._resources.callback(os.close, life_write)
        with ExitStack() as child_side:
            child_side.callback(theirs.close)
            child_side.callback(os.close, life_read)
            log = child_side.enter_context(self._log_file(rank))
            fds = {"control_fd": theirs.fileno(), "life_fd": life_read, "payload_fd": payload_file.fileno()}
            if rank == 0:
                fds["store_fd"] = listener.fileno()
            numbers = {
                "rank": rank,
                "world_size": self._num_workers,
                "payload_size": payload_file.tell(),
                **fds,
            }
            arguments = [str(part) for name, value in numbers.items() for part in (f"--{name}", value)]
            process = subprocess.Popen(
                [sys.executable, "-P", worker.__file__, *(part.replace("_", "-") for part in arguments)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=list(fds.values()),
                start_new_session=True,
            )
        entry = _Rank(rank, process, channel)
        self._ranks.append(entry)
        self._selector.register(channel, selectors.EVENT_READ, entry)
        threading.Thread(target=_wait_for_exit, args=(process, self._wake), daemon=True).start()

    def _log_file(self, rank: int):
        if self._log_dir is None:
            return open(os.devnull, "ab")
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return open(self._log_dir / f"rank_{rank}.log", "ab")

    # Waking up

    def _wake(self) -> None:
        # Full: a wake-up waits there already. Closed: nobody is watching any more.
        with suppress(OSError):
            self._wake_write.send(b"w")

    def _drain_wake(self) -> None:
        with suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    # What the ranks say

    def _read(self, rank: _Rank) -> None:
        for message in rank.channel.receive():
            if "record" in message:
                record = message["record"]
                self._training |= "step" in record or record.get("event") in ("started", "resumed")
                self._on_record(record)
            elif "result" in message:
                rank.reported = True
                self.results[rank.rank] = message["result"]
                if self.all_finished:
                    self._deadline = time.monotonic() + EXIT_S
            elif "failure" in message:
                rank.reported = True
                self._fail(RankFailure.from_dict(message["failure"]))

    def _fail(self, failure: RankFailure) -> None:
        self.failures.append(failure)
        if self._deadline is None:
            self._deadline = time.monotonic() + GRACE_S
            for rank in self._ranks:
                if not rank.reported:
                    rank.channel.send({"abort": GRACE_S / 2})

    def _reap(self) -> None:
        """Note the ranks that have ended, after all that they said, and end what they left in their groups."""
        for rank in self._ranks:
            if rank.exited or not _has_ended(rank.process):
                continue
            self._read(rank)
            _kill_group(rank.process)
            returncode, rss_gib = _collect(rank.process)
            rank.exited = True
            if not rank.reported and not self._killed:
                self._fail(describe_exit(rank.rank, returncode, rss_gib))

    # Ending them

    def _apply_stop(self) -> None:
        if not self._stop.requested or self._killed or self.all_finished:
            return
        if self._stop.immediate or not self._training:
            # Before the first step there is nothing to save.
            self._kill()
        elif not self._stop_sent:
            self._stop_sent = True
            for rank in self._ranks:
                rank.channel.send({"stop": self._stop.requested})

    def _kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._deadline = time.monotonic() + KILL_S
        for rank in self._ranks:
            if not rank.exited:
                _kill_group(rank.process)


# Without waitid (macOS before Python 3.13) a process is collected as it ends, and its number may be given away
# before its group is killed.
_CAN_PEEK = hasattr(os, "waitid")


def _wait_for_exit(process: subprocess.Popen, wake: Callable[[], None]) -> None:
    """In a thread of its own: call `wake` when `process` has ended, and leave the zombie where it can be.

    While the zombie is there, its number, which is its process group's too, is not given to another.
    """
    if _CAN_PEEK:
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()
    wake()


def _has_ended(process: subprocess.Popen) -> bool:
    if not _CAN_PEEK:
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def _collect(process: subprocess.Popen) -> tuple[int, float | None]:
    """The exit code of a process that has ended, as `subprocess` gives it, and its peak resident size in GiB."""
    if process.returncode is None:
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except ChildProcessError:
            # Collected behind our back, by a SIGCHLD setting of the program that we run in.
            process.returncode = 0
            return 0, None
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30
    return process.returncode, None


def _kill_group(process: subprocess.Popen) -> None:
    # Gone already, or (macOS) only the zombie is left.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
