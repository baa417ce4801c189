"""The last finished step, where a kill cannot take it: eight bytes of a file mapped into memory.

What a resume loses is this step less the one that it resumes from. On an object store there is no such file,
and what was lost is not known.
"""

from __future__ import annotations

import mmap
import os
import struct

from raytrainer.storage import Storage

_FORMAT = struct.Struct("<q")
_FILE = "step"


class StepMark:
    """Written by rank 0 after each step, at the cost of a store to memory."""

    def __init__(self, storage: Storage):
        self._memory: mmap.mmap | None = None
        if storage.is_remote:
            return
        descriptor = os.open(storage.path(_FILE), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, _FORMAT.size)
            self._memory = mmap.mmap(descriptor, _FORMAT.size)
        finally:
            os.close(descriptor)

    def set(self, step: int) -> None:
        if self._memory is not None:
            _FORMAT.pack_into(self._memory, 0, step)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def mark_step(storage: Storage, step: int) -> None:
    """Says that `step` is the last finished one, where no rank is training."""
    if not storage.is_remote:
        storage.write(_FILE, _FORMAT.pack(step))


def last_marked_step(storage: Storage) -> int | None:
    """The last step that an earlier attempt finished; None where that is not known."""
    if storage.is_remote or not storage.exists(_FILE):
        return None
    content = storage.read(_FILE)
    return _FORMAT.unpack(content)[0] if len(content) == _FORMAT.size else None
