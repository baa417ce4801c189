"""Files of a run, on a local or shared file system or behind an fsspec address (s3://, gs://, memory://).

A file that `write` returned from is whole and durable: a reader sees the old content or the new, never a
part.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from raytrainer.errors import StorageError, UsageError, warn

T = TypeVar("T")

# A storage that is away comes back within minutes, or not: two of them in all.
RETRY_WAITS_S = (1, 2, 4, 8, 15, 30, 30, 30)
# Waiting mends none of these.
_HOPELESS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def may_pass(error: StorageError) -> bool:
    """Whether the storage may be there again after a while."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in _HOPELESS


def patiently(action: Callable[[], T], wait: Callable[[float], object] = time.sleep) -> T:
    """Returns action(); tries again for two minutes while the storage is away, such as a network share.

    wait: called with the seconds until the next try. Raises StorageError once it is hopeless: a full disk, a
    missing right, too long.
    """
    for wait_s in RETRY_WAITS_S:
        try:
            return action()
        except StorageError as error:
            if not may_pass(error):
                raise
            warn(f"{error}; trying again in {wait_s} s")
        wait(wait_s)
    return action()


def open_storage(root: str) -> Storage:
    """The storage at `root`: a path or an address with a scheme. Nothing is created yet."""
    if "://" in root and not root.startswith("file://"):
        return RemoteStorage(root)
    return Storage(str(Path(root.removeprefix("file://")).absolute()))


@contextlib.contextmanager
def _explained(action: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {action} {path}: {error.strerror or error}") from error


class Storage:
    """Files under a folder of a local or shared file system; paths are relative, with slashes."""

    is_remote = False

    def __init__(self, root: str):
        self.root = root

    def path(self, name: str = "") -> str:
        return os.path.join(self.root, name) if name else self.root

    def make_folder(self, name: str = "") -> None:
        with _explained("create", self.path(name)):
            os.makedirs(self.path(name), exist_ok=True)

    def exists(self, name: str = "") -> bool:
        """Raises StorageError where that cannot be told: what a share that is away holds is not gone."""
        with _explained("look for", self.path(name)):
            try:
                os.stat(self.path(name))
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def list(self, name: str = "") -> list[str]:
        """Names of the direct children, sorted; empty where there is no such folder."""
        with _explained("list", self.path(name)):
            try:
                return sorted(os.listdir(self.path(name)))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def read(self, name: str) -> bytes:
        with _explained("read", self.path(name)), open(self.path(name), "rb") as file:
            return file.read()

    def open(self, name: str) -> BinaryIO:
        with _explained("read", self.path(name)):
            return open(self.path(name), "rb")

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """A binary file to write; it takes its name, durably, when the block ends without an error."""
        path, part = self.path(name), self.path(name) + f".part-{os.getpid()}"
        with _explained("write", path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                with open(part, "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)
                self._sync_folder(os.path.dirname(path))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise

    def write(self, name: str, content: bytes) -> None:
        with self.writing(name) as file:
            file.write(content)

    def append(self, name: str, content: bytes) -> None:
        """Adds whole lines at the end; not synced (see `sync`)."""
        with _explained("write", self.path(name)), open(self.path(name), "ab") as file:
            file.write(content)

    def delete(self, name: str) -> None:
        """Removes a file or a whole folder; no error where there is none."""
        path = self.path(name)
        with _explained("delete", path):
            try:
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
            except FileNotFoundError:
                return

    def rename(self, name: str, new_name: str) -> None:
        with _explained("rename", self.path(name)):
            os.rename(self.path(name), self.path(new_name))

    @staticmethod
    def _sync_folder(path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class RemoteStorage(Storage):
    """Objects under an fsspec address. An object store has no rename and no append: see `append`."""

    is_remote = True

    def __init__(self, root: str):
        import fsspec

        super().__init__(root.rstrip("/"))
        try:
            self._fs, self._base = fsspec.core.url_to_fs(self.root)
        except (ImportError, ValueError) as error:
            raise UsageError(f"storage_path {root}: {error}") from error

    def path(self, name: str = "") -> str:
        return f"{self.root}/{name}" if name else self.root

    def _key(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def make_folder(self, name: str = "") -> None:
        """Object stores have no folders."""

    def exists(self, name: str = "") -> bool:
        return self._fs.exists(self._key(name))

    def list(self, name: str = "") -> list[str]:
        self._fs.invalidate_cache()
        try:
            children = self._fs.ls(self._key(name), detail=False)
        except FileNotFoundError:
            return []
        return sorted(child.rstrip("/").rsplit("/", 1)[-1] for child in children)

    def read(self, name: str) -> bytes:
        with _explained("read", self.path(name)):
            return self._fs.cat_file(self._key(name))

    def open(self, name: str) -> BinaryIO:
        with _explained("read", self.path(name)):
            return self._fs.open(self._key(name), "rb")

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        with _explained("write", self.path(name)):
            self._fs.makedirs(self._key(name).rsplit("/", 1)[0], exist_ok=True)
            with self._fs.open(self._key(name), "wb") as file:
                yield file

    def append(self, name: str, content: bytes) -> None:
        """Uploads `content` as one more part beside `name`, in order of time: metrics.jsonl.part-..."""
        self.write(f"{name}.part-{time.time_ns():020d}", content)

    def delete(self, name: str) -> None:
        with _explained("delete", self.path(name)):
            try:
                self._fs.rm(self._key(name), recursive=True)
            except FileNotFoundError:
                return

    def rename(self, name: str, new_name: str) -> None:
        with _explained("rename", self.path(name)):
            self._fs.mv(self._key(name), self._key(new_name), recursive=True)


def read_lines(storage: Storage, name: str) -> list[bytes]:
    """All lines of a file that `append` wrote, whether it lies whole or in parts."""
    folder, _, base = name.rpartition("/")
    prefix = f"{folder}/" if folder else ""
    names = [child for child in storage.list(folder) if child == base or child.startswith(f"{base}.part-")]
    return [line for child in names for line in storage.read(prefix + child).splitlines() if line.strip()]
