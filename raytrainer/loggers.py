"""Metric records to metrics.jsonl, TensorBoard and whoever observes the run, from a background thread.

The training thread only puts a record on a queue. A value may be a tensor still being computed on a device:
the background thread is the one that waits for it. What a kill can lose is what came in the last second.
"""

from __future__ import annotations

import json
import math
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from raytrainer.rundir import RunDirectory
from raytrainer.storage import patiently, read_lines

Record = dict[str, Any]
_GATHER_INTERVAL_S = 0.02
_FLUSH_INTERVAL_S = 1.0
_UPLOAD_INTERVAL_S = 60.0
_METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """Takes plain records one by one; `flush` makes what came so far visible to readers."""

    def write(self, record: Record) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class JsonlSink:
    """One JSON object a line in metrics.jsonl; NaN and infinity are written as null."""

    def __init__(self, run_dir: RunDirectory):
        self._storage = run_dir.storage
        self._lines: list[bytes] = []

    def write(self, record: Record) -> None:
        self._lines.append(json.dumps(_finite(record)).encode() + b"\n")

    def flush(self) -> None:
        if self._lines:
            patiently(lambda: self._storage.append(_METRICS_FILE, b"".join(self._lines)))
            self._lines.clear()

    def close(self) -> None:
        self.flush()


class TensorBoardSink:
    """Scalars for TensorBoard under tb/; the package is imported with the first record, in the background
    thread.

    step: where the run stands; TensorBoard then hides what a lost attempt wrote after it. For an object store
    the file is written here and uploaded now and then, since an object cannot be added to.
    """

    def __init__(self, run_dir: RunDirectory, step: int = 0):
        self._storage, self._step = run_dir.storage, step
        self._temporary = tempfile.TemporaryDirectory() if self._storage.is_remote else None
        self._folder = self._temporary.name if self._temporary else self._storage.path("tb")
        self._writer: Any = None
        self._upload_at = time.monotonic() + _UPLOAD_INTERVAL_S

    def write(self, record: Record) -> None:
        from tensorboardX import SummaryWriter
        from tensorboardX.proto.summary_pb2 import Summary

        if self._writer is None:
            self._writer = SummaryWriter(self._folder, purge_step=self._step + 1, flush_secs=10)
        values = [
            Summary.Value(tag=key if "/" in key else f"train/{key}", simple_value=value)
            for key, value in record.items()
            if isinstance(value, int | float) and key not in ("step", "time_s", "total_steps")
        ]
        # One event for the whole record: an event for each value costs several times as much.
        self._writer.file_writer.add_summary(Summary(value=values), record["step"])

    def flush(self) -> None:
        """TensorBoard's own writer flushes every ten seconds."""
        if self._temporary and time.monotonic() >= self._upload_at:
            self._upload()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._temporary:
            self._upload()
            self._temporary.cleanup()

    def _upload(self) -> None:
        for file in Path(self._folder).iterdir():
            self._storage.write(f"tb/{file.name}", file.read_bytes())
        self._upload_at = time.monotonic() + _UPLOAD_INTERVAL_S


class ObserverSink:
    """Hands each record to a function: the console of this process, or the way to the driver's."""

    def __init__(self, observer: Callable[[Record], None]):
        self._observer = observer

    def write(self, record: Record) -> None:
        self._observer(record)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The observer belongs to someone else."""


class Logger:
    """Takes records from the training thread and writes them to all sinks in a thread of its own."""

    def __init__(self, sinks: list[Sink]):
        self._sinks = sinks
        self._error: BaseException | None = None
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="logger", daemon=True)
        self._thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Queues one record; 0-d tensors among the values must not be changed afterwards."""
        self._queue.put(dict(record))

    def check(self) -> None:
        """Raises what a sink failed with, if one did."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Waits until everything is written; raises what a sink failed with."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()
        self.check()

    def _work(self) -> None:
        try:
            self._write_until_closed()
        except BaseException as error:  # carried to the training thread, which raises it
            self._error = error

    def _write_until_closed(self) -> None:
        flush_at: float | None = None
        while True:
            records = self._next_records(flush_at)
            for record in records:
                if record is not None:
                    plain = {key: _plain(value) for key, value in record.items()}
                    for sink in self._sinks:
                        sink.write(plain)
            if None in records:
                break
            if records and flush_at is None:
                flush_at = time.monotonic() + _FLUSH_INTERVAL_S
            if flush_at is not None and time.monotonic() >= flush_at:
                for sink in self._sinks:
                    sink.flush()
                flush_at = None
        for sink in self._sinks:
            sink.close()

    def _next_records(self, flush_at: float | None) -> list[Record | None]:
        """What has come, gathered for a moment; None is the end. Empty where it is time to flush first."""
        records: list[Record | None] = []
        try:
            records.append(self._queue.get(timeout=flush_at and max(0.0, flush_at - time.monotonic())))
            # A thread that wakes for each record costs a short step more than writing the record does.
            self._closing.wait(_GATHER_INTERVAL_S)
            while True:
                records.append(self._queue.get_nowait())
        except queue.Empty:
            return records


class NoLogger:
    """What ranks other than the first log to."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Drops it."""

    def check(self) -> None:
        """Nothing can have failed."""

    def close(self) -> None:
        """Nothing is open."""


def forget_after(run_dir: RunDirectory, step: int) -> None:
    """Takes out of metrics.jsonl what a lost attempt wrote after `step`, the step that the run
    resumes from."""
    storage = run_dir.storage
    lines = read_lines(storage, _METRICS_FILE)
    kept = [line for line in lines if _step_of(line) <= step]
    if len(kept) < len(lines):
        for name in storage.list():
            if name.startswith(f"{_METRICS_FILE}.part-"):
                storage.delete(name)
        storage.write(_METRICS_FILE, b"".join(line + b"\n" for line in kept))


def _step_of(line: bytes) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return math.inf  # the torn last line of a killed process


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _finite(record: Record) -> Record:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
