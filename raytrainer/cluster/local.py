"""Runs the ranks as processes of our own on this machine, without Ray: start, watch, stop, start again.

The parent waits on sockets only, and imports no torch.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from raytrainer.cluster.outcome import (
    Outcome,
    RankFailure,
    choose_cause,
    describe_exit,
    is_retryable,
    to_error,
)
from raytrainer.cluster.rank_process import RankProcess, group_environment, payload_as_file
from raytrainer.cluster.signals import EXIT_CODES, StopSignal
from raytrainer.errors import ClusterRequestError

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

    payload: see `worker.run_rank`; plain picklable values. on_record: called here with each record of
    rank 0, with its output lines ({"output": ..., "stream": ...}) and with a "worker_failed" event for each
    new start.
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
    reasons = [stop.requested, *((each or {}).get("stop_reason") for each in results.values())]
    reason = next((reason for reason in reasons if reason), "")
    return Outcome(status, EXIT_CODES.get(reason, result.get("exit_code", 0)), result, restarts=restarts)


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
        self._ranks: list[RankProcess] = []
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
        # The listening socket keeps the port until rank 0 serves its store on it: no other run can take it.
        listener = self._resources.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
        payload_file = self._resources.enter_context(payload_as_file(self._payload))
        environment = group_environment(
            self._num_workers, listener.getsockname()[1], self._payload["attempt"]
        )
        for rank in range(self._num_workers):
            store_fd = listener.fileno() if rank == 0 else None
            process = RankProcess(rank, environment, payload_file, store_fd, self._log_dir)
            self._resources.callback(process.close)
            self._ranks.append(process)
            self._selector.register(process.channel, selectors.EVENT_READ, process)
            process.call_at_exit(self._wake)
        listener.close()

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

    def _read(self, rank: RankProcess) -> None:
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
        """Note the ranks that have ended, after all that they said, and end what they left."""
        for rank in self._ranks:
            if rank.exited or not rank.has_ended():
                continue
            self._read(rank)
            rank.kill_group()
            returncode, rss_gib = rank.collect()
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
                rank.kill_group()


# What one worker holds once torch is loaded, before any model or data.
_WORKER_GIB = 0.3


def check_local_request(num_workers: int, num_cores: int, memory_gib: float) -> str | None:
    """A notice when the workers must share cores. Raises ClusterRequestError for more than fit in memory."""
    needed_gib = num_workers * _WORKER_GIB
    if needed_gib > memory_gib:
        raise ClusterRequestError(
            f"scaling.num_workers = {num_workers}\n"
            f"  that many processes take {needed_gib:.0f} GiB before any model or data, and this machine has "
            f"{memory_gib:.0f} GiB\n  write a smaller scaling.num_workers: this machine has {num_cores} cores"
        )
    if num_workers > num_cores:
        return f"{num_workers} workers share {num_cores} cores here: they take turns, and gain nothing"
    return None
