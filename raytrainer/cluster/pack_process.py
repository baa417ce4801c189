"""One trial's process: under its supervisor, in a group of its own, its output in a log of bounded size."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytrainer.cluster.script_process import ScriptProcess

CHUNK_BYTES = 1 << 16
TAIL_BYTES = 1 << 14
MAX_RECORD_BYTES = 1 << 16
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class TrialStart:
    """All that a machine needs to start a trial.

    directory: to run in; trial_dir: its own, for the log; metrics_file: of JSON lines that the trial writes.
    timeout_s: from its start to its end. num_starts: how often it was started before. mps: whether it is
    to share its card through MPS.
    """

    trial: int
    command: tuple[str, ...]
    environment: dict[str, str]
    directory: str
    trial_dir: str
    metrics_file: str
    rss_cap_gib: float
    timeout_s: float | None
    log_bytes: int
    num_starts: int = 0
    mps: bool = False


class BoundedLog:
    """Appends to a file up to `max_bytes`: the first half as it comes, then the last half at the end."""

    def __init__(self, path: Path, max_bytes: int):
        self._max_bytes = max(4096, max_bytes)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        self._room = max(0, self._max_bytes // 2 - self._file.tell())
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._left_out = 0

    def write(self, data: bytes) -> None:
        """Never fails: a full disk must not end the trial."""
        head, data = data[: self._room], data[self._room :]
        if head:
            self._room -= len(head)
            self._put(head)
            if not self._room:
                self._put(b"\n[raytrainer: the log is full; what comes now is kept as far as it fits]\n")
        if data:
            self._tail.append(data)
            self._tail_bytes += len(data)
            while self._tail_bytes - len(self._tail[0]) >= self._max_bytes // 2:
                gone = self._tail.popleft()
                self._tail_bytes -= len(gone)
                self._left_out += len(gone)

    def close(self) -> None:
        if self._left_out:
            self._put(f"[raytrainer: {self._left_out:,} bytes left out here]\n".encode())
        self._put(b"".join(self._tail))
        self._file.close()

    def _put(self, data: bytes) -> None:
        with suppress(OSError):
            while data:
                data = data[self._file.write(data) :]


class Records:
    """Metrics in what a trial prints (lines that are JSON objects) and in its metrics file."""

    def __init__(self, path: Path):
        self._path = path
        # An earlier attempt's records were taken in by then.
        self._offset = path.stat().st_size if path.exists() else 0
        self._line = bytearray()

    def printed(self, data: bytes) -> list[dict[str, Any]]:
        """The records in the lines that are whole by now."""
        self._line += data
        *lines, rest = self._line.split(b"\n")
        self._line = bytearray(rest) if len(rest) <= MAX_RECORD_BYTES else bytearray()
        return [record for line in lines if (record := _record(line))]

    def written(self) -> list[dict[str, Any]]:
        """The new whole lines of the file."""
        try:
            if self._path.stat().st_size <= self._offset:
                return []
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data.rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        return [record for line in whole.split(b"\n") if (record := _record(line))]


def _record(line: bytes) -> dict[str, Any] | None:
    line = line.strip()
    if not line.startswith(b"{") or not line.endswith(b"}"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class TrialProcess:
    """A running trial; `ended` once all that it started is gone and its output is taken in."""

    def __init__(self, start: TrialStart):
        self.start = start
        self.killed_for: str | None = None
        self.peak_gib = 0.0
        self.rss_gib = 0.0
        self.records: list[dict[str, Any]] = []
        # When each of these came, in seconds since the start.
        self.times_s: list[float] = []
        Path(start.trial_dir).mkdir(parents=True, exist_ok=True)
        self._log = BoundedLog(Path(start.trial_dir) / "stdout.log", start.log_bytes)
        self._reader = Records(Path(start.metrics_file))
        self._tail = bytearray()
        self._pipe, theirs = os.pipe()
        os.set_blocking(self._pipe, False)
        self._began_s = time.monotonic()
        self._over_s: float | None = None
        self._kill_at_s: float | None = None
        try:
            self.process = ScriptProcess(
                list(start.command), start.environment, start.directory, theirs, theirs
            )
        finally:
            os.close(theirs)
        self._pipe_open = True

    @property
    def pipe(self) -> int | None:
        """Of its output; None once that has ended."""
        return self._pipe if self._pipe_open else None

    @property
    def supervisor_pid(self) -> int:
        """All of its processes are below this one."""
        return self.process.supervisor_pid

    def read_output(self) -> bool:
        """Take in what has come; False when there is nothing more."""
        try:
            data = os.read(self._pipe, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe()
            return False
        self._log.write(data)
        self._tail += data
        del self._tail[:-TAIL_BYTES]
        self._keep(self._reader.printed(data))
        return True

    def _keep(self, records: list[dict[str, Any]]) -> None:
        self.records += records
        self.times_s += [self.time_s] * len(records)

    def take_records(self) -> dict[str, list]:
        """The records since the last call, as "records" and "times_s"."""
        taken = {"records": self.records, "times_s": self.times_s}
        self.records, self.times_s = [], []
        return taken

    def _close_pipe(self) -> None:
        if self._pipe_open:
            self._pipe_open = False
            os.close(self._pipe)

    def look(self) -> None:
        """Metrics from its file; its time-out and the end of a grace."""
        self._keep(self._reader.written())
        now_s = time.monotonic()
        if (
            self.killed_for is None
            and self.start.timeout_s is not None
            and self.time_s >= self.start.timeout_s
        ):
            self.end("timeout", signal.SIGKILL)
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self.process.send_signal(signal.SIGKILL)
            self._kill_at_s = None

    def measured(self, rss_gib: float) -> None:
        """The size of all its processes; above its cap it is ended."""
        self.rss_gib = rss_gib
        self.peak_gib = max(self.peak_gib, rss_gib)
        if rss_gib > self.start.rss_cap_gib and self.killed_for is None:
            self.end("memory_cap", signal.SIGKILL)

    def end(self, reason: str, number: int, grace_s: float | None = None) -> None:
        """Send the signal; after grace_s, kill. A later reason changes nothing, a later signal is sent."""
        self.killed_for = self.killed_for or reason
        if grace_s is not None:
            self._kill_at_s = time.monotonic() + grace_s
        self.process.send_signal(number)

    @property
    def time_s(self) -> float:
        return (self._over_s or time.monotonic()) - self._began_s

    @property
    def left_s(self) -> float | None:
        """Until `look` has something to do because of the time."""
        ends = [] if self._kill_at_s is None else [self._kill_at_s]
        if self.start.timeout_s is not None and self.killed_for is None:
            ends.append(self._began_s + self.start.timeout_s)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def has_ended(self) -> bool:
        if self.process.returncode is None:
            return False
        # Whoever could write is gone: what is left is in the pipe.
        while self._pipe_open and self.read_output():
            pass
        self._close_pipe()
        self._keep(self._reader.written())
        self._over_s = self._over_s or time.monotonic()
        return True

    @property
    def tail(self) -> str:
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        """End what still runs, and let go of everything."""
        self.process.close()
        self._close_pipe()
        self._log.close()
