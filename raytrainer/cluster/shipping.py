"""How large the folder is that goes along to other machines, and what makes it so."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from dataclasses import dataclass

from raytrainer.errors import UsageError

# Ray refuses more.
MAX_BYTES = 500 * 2**20


@dataclass(frozen=True)
class Parcel:
    """num_bytes and num_files of what goes along; largest: the entries of the folder that hold the most,
    (name, bytes)."""

    num_bytes: int
    num_files: int
    largest: tuple[tuple[str, int], ...]


def measure(directory: str, excludes: Sequence[str]) -> Parcel:
    """What is in `directory` but for `excludes`: names at any depth, or paths from the folder ("/runs")."""
    sizes: dict[str, int] = {}
    num_files = 0
    for root, folders, files in os.walk(directory):
        inside = os.path.relpath(root, directory)
        folders[:] = [name for name in folders if not _is_excluded(inside, name, excludes)]
        for name in files:
            if _is_excluded(inside, name, excludes):
                continue
            try:
                size = os.lstat(os.path.join(root, name)).st_size
            except OSError:
                # Gone in the meantime.
                continue
            num_files += 1
            top = os.path.normpath(os.path.join(inside, name)).split(os.sep)
            entry = os.sep.join(top[:2])
            sizes[entry] = sizes.get(entry, 0) + size
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    return Parcel(sum(sizes.values()), num_files, tuple(largest))


def _is_excluded(inside: str, name: str, excludes: Sequence[str]) -> bool:
    path = os.path.normpath(os.path.join("/", inside, name))
    return any(
        fnmatch.fnmatch(path, pattern)
        if pattern.startswith("/")
        else fnmatch.fnmatch(name, pattern.rstrip("/"))
        for pattern in excludes
    )


def describe(parcel: Parcel, directory: str, excludes: Sequence[str]) -> str:
    """A sentence for the user, before the upload."""
    left_out = ", ".join(pattern.lstrip("/") for pattern in excludes)
    return (
        f"{directory} goes along to the other machines: {parcel.num_files} files, "
        f"{_in_mib(parcel.num_bytes)}; left out: {left_out}"
    )


def check(parcel: Parcel, directory: str) -> None:
    """Raises UsageError for more than Ray carries, with the largest paths."""
    if parcel.num_bytes <= MAX_BYTES:
        return
    largest = "\n".join(f"    {_in_mib(size):>10}  {name}" for name, size in parcel.largest)
    raise UsageError(
        f"{directory} is too large to go along to the other machines: {_in_mib(parcel.num_bytes)}, "
        f"at most {_in_mib(MAX_BYTES)}\n{largest}\n"
        "  leave paths out (--exclude data, or ray.runtime_env.excludes: [data]), start the command in a\n"
        "  smaller folder, or name one that all machines share in ray.runtime_env.working_dir"
    )


def _in_mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
