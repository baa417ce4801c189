"""The run directory <storage_path>/<name>: one live run at a time, its config, events and result.

The process that was started by the user opens it; rank 0 attaches to it and writes metrics and checkpoints.
Every opening writes a new token, and whoever holds an older one may commit nothing more: a rank that
outlived its driver cannot write into the run that came after it.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

from raytrainer.config import importable
from raytrainer.errors import ResumeError, StorageError
from raytrainer.result import Result
from raytrainer.storage import Storage, open_storage, patiently, read_lines

if TYPE_CHECKING:
    from raytrainer.config import Config

T = TypeVar("T")

CONFIG_FILE, ENVIRONMENT_FILE, RESULT_FILE = "config.yaml", "env.json", "result.json"
EVENTS_FILE = "events.jsonl"
RUN_ID_FILE = "run_id"
_PACKAGES = ("raytrainer", "torch", "torchvision", "ray", "numpy", "torchmetrics", "pydantic", "omegaconf")


class RunDirectory:
    """The files of one run, for the process that holds the right to write them."""

    def __init__(self, root: str, token: str, *, lock: int | None = None, last_result: Result | None = None):
        self.storage: Storage = open_storage(root)
        self.token = token
        self.last_result = last_result
        self._lock = lock

    @property
    def root(self) -> str:
        return self.storage.root

    @classmethod
    def open(cls, config: Config, *, fresh: bool = False) -> RunDirectory:
        """Takes the run directory of `config`, creating it where there is none.

        fresh: an old directory is moved aside, to <name>.old-<time>, and an empty one begins.
        Raises ResumeError when another live run holds it, StorageError when it cannot be written.
        """
        base = open_storage(config.storage_path)
        try:
            base.make_folder()
        except StorageError as error:
            raise StorageError(
                f"{error}\n  storage_path must be a folder that this process may write"
            ) from error
        if fresh and base.exists(config.name):
            aside = cls._take_lock(open_storage(base.path(config.name)))
            base.rename(
                config.name, f"{config.name}.old-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            )
            _release(aside)
        storage = open_storage(base.path(config.name))
        storage.make_folder()
        lock = cls._take_lock(storage)
        try:
            token = secrets.token_hex(8)
            storage.write("token", token.encode())
            if not storage.exists(RUN_ID_FILE):
                storage.write(RUN_ID_FILE, secrets.token_hex(8).encode())
            last = storage.read(RESULT_FILE) if storage.exists(RESULT_FILE) else None
            return cls(storage.root, token, lock=lock, last_result=_parse_result(last))
        except BaseException:
            _release(lock)
            raise

    @staticmethod
    def _take_lock(storage: Storage) -> int | None:
        """An exclusive lock that goes with this process; an object store has none, and relies on
        the token."""
        if storage.is_remote:
            return None
        try:
            lock = os.open(storage.path("lock"), os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageError(f"cannot write {storage.path('lock')}: {error.strerror}") from error
        if not _lock_unless_held(lock):
            holder = os.read(lock, 200).decode(errors="replace").strip() or "another process"
            os.close(lock)
            raise ResumeError(
                f"{storage.root} is in use by {holder}\n"
                "  two runs cannot share a run directory; wait for that one, or give this one another name: "
                "name=..."
            )
        _LOCKS.add(lock)
        os.truncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return lock

    def write_description(self, config: Config, command: list[str] | None = None) -> None:
        """config.yaml (secrets left as names) and env.json (versions, host, command) of this attempt.

        The result of an earlier attempt goes: while there is none, the run goes on or was interrupted.
        """
        environment = {**describe_environment(command), "import_paths": importable(config)}
        self.storage.write(CONFIG_FILE, config.stored_yaml().encode())
        self.storage.write(ENVIRONMENT_FILE, json.dumps(environment, indent=2).encode() + b"\n")
        self.storage.delete(RESULT_FILE)

    def owns(self) -> bool:
        """Whether no later run has taken the directory since."""
        return self.storage.read("token").decode() == self.token

    def check_owner(self) -> None:
        """Raises StorageError when a later run has taken the directory, or when it is not there."""
        if not self.owns():
            raise StorageError(f"{self.root} was taken over by a later run: nothing more is written to it")

    @property
    def run_id(self) -> str:
        """The same for all attempts of this run, and another for a later run in a folder of its name."""
        return self.storage.read(RUN_ID_FILE).decode()

    def while_there(self, action: Callable[[], T]) -> T:
        """Returns action(), which reads; tries again for two minutes while the storage is away.

        A share that is away looks like an empty folder: what is not found counts only where the directory is
        there before and after. Raises StorageError.
        """

        def checked() -> T:
            self.check_owner()
            try:
                return action()
            finally:
                self.check_owner()

        return patiently(checked)

    def event(self, event: str, **details: Any) -> dict[str, Any]:
        """Adds a line to events.jsonl and returns it."""
        record = {"event": event, "time_s": round(time.time(), 3), **details}
        line = json.dumps(record).encode() + b"\n"
        patiently(lambda: self.storage.append(EVENTS_FILE, line))
        return record

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in read_lines(self.storage, EVENTS_FILE)]

    def history(self) -> dict[str, Any]:
        """What the events of all attempts say: `world_sizes` in order, and the `lost_steps` in all."""
        begun = [event for event in self.events() if event["event"] in ("started", "resumed")]
        sizes = [event["world_size"] for event in begun]
        changed = [index == 0 or size != sizes[index - 1] for index, size in enumerate(sizes)]
        lost = [event.get("lost_steps", 0) for event in begun]
        return {
            "world_sizes": [size for size, is_new in zip(sizes, changed, strict=True) if is_new],
            "lost_steps": None if None in lost else sum(lost),
        }

    def write_result(self, result: Result) -> None:
        self.storage.write(RESULT_FILE, result.to_json().encode())

    def close(self) -> None:
        if self._lock is not None:
            _release(self._lock)
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock_unless_held(lock: int) -> bool:
    """Takes the lock; False when another run holds it. `is_live` shares it for an instant: that is waited
    for."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            fcntl.flock(lock, fcntl.LOCK_UN)
            time.sleep(0.001)  # no event tells that a lock has become free without taking it


def is_live(root: str) -> bool | None:
    """Whether a process holds the run directory `root` now; None on an object store, which has no locks."""
    storage = open_storage(root)
    if storage.is_remote:
        return None
    try:
        lock = os.open(storage.path("lock"), os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"cannot read {storage.path('lock')}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def take_lock(storage: Storage) -> int | None:
    """Locks a folder for this process, until `release_lock`; None on an object store. Raises ResumeError when
    another process holds it."""
    return RunDirectory._take_lock(storage)


def release_lock(lock: int | None) -> None:
    _release(lock)


_LOCKS: set[int] = set()


def _release(lock: int | None) -> None:
    if lock is not None:
        _LOCKS.discard(lock)
        os.close(lock)


def _release_in_child() -> None:
    """A forked process (a loader worker) must not hold the lock when this one is gone."""
    while _LOCKS:
        os.close(_LOCKS.pop())


os.register_at_fork(after_in_child=_release_in_child)


def _parse_result(content: bytes | None) -> Result | None:
    if content is None:
        return None
    try:
        return Result.from_mapping(json.loads(content))
    except (ValueError, TypeError):
        return None


def read_result(root: str) -> Result | None:
    """The result of the run directory `root`, or None where it has none (yet)."""
    storage = open_storage(root)
    return _parse_result(storage.read(RESULT_FILE)) if storage.exists(RESULT_FILE) else None


def describe_environment(command: list[str] | None = None) -> dict[str, Any]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": command if command is not None else sys.argv,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
    }
