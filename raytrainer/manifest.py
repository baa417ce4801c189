"""Which checkpoints a run directory holds, from their manifests alone; loads no torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from raytrainer.errors import warn
from raytrainer.storage import Storage

FORMAT = 1
FOLDER = "checkpoints"
MODEL_FILE, TRAINING_FILE, MANIFEST = "model.pt", "training.pt", "manifest.json"


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint: `name` is its folder under checkpoints/."""

    name: str
    step: int
    epoch: int
    files: dict[str, dict[str, Any]]
    meaning: dict[str, Any]
    metrics: dict[str, float]


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def read_info(storage: Storage, folder: str) -> CheckpointInfo | None:
    """The manifest of the checkpoint in `folder`, or None where there is no valid one."""
    name = folder.rstrip("/").rsplit("/", 1)[-1]
    path = f"{folder}/{MANIFEST}" if folder else MANIFEST
    if not storage.exists(path):
        return None
    try:
        manifest = json.loads(storage.read(path))
        if manifest["format"] != FORMAT:
            warn(f"checkpoint {name} has format {manifest['format']}, not {FORMAT}")
            return None
        return CheckpointInfo(
            name, *(manifest[key] for key in ("step", "epoch", "files", "meaning", "metrics"))
        )
    except (ValueError, KeyError, TypeError):
        return None


def list_checkpoints(storage: Storage) -> list[CheckpointInfo]:
    """Every committed checkpoint of a run directory, oldest first."""
    names = [name for name in storage.list(FOLDER) if re.fullmatch(r"step_\d{8,}", name)]
    infos = (read_info(storage, f"{FOLDER}/{name}") for name in names)
    return sorted((info for info in infos if info), key=lambda info: info.step)


def choose_best(infos: list[CheckpointInfo], monitor: str | None, mode: str) -> CheckpointInfo | None:
    """The checkpoint with the best value of `monitor` (the earlier of equals); None where none has it."""
    scored = [info for info in infos if monitor in info.metrics]
    if not scored:
        return None
    sign = 1 if mode == "max" else -1
    return max(scored, key=lambda info: (sign * info.metrics[monitor], -info.step))


def unreadable_checkpoints(storage: Storage, readable: list[CheckpointInfo]) -> list[str]:
    """Names of those that have a manifest which says nothing: damaged, or another format's."""
    known = {info.name for info in readable}
    names = [name for name in storage.list(FOLDER) if name not in known]
    return [name for name in names if storage.exists(f"{FOLDER}/{name}/{MANIFEST}")]
