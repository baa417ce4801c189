"""The run directories under a storage path and how each stands, from their files alone, without torch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raytrainer.config.positions import parse_value
from raytrainer.errors import UsageError
from raytrainer.manifest import CheckpointInfo, choose_best, list_checkpoints
from raytrainer.rundir import CONFIG_FILE, EVENTS_FILE, is_live, read_result
from raytrainer.storage import Storage, open_storage, read_lines

_TAIL_BYTES = 65_536


@dataclass(frozen=True)
class RunSummary:
    """How a run stands.

    status: running, finished, failed, stopped, or interrupted (no result, and no process holds it;
    "unfinished" on an object store, where that cannot be told). steps: finished ones. best: metric and value
    of the best checkpoint, or the last evaluation where nothing is monitored. time_s: of the last attempt,
    from its start. last_active_s: Unix time of the last sign of life.
    """

    name: str
    status: str
    steps: int
    best: tuple[str, float] | None
    time_s: float | None
    last_active_s: float | None


def list_runs(storage_path: str) -> list[RunSummary]:
    """The runs under `storage_path`, the latest active first. Raises UsageError without such a folder."""
    base = open_storage(storage_path)
    if not base.is_remote and not base.exists():
        raise UsageError(
            f"{storage_path}: there is no such folder\n"
            "  run directories are under the config's storage_path: raytrainer runs STORAGE_PATH"
        )
    names = [name for name in base.list() if base.exists(f"{name}/{CONFIG_FILE}")]
    summaries = [_summarise(open_storage(base.path(name)), name) for name in names]
    return sorted(summaries, key=lambda run: run.last_active_s or 0.0, reverse=True)


def _summarise(storage: Storage, name: str) -> RunSummary:
    result, live = read_result(storage.root), is_live(storage.root)
    events = _records(read_lines(storage, EVENTS_FILE))
    last = _last_metrics(storage)
    checkpoints = list_checkpoints(storage)
    steps = [record.get("step") or 0 for record in (*events[-1:], last)]  # null: before any checkpoint
    ended = None if result is None else result.status
    status = "running" if live else ended or ("unfinished" if live is None else "interrupted")
    return RunSummary(
        name=name,
        status=status,
        steps=result.steps if ended and not live else max(steps),
        best=_best(storage, checkpoints, last),
        time_s=result.wall_s if result is not None and not live else _span_s(events, last),
        last_active_s=max((record.get("time_s", 0.0) for record in (*events, last)), default=0.0) or None,
    )


def _span_s(events: Sequence[dict[str, Any]], last: dict[str, Any]) -> float | None:
    """From the start of the last attempt to its last sign of life."""
    starts = [event["time_s"] for event in events if event.get("event") in ("started", "resumed")]
    if not starts:
        return None
    return round(max(events[-1]["time_s"], last.get("time_s", 0.0)) - starts[-1], 3)


def _best(
    storage: Storage, checkpoints: list[CheckpointInfo], last: dict[str, Any]
) -> tuple[str, float] | None:
    monitor, mode = _monitored(storage)
    best = choose_best(checkpoints, monitor, mode)
    if best is not None:
        return monitor, best.metrics[monitor]
    metrics = {**(checkpoints[-1].metrics if checkpoints else {}), **last}
    names = sorted(
        (name for name in metrics if name.startswith("eval/")), key=lambda name: name == "eval/loss"
    )
    return (names[0], metrics[names[0]]) if names else None


def _monitored(storage: Storage) -> tuple[str | None, str]:
    try:
        checkpoint = parse_value(storage.read(CONFIG_FILE).decode())["checkpoint"]
        return checkpoint["monitor"], checkpoint["mode"] or "max"
    except (ValueError, KeyError, TypeError):  # another version's, or damaged: the other columns still hold
        return None, "max"


def _last_metrics(storage: Storage) -> dict[str, Any]:
    """The last whole record of metrics.jsonl, which is too long to be read for every run; {} without one."""
    parts = [name for name in storage.list() if name.startswith("metrics.jsonl")]
    if not parts:
        return {}
    with storage.open(parts[-1]) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().splitlines()
    return next(iter(reversed(_records(lines))), {})


def _records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """JSON objects, a line each; a line that is cut off, at the start of a tail or by a kill, is left out."""
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def as_json(runs: list[RunSummary]) -> str:
    def plain(run: RunSummary) -> dict[str, Any]:
        best = run.best and {"metric": run.best[0], "value": run.best[1]}
        return {**asdict(run), "best": best}

    return json.dumps([plain(run) for run in runs], indent=2)


def as_rows(runs: list[RunSummary], now_s: float | None = None) -> list[list[str]]:
    """One row of text a run, under the head NAME, STATUS, STEPS, BEST, TIME, AGE."""
    now_s = time.time() if now_s is None else now_s
    return [
        [
            run.name,
            run.status,
            str(run.steps),
            f"{run.best[0]} {run.best[1]:.4g}" if run.best else "-",
            duration(run.time_s),
            duration(run.last_active_s and now_s - run.last_active_s),
        ]
        for run in runs
    ]


def duration(seconds: float | None) -> str:
    """As one reads it at a glance: 42 s, 3 min 5 s, 2 h 10 min, 5 d 3 h."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    for size, unit, smaller_size, smaller in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit} {rest} {smaller}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"
