"""Snapshots: beside the checkpoints, the state leaves the process for memory of its machine.

They serve where every rank is lost at once, so that none is left to save the last finished step. The folder
belongs to the process that the user started, which takes the newest snapshot into the run directory before a
new start and removes the folder at the end. How often: so that all of it costs at most a small share of the
run, as measured in it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from raytrainer import ledger_files
from raytrainer.errors import StorageError
from raytrainer.manifest import FOLDER, MANIFEST, list_checkpoints
from raytrainer.rundir import RUN_ID_FILE
from raytrainer.storage import Storage, may_pass

if TYPE_CHECKING:
    from raytrainer.checkpoint import Snapshot
    from raytrainer.rundir import RunDirectory

# Of the time, for taking and writing snapshots.
MAX_SHARE = 0.01
# What a snapshot costs is not known before the first, which waits this long.
FIRST_AFTER_S = 2.0


def snapshot_folder(root: str) -> str:
    """Where the snapshots of the run directory `root` are on this machine: in memory if it has /dev/shm."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    user = os.getuid() if hasattr(os, "getuid") else 0
    return str(Path(base, f"raytrainer-{user}-{hashlib.sha256(root.encode()).hexdigest()[:16]}"))


class SnapshotPace:
    """When the next snapshot is due. steps: every so many; None: as often as MAX_SHARE of the time allows."""

    def __init__(self, steps: int | None, now_s: float):
        self._steps = steps
        self._due_s = now_s + FIRST_AFTER_S

    def is_due(self, step: int, now_s: float) -> bool:
        return step % self._steps == 0 if self._steps else now_s >= self._due_s

    def paid(self, cost_s: float, now_s: float) -> float:
        """Notes what a snapshot cost; returns the seconds to the next one (0: counted in steps)."""
        wait_s = cost_s / MAX_SHARE
        self._due_s = now_s + wait_s
        return 0.0 if self._steps else wait_s


class SnapshotWriter:
    """Writes snapshots in a thread of its own, one at a time, and keeps the newest.

    on_pace is called in that thread with (seconds between two, seconds that one costs), at first and when
    it has changed much. A folder that is full ends the snapshots with a warning, not the run.
    """

    def __init__(
        self,
        folder: str,
        run_dir: RunDirectory,
        steps: int | None,
        on_pace: Callable[[float, float], None],
    ):
        self._storage = Storage(folder)
        self._run_dir = run_dir
        self._on_pace = on_pace
        self._told_s: float | None = None
        self._pace = SnapshotPace(steps, time.monotonic())
        self._failed = False
        self._thread: threading.Thread | None = None

    def take_if_due(self, step: int, take: Callable[[], Snapshot | None]) -> None:
        """Takes a snapshot of `step`, the finished one, when it is time and the one before is written."""
        if self._failed or not self._pace.is_due(step, time.monotonic()):
            return
        if self._thread is not None and self._thread.is_alive():
            return
        began_s = time.perf_counter()
        snapshot = take()
        if snapshot is None:
            return
        taken_s = time.perf_counter() - began_s
        # A thread for each: a snapshot is rare, and nothing has to be ended when the run does.
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, taken_s), name="snapshot-writer", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, snapshot: Snapshot, taken_s: float) -> None:
        from raytrainer import checkpoint

        written = False
        try:
            self._storage.write(RUN_ID_FILE, self._run_dir.run_id.encode())
            info = checkpoint.save(self._run_dir, snapshot, self._storage)
            for old in list_checkpoints(self._storage):
                if old.step != info.step:
                    self._storage.delete(f"{FOLDER}/{old.name}/{MANIFEST}")
                    self._storage.delete(f"{FOLDER}/{old.name}")
            ledger_files.keep_newest(self._storage)
            written = True
        except StorageError as error:
            # While the run directory is away, whose owner is asked for, the next one may still be written.
            if not may_pass(error):
                self._failed = True
                warnings.warn(f"{error}; no more snapshots: a crash goes back to a checkpoint", stacklevel=2)
        cost_s = taken_s + time.thread_time()
        every_s = self._pace.paid(cost_s, time.monotonic())
        if written and (self._told_s is None or not 0.5 <= (every_s + 1) / (self._told_s + 1) <= 2):
            self._told_s = every_s
            self._on_pace(every_s, cost_s)


def recover(folder: str, run_dir: RunDirectory) -> int | None:
    """Makes the newest snapshot a checkpoint of `run_dir` if it is newer than all of those; returns its step.

    Only while no rank is running. A snapshot of an earlier run, whose directory of the same name was deleted,
    is left alone. Raises StorageError.
    """
    from raytrainer.adopt import Source, adopt

    storage = Storage(folder)
    infos = list_checkpoints(storage) if _is_of(run_dir, storage) else []
    committed = run_dir.while_there(lambda: list_checkpoints(run_dir.storage))
    committed_step = committed[-1].step if committed else 0
    if not infos or infos[-1].step <= committed_step:
        return None
    info = infos[-1]
    ledger_files.delete_after(run_dir.storage, committed_step)
    lines = [line for line in ledger_files.read_ledger(storage, info.step) if line.step > committed_step]
    ledger_files.write_lines(run_dir.storage, lines)
    adopt(Source(storage, f"{FOLDER}/{info.name}", info, None), run_dir)
    return info.step


def _is_of(run_dir: RunDirectory, snapshots: Storage) -> bool:
    if not snapshots.exists(RUN_ID_FILE):
        return False
    return snapshots.read(RUN_ID_FILE).decode() == run_dir.while_there(lambda: run_dir.run_id)
