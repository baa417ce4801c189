"""What a run came to: the content of result.json, and what `run` and `Trainer.train` return."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Result:
    """status: finished, failed or stopped; steps and epochs: finished ones since the very beginning of the
    run.

    samples_seen counts the samples of those steps, skipped_samples those of them that could not be loaded
    (on_bad_sample: skip), skipped_updates the steps whose update was left out (on_nan: skip, fp16's scaler);
    lost_steps those that were computed and thrown away (None: not known, on an object store); world_sizes in
    the order in which they were used; metrics has the last
    value of each metric and best the best checkpoint ({"step", "metric", "value", "checkpoint"}) or None.
    weights_sha256 covers the raw weights, never the EMA; state_sha256 optimizers, schedules, scaler, EMA and
    position. target: the config's max_epochs and max_steps, which tell a finished run from one to go on with.
    """

    status: str
    exit_code: int = 0
    steps: int = 0
    epochs: int = 0
    samples_seen: int = 0
    skipped_samples: int = 0
    skipped_updates: int = 0
    world_sizes: list[int] = field(default_factory=list)
    restarts: int = 0
    lost_steps: int | None = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    weights_sha256: str | None = None
    state_sha256: str | None = None
    wall_s: float = 0.0
    time_to_first_step_s: float | None = None
    checkpoint: str | None = None
    target: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    run_dir: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> Result:
        """Ignores keys that a newer version wrote."""
        known = {entry.name for entry in fields(cls)}
        return cls(**{key: value for key, value in mapping.items() if key in known})
