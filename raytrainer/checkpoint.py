"""Checkpoints: a copy of the state taken between steps, written off the training path, committed by a
manifest.

checkpoints/step_00000120/ holds model.pt, training.pt and manifest.json. The manifest (names, sizes,
checksums) is written last; without a valid one the checkpoint does not exist. This needs neither rename nor
append, and so holds on object stores too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch

from raytrainer.errors import CheckpointError, StorageError, warn
from raytrainer.ledger_files import LedgerLine, write_lines
from raytrainer.manifest import (
    FOLDER,
    FORMAT,
    MANIFEST,
    MODEL_FILE,
    TRAINING_FILE,
    CheckpointInfo,
    choose_best,
    folder_name,
    list_checkpoints,
    read_info,
    unreadable_checkpoints,
)
from raytrainer.rundir import RunDirectory
from raytrainer.storage import Storage, open_storage, patiently


@dataclass(frozen=True)
class Snapshot:
    """The state after a finished step, in host memory of its own.

    model: the model's state dict; training: optimizers, schedules, scaler, EMA, position ...;
    meaning: what the config must still say for this to be continued; metrics: the last of each; ledger: what
    the steps since the checkpoint before consumed.
    """

    step: int
    epoch: int
    model: dict[str, Any]
    training: dict[str, Any]
    meaning: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    ledger: list[LedgerLine] = field(default_factory=list)


def copy_to_host(state: Any) -> Any:
    """The same nesting with every tensor copied to host memory, so that training may go on changing it."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, Mapping):
        return {key: copy_to_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copy_to_host(item) for item in state)
    return state


class _HashingFile:
    """Counts and hashes what torch.save writes through it."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        self._digest.update(content)
        self.num_bytes += memoryview(content).nbytes
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error  # torch.save goes on to hide it behind errors of its own
            raise

    def flush(self) -> None:
        self._file.flush()

    @property
    def entry(self) -> dict[str, Any]:
        return {"bytes": self.num_bytes, "sha256": self._digest.hexdigest()}


def save(run_dir: RunDirectory, snapshot: Snapshot, storage: Storage | None = None) -> CheckpointInfo:
    """Writes and commits one checkpoint; it is durable when this returns. Raises StorageError.

    storage: in place of the run directory's own, for a snapshot.
    """
    storage, name = storage or run_dir.storage, folder_name(snapshot.step)
    folder = f"{FOLDER}/{name}"
    # First of all: a folder that is away, such as a share that is not mounted, must not be made anew.
    run_dir.check_owner()
    storage.delete(f"{folder}/{MANIFEST}")
    files = {}
    for file_name, state in ((MODEL_FILE, snapshot.model), (TRAINING_FILE, snapshot.training)):
        with storage.writing(f"{folder}/{file_name}") as file:
            hashing = _HashingFile(file)
            try:
                torch.save(state, hashing)
            except RuntimeError:
                if hashing.error is not None:
                    raise hashing.error from None
                raise
        files[file_name] = hashing.entry
    write_lines(storage, snapshot.ledger)
    run_dir.check_owner()
    manifest = {
        "format": FORMAT,
        "step": snapshot.step,
        "epoch": snapshot.epoch,
        "files": files,
        "metrics": snapshot.metrics,
        "meaning": snapshot.meaning,
    }
    storage.write(f"{folder}/{MANIFEST}", json.dumps(manifest, indent=2).encode() + b"\n")
    return CheckpointInfo(name, snapshot.step, snapshot.epoch, files, snapshot.meaning, snapshot.metrics)


def load_files(storage: Storage, folder: str, info: CheckpointInfo, names: tuple[str, ...]) -> list[Any]:
    """The content of the named files, checked against the manifest. Raises CheckpointError when damaged."""
    loaded = []
    for name in names:
        path = f"{folder}/{name}" if folder else name
        try:
            with storage.open(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != info.files[name]["sha256"]:
                    raise CheckpointError(
                        f"{storage.path(path)} is damaged: its checksum is not the manifest's"
                    )
                file.seek(0)
                loaded.append(torch.load(file, map_location="cpu", weights_only=True))
        except (StorageError, OSError, KeyError) as error:
            raise CheckpointError(f"{storage.path(path)} cannot be read: {error}") from error
    return loaded


def load_latest(storage: Storage) -> tuple[CheckpointInfo, dict[str, Any], dict[str, Any]] | None:
    """The newest checkpoint that is whole: (info, model state, training state); None where there is none.

    A damaged one is skipped with a warning. Raises CheckpointError when there are some and all are damaged.
    """
    infos = list_checkpoints(storage)
    for name in unreadable_checkpoints(storage, infos):
        warn(f"{storage.path(FOLDER)}/{name}/{MANIFEST} is damaged; going without it")
    for info in reversed(infos):
        try:
            model, training = load_files(storage, f"{FOLDER}/{info.name}", info, (MODEL_FILE, TRAINING_FILE))
        except CheckpointError as error:
            warn(f"{error}; going back to the checkpoint before it")
            continue
        return info, model, training
    if infos:
        raise CheckpointError(
            f"every checkpoint under {storage.path(FOLDER)} is damaged\n"
            "  start over with --fresh, which keeps the old directory"
        )
    return None


def read_weights(address: str) -> dict[str, torch.Tensor]:
    """Model weights from a run directory (its newest checkpoint), a checkpoint folder or a .safetensors file.

    Raises CheckpointError when there is nothing to read or it is damaged.
    """
    storage = open_storage(address)
    if address.endswith(".safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return load(storage.read(""))
        except (StorageError, SafetensorError) as error:
            raise CheckpointError(f"{address} cannot be read: {error}") from error
    info = read_info(storage, "")
    if info is not None:
        return load_files(storage, "", info, (MODEL_FILE,))[0]
    latest = load_latest(storage)
    if latest is None:
        raise CheckpointError(f"{address} is neither a run directory, a checkpoint nor a .safetensors file")
    return latest[1]


class CheckpointWriter:
    """Commits snapshots in a thread of its own, one at a time, and keeps the newest and the best.

    on_commit is called in that thread after a checkpoint has become durable.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        *,
        num_to_keep: int | None,
        monitor: str | None,
        mode: str,
        on_commit: Callable[[CheckpointInfo], None],
    ):
        self._run_dir = run_dir
        self._num_to_keep, self._monitor, self._mode = num_to_keep, monitor, mode
        self._on_commit = on_commit
        self._error: BaseException | None = None
        self._closing, self._closed = threading.Lock(), False
        self._abandoned = threading.Event()
        self._queue: queue.Queue[Snapshot | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def submit(self, snapshot: Snapshot) -> None:
        """Hands over a snapshot; waits while two are under way, which bounds the memory held."""
        self.check()
        self._queue.put(snapshot)

    def check(self) -> None:
        """Raises what stopped the writer, if something did."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Waits until everything handed over is durable; raises what stopped the writer.

        May be called again, and in any thread.
        """
        with self._closing:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
                self._thread.join()
        self.check()

    def close_with(self, snapshot: Snapshot) -> None:
        """Closes, and commits one more in this thread; the training thread may have closed already."""
        self.close()
        self._commit(snapshot)

    def _work(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            if self._error is not None:
                continue  # takes what is handed over, so that nobody waits for a writer that has failed
            try:
                self._commit(snapshot)
            except BaseException as error:  # carried to the training thread, which raises it
                self._error = error

    def _commit(self, snapshot: Snapshot) -> None:
        info = patiently(lambda: self._save(snapshot), self._abandoned.wait)
        self._on_commit(info)
        patiently(self._delete_old, self._abandoned.wait)

    def _save(self, snapshot: Snapshot) -> CheckpointInfo:
        try:
            return save(self._run_dir, snapshot)
        except StorageError:
            with contextlib.suppress(StorageError):  # half a checkpoint would only fill the disk further
                self._run_dir.storage.delete(f"{FOLDER}/{folder_name(snapshot.step)}")
            raise

    def _delete_old(self) -> None:
        if self._num_to_keep is None:
            return
        infos = list_checkpoints(self._run_dir.storage)
        best = choose_best(infos, self._monitor, self._mode)
        for info in infos[: -self._num_to_keep]:
            if best is None or info.name != best.name:
                # The manifest goes first: what is left of a deletion cut short is no checkpoint.
                self._run_dir.storage.delete(f"{FOLDER}/{info.name}/{MANIFEST}")
                self._run_dir.storage.delete(f"{FOLDER}/{info.name}")


class NoWriter:
    """What ranks other than the first save to."""

    def check(self) -> None:
        """Nothing can have failed."""

    def close(self) -> None:
        """Nothing is under way."""


def delete_orphans(run_dir: RunDirectory) -> None:
    """Removes what a killed process left half-written under checkpoints/."""
    storage = run_dir.storage
    for name in storage.list(FOLDER):
        if not storage.exists(f"{FOLDER}/{name}/{MANIFEST}"):
            storage.delete(f"{FOLDER}/{name}")
