"""What is kept of a pack: pack.json, each trial's status.json, and the results as a table and a picture."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from raytrainer.errors import UsageError
from raytrainer.pack.cause import Cause
from raytrainer.pack.plan import Placement
from raytrainer.pack.trials import Trial
from raytrainer.storage import Storage

PACK_FILE, STATUS_FILE, LOG_FILE = "pack.json", "status.json", "stdout.log"
RESULTS = "results"
VERSION = 1
MAX_POINTS = 1000
# Of a record: where it stands, no metric.
_PLACE = ("step", "epoch", "time_s", "total_steps", "world_size", "data_time_pct")
_LESS_IS_BETTER = re.compile(r"(loss|error|err|perplexity|mse|mae|rmse|time|_s)$", re.I)


@dataclass(frozen=True)
class TrialStatus:
    """How a trial stands.

    state: waiting, running, finished, failed, stopped or pruned. attempts: one mapping for each start that
    has ended: cause, message, exit_code, signal, peak_memory_gib, time_s. metrics: the last of each, `step`
    the step of the newest; curve: (step, value) of the search's metric.
    """

    trial: int
    state: str = "waiting"
    values: dict[str, Any] = field(default_factory=dict)
    place: dict[str, Any] = field(default_factory=dict)
    cause: str | None = None
    message: str = ""
    exit_code: int | None = None
    signal: str | None = None
    attempts: tuple[dict[str, Any], ...] = ()
    peak_memory_gib: float = 0.0
    memory_gib: float = 0.0
    time_s: float = 0.0
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    metric_steps: dict[str, int | None] = field(default_factory=dict)
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def name(self) -> str:
        return f"trial_{self.trial:03d}"

    def started(self, placement: Placement, more: dict[str, Any]) -> TrialStatus:
        return replace(self, state="running", place={**asdict(placement), **more}, cause=None, message="")

    def observed(self, record: dict[str, Any], metric: str | None) -> TrialStatus:
        """With one record of metrics taken in; each keeps the step that it came with."""
        step = record.get("step")
        step = int(step) if isinstance(step, int | float) and math.isfinite(step) else None
        numbers = {key: float(value) for key, value in record.items() if is_metric(key, value)}
        curve = self.curve
        if metric in numbers:
            curve = _thinned((*curve, (float(len(curve) if step is None else step), numbers[metric])))
        return replace(
            self,
            step=self.step if step is None else step,
            metrics={**self.metrics, **numbers},
            metric_steps={**self.metric_steps, **dict.fromkeys(numbers, step)},
            curve=curve,
        )

    def ended(self, cause: Cause, peak_gib: float, time_s: float, again: bool) -> TrialStatus:
        """again: it goes back into the queue."""
        attempt = {
            "cause": cause.kind,
            "message": cause.message,
            "exit_code": cause.exit_code,
            "signal": cause.signal,
            "peak_memory_gib": round(peak_gib, 4),
            "time_s": round(time_s, 3),
            "place": self.place,
        }
        state = cause.kind if cause.kind in ("finished", "stopped", "pruned") else "failed"
        return replace(
            self,
            state="waiting" if again else state,
            cause=cause.kind,
            message=cause.message,
            exit_code=cause.exit_code,
            signal=cause.signal,
            attempts=(*self.attempts, attempt),
            peak_memory_gib=max(self.peak_memory_gib, round(peak_gib, 4)),
            memory_gib=0.0,
            time_s=round(self.time_s + time_s, 3),
        )

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=2, default=str).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> TrialStatus:
        """Raises ValueError, KeyError or TypeError for what is no status."""
        mapping = json.loads(text)
        mapping["attempts"] = tuple(mapping["attempts"])
        mapping["curve"] = tuple((step, value) for step, value in mapping["curve"])
        return cls(**mapping)


def _thinned(curve: tuple) -> tuple:
    """Every second point of a curve that has become long, and the last."""
    return curve if len(curve) < MAX_POINTS else (*curve[:-1:2], curve[-1])


def is_metric(key: str, value: Any) -> bool:
    """Whether a record's entry is a number that was measured."""
    return key not in _PLACE and isinstance(value, int | float) and not isinstance(value, bool)


def write_pack(storage: Storage, trials: Sequence[Trial], settings: dict[str, Any], cwd: str) -> None:
    """What `--resume` needs: the trials and how they are packed."""
    content = {"version": VERSION, "cwd": cwd, "settings": settings, "trials": [asdict(t) for t in trials]}
    storage.write(PACK_FILE, json.dumps(content, indent=1, default=str).encode() + b"\n")


def read_pack(storage: Storage) -> tuple[list[Trial], dict[str, Any], str]:
    """The trials, the settings and the working directory of a pack. Raises UsageError where there is none."""
    try:
        content = json.loads(storage.read(PACK_FILE)) if storage.exists(PACK_FILE) else None
        if content is None:
            raise UsageError(
                f"--resume {storage.root}\n  there is no {PACK_FILE} in it\n"
                "  write the search's directory, <storage_path>/<name>"
            )
        trials = [Trial(**{**each, "command": tuple(each["command"])}) for each in content["trials"]]
        return trials, content["settings"], content["cwd"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{storage.path(PACK_FILE)}: is damaged ({error})\n  start again under another name"
        ) from error


def read_status(storage: Storage, trial: Trial) -> TrialStatus:
    """How a trial stood when it was last written; waiting where nothing whole is there."""
    name = f"{trial.name}/{STATUS_FILE}"
    try:
        return TrialStatus.from_json(storage.read(name)) if storage.exists(name) else _new(trial)
    except (ValueError, KeyError, TypeError):
        return _new(trial)


def _new(trial: Trial) -> TrialStatus:
    return TrialStatus(trial.index, values=trial.values)


def to_resume(status: TrialStatus) -> TrialStatus:
    """A trial that has finished (or was stopped early for good) stays so; any other waits again."""
    return status if status.state in ("finished", "pruned") else replace(status, state="waiting", cause=None)


# Results


def choose_metric(statuses: Sequence[TrialStatus], metric: str | None) -> str | None:
    """The metric to sort by: the one asked for, else what most trials have of eval/..., else of a loss."""
    if metric is not None:
        return metric
    names = [name for status in statuses for name in status.metrics]
    if not names:
        return None
    evals = [name for name in names if name.startswith("eval/") and name != "eval/loss"]
    losses = [name for name in names if name.endswith("loss")]
    chosen = evals or losses or names
    return max(dict.fromkeys(chosen), key=chosen.count)


def is_less_better(metric: str, mode: str | None) -> bool:
    return mode == "min" if mode else _LESS_IS_BETTER.search(metric) is not None


def ranked(statuses: Sequence[TrialStatus], metric: str | None, mode: str | None) -> list[TrialStatus]:
    """The best first; then those without the metric (NaN is none), the finished before the others."""
    sign = 1.0 if metric is not None and is_less_better(metric, mode) else -1.0

    def key(status: TrialStatus) -> tuple:
        value = status.metrics.get(metric or "")
        known = value is not None and not math.isnan(value)
        return not known, sign * value if known else 0.0, status.state != "finished", status.trial

    return sorted(statuses, key=key)


def best_of(statuses: Sequence[TrialStatus], metric: str | None, mode: str | None) -> TrialStatus | None:
    """The best trial that finished, or was stopped early; None when none has the metric."""
    fit = [s for s in statuses if s.state in ("finished", "pruned")]
    first = next(iter(ranked(fit, metric, mode)), None)
    value = first.metrics.get(metric or "") if first else None
    return first if value is not None and not math.isnan(value) else None


def worst_exit_code(statuses: Sequence[TrialStatus]) -> int:
    return max((status.exit_code or 0 for status in statuses if status.state == "failed"), default=0)


def write_results(
    storage: Storage, statuses: Sequence[TrialStatus], metric: str | None, mode: str | None
) -> list[TrialStatus]:
    """results.csv and results.json, the best first; returns the trials in that order."""
    order = ranked(statuses, metric, mode)
    storage.write(f"{RESULTS}.csv", as_csv(order).encode())
    rows = [{key: value for key, value in asdict(s).items() if key not in ("curve", "place")} for s in order]
    content = {"metric": metric, "mode": None, "trials": rows}
    if metric is not None:
        content["mode"] = "min" if is_less_better(metric, mode) else "max"
    storage.write(f"{RESULTS}.json", json.dumps(content, indent=2, default=str).encode() + b"\n")
    return order


def as_csv(statuses: Sequence[TrialStatus]) -> str:
    values = list(dict.fromkeys(key for status in statuses for key in status.values))
    metrics = list(dict.fromkeys(key for status in statuses for key in status.metrics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["trial", "state", "cause", "exit_code", "attempts", "step", "time_s", "peak_memory_gib"]
    writer.writerow([*head, *values, *metrics, "message"])
    for status in statuses:
        writer.writerow(
            [
                *(status.name, status.state, status.cause or "", status.exit_code, len(status.attempts)),
                *(status.step, status.time_s, status.peak_memory_gib),
                *(_cell(status.values.get(key)) for key in values),
                *(status.metrics.get(key, "") for key in metrics),
                status.message,
            ]
        )
    return text.getvalue()


def _cell(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else json.dumps(value)


def draw_results(path: Path, statuses: Sequence[TrialStatus], metric: str, mode: str | None) -> bool:
    """results.png: the metric over steps, and over the value that differs most. False with nothing to draw.

    Imports matplotlib, and draws without a display.
    """
    known = [status for status in statuses if math.isfinite(status.metrics.get(metric, math.nan))]
    if not known:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    key = _most_varied(known)
    figure = Figure(figsize=(10 if key else 6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if key else 1, squeeze=False)[0]
    for status in known[:50]:
        steps, values = zip(*(status.curve or ((status.step or 0, status.metrics[metric]),)), strict=True)
        axes[0].plot(steps, values, marker="." if len(steps) < 30 else None, label=status.name)
    axes[0].set(xlabel="step", ylabel=metric, title=f"{len(known)} of {len(statuses)} trials")
    if len(known) <= 10:
        axes[0].legend(fontsize="small")
    if key:
        points = [(status.values[key], status.metrics[metric]) for status in known if key in status.values]
        xs = [x for x, _ in points]
        axes[1].scatter(xs if _all_numbers(xs) else [str(x) for x in xs], [y for _, y in points])
        if _all_numbers(xs) and min(xs) > 0 and max(xs) / min(xs) >= 20:
            axes[1].set_xscale("log")
        axes[1].set(
            xlabel=key,
            ylabel=metric,
            title="less is better" if is_less_better(metric, mode) else "more is better",
        )
    figure.savefig(path, dpi=110)
    return True


def _most_varied(statuses: Sequence[TrialStatus]) -> str | None:
    different = {
        key: len({json.dumps(s.values.get(key), default=str) for s in statuses})
        for key in dict.fromkeys(key for status in statuses for key in status.values)
    }
    key = max(different, key=different.get, default=None)
    return key if key is not None and different[key] > 1 else None


def _all_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
