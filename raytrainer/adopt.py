"""Takes a committed checkpoint from elsewhere into a run directory, which then goes on from it as its own.

Copies files and compares checksums; loads no torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raytrainer import ledger_files
from raytrainer.errors import CheckpointError, ResumeError, StorageError, UsageError
from raytrainer.manifest import FOLDER, MANIFEST, CheckpointInfo, folder_name, list_checkpoints, read_info
from raytrainer.resume import check_same_meaning, known_to_ranks, with_micro_batch_size_of
from raytrainer.step_mark import mark_step
from raytrainer.storage import Storage, open_storage

if TYPE_CHECKING:
    from raytrainer.config import Config
    from raytrainer.rundir import RunDirectory

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """A checkpoint to start from: `folder` ("" or checkpoints/step_...) under `storage`.

    run: the run directory that it belongs to, None where it lies alone.
    """

    storage: Storage
    folder: str
    info: CheckpointInfo
    run: Storage | None

    @property
    def address(self) -> str:
        return self.storage.path(self.folder)


def find_source(address: str) -> Source:
    """The checkpoint at `address`: a run directory (its newest one) or a checkpoint's own folder.

    Raises UsageError where there is none.
    """
    storage = open_storage(address)
    info = read_info(storage, "")
    if info is not None:
        info = replace(info, name=folder_name(info.step))
        parts = storage.root.rstrip("/").rsplit("/", 2)
        of_a_run = len(parts) == 3 and parts[1] == FOLDER
        return Source(storage, "", info, open_storage(parts[0]) if of_a_run else None)
    infos = list_checkpoints(storage)
    if not infos:
        raise UsageError(
            f"--resume-from {address}\n"
            "  there is no committed checkpoint: neither a run directory with one nor a checkpoint's folder\n"
            "  write a run directory (runs/mnist) or one of its checkpoints "
            "(runs/mnist/checkpoints/step_00000120)"
        )
    return Source(storage, f"{FOLDER}/{infos[-1].name}", infos[-1], storage)


def checked_source(address: str, config: Config) -> Source:
    """The checkpoint at `address`, which a new run of `config` can begin from; nothing is written yet.

    Raises ResumeError, with the difference, when the checkpoint means something else than `config`,
    UsageError when there is no checkpoint at `address` or it is this run's own.
    """
    source = find_source(address)
    own = open_storage(open_storage(config.storage_path).path(config.name)).root.rstrip("/")
    if source.run is not None and source.run.root.rstrip("/") == own:
        raise UsageError(
            f"--resume-from {address}\n"
            f"  this run's own directory is {own}: it resumes from its newest checkpoint by itself\n"
            "  leave --resume-from out; to begin anew from an older one, give this run another name: name=..."
        )
    before = source.info.meaning
    now = with_micro_batch_size_of(config, before).meaning()
    check_same_meaning(
        source.address,
        before,
        {**now, **known_to_ranks(before)},
        "a new run can start from it only with the same values; for its weights alone, write init_from",
    )
    return source


def start_from(source: Source, run_dir: RunDirectory) -> CheckpointInfo | None:
    """Makes the checkpoint the beginning of `run_dir`; None where that has checkpoints already.

    Raises CheckpointError when it is damaged.
    """
    if list_checkpoints(run_dir.storage):
        return None
    adopt(source, run_dir)
    mark_step(run_dir.storage, source.info.step)
    if source.run is not None:
        ledger_files.copy_until(source.run, run_dir.storage, source.info.step)
    run_dir.event("branched", step=source.info.step, epoch=source.info.epoch, source=source.address)
    return source.info


def adopt(source: Source, run_dir: RunDirectory) -> None:
    """Copies the checkpoint into `run_dir` and commits it there. Raises CheckpointError if it is damaged."""
    target = f"{FOLDER}/{source.info.name}"
    for name, entry in source.info.files.items():
        path = f"{source.folder}/{name}" if source.folder else name
        digest = hashlib.sha256()
        try:
            with source.storage.open(path) as file, run_dir.storage.writing(f"{target}/{name}") as copy:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    copy.write(chunk)
        except (StorageError, OSError) as error:
            raise CheckpointError(f"{source.storage.path(path)} cannot be copied: {error}") from error
        if digest.hexdigest() != entry["sha256"]:
            run_dir.storage.delete(target)
            raise CheckpointError(
                f"{source.storage.path(path)} is damaged: its checksum is not the manifest's"
            )
    if not run_dir.owns():
        raise ResumeError(f"{run_dir.root} was taken over by a later run: nothing more is written to it")
    manifest = f"{source.folder}/{MANIFEST}" if source.folder else MANIFEST
    content = source.storage.read(manifest)
    json.loads(content)
    run_dir.storage.write(f"{target}/{MANIFEST}", content)
