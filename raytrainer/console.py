"""What the user sees of a run: a progress bar on a terminal, a line for each record elsewhere.

Only the drawing of the bar imports rich, and only on a terminal. A reader that goes away (`| head`) ends the
output, never the run.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Any, Protocol, TextIO

Record = dict[str, Any]

# The last words about these come from the driver, which knows more than the event.
_SAID_ELSEWHERE = ("finished", "stopped", "failed")
# Told even with the console sink off: without it a new start would look like a hang.
_ALWAYS_SAID = ("worker_failed",)
_PLACE = ("step", "epoch", "time_s", "total_steps", "world_size")


class Console:
    """Shows rank 0's records, the output of its code, and what the driver has to say.

    total_steps: where the bar ends, until a record brings its own `total_steps`. stream: stdout by default.
    interactive: draw a bar; by default where the stream is a terminal. enabled: False leaves out progress,
    metrics and checkpoints, and keeps the rest.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        stream: TextIO | None = None,
        interactive: bool | None = None,
        enabled: bool = True,
    ):
        stream = stream or sys.stdout
        if interactive is None:
            interactive = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._enabled = enabled
        self._total_steps = total_steps
        self._pace = Pace()
        self._screen: Screen = _Bar(stream) if interactive and enabled else _Lines(stream)

    def record(self, record: Record) -> None:
        """Show one record: metrics (with `step`), an event (`event`) or a line of output (`output`)."""
        if "output" in record:
            self.say(record["output"])
        elif "event" in record:
            if record["event"] in ("resumed", "worker_failed"):
                self._pace = Pace()
            if self._enabled or record["event"] in _ALWAYS_SAID:
                sentence = describe_event(record)
                if sentence:
                    self.say(sentence)
        elif self._enabled and "step" in record:
            self._show_metrics(record)

    def say(self, text: str) -> None:
        """Show `text`, above the bar where there is one."""
        self._guard(self._screen.line, text)

    def close(self) -> None:
        """Take the bar away; may be called twice."""
        self._guard(self._screen.close)
        self._screen = _Nowhere()

    def _show_metrics(self, record: Record) -> None:
        self._total_steps = record.get("total_steps", self._total_steps)
        if any(name.startswith("eval/") for name in record):
            self.say(describe_metrics(record, self._total_steps, None))
            return
        self._pace.add(record["step"], record.get("time_s", time.time()))
        self._guard(self._screen.progress, record, self._total_steps, self._pace.left_s(self._total_steps))

    def _guard(self, show: Any, *arguments: Any) -> None:
        try:
            show(*arguments)
        except (OSError, ValueError) as error:
            # Nobody reads any more: a closed pipe, a terminal that hung up, a file that was closed.
            if isinstance(error, ValueError) and not self._screen.stream.closed:
                raise
            _discard(self._screen.stream)
            self._screen = _Nowhere()


class Pace:
    """How fast the latest steps went by, evaluation and saving included."""

    def __init__(self, num_records: int = 20):
        self._seen: deque[tuple[int, float]] = deque(maxlen=num_records)

    def add(self, step: int, time_s: float) -> None:
        self._seen.append((step, time_s))

    def left_s(self, total_steps: int | None) -> float | None:
        """The seconds until `total_steps`, None while it cannot be known."""
        if total_steps is None or len(self._seen) < 2:
            return None
        (first_step, first_s), (step, last_s) = self._seen[0], self._seen[-1]
        if step <= first_step or last_s <= first_s:
            return None
        return (total_steps - step) * (last_s - first_s) / (step - first_step)


def describe_event(record: Record) -> str | None:
    """The event as a sentence, None for one that somebody else tells."""
    event = record["event"]
    if event in _SAID_ELSEWHERE:
        return None
    if event == "started":
        return f"training starts on {_workers(record.get('world_size', 1))}"
    if event == "resumed":
        return f"resumed at step {record['step']} (epoch {record.get('epoch', 0)})"
    if event == "checkpointed":
        return f"checkpoint at step {record['step']}"
    if event == "worker_failed":
        return _describe_failure(record)
    if event in ("waiting", "shipping"):
        return record["message"]
    details = " ".join(f"{key}={value}" for key, value in record.items() if key not in ("event", "time_s"))
    return f"{event.replace('_', ' ')} {details}".rstrip()


def describe_metrics(record: Record, total_steps: int | None, left_s: float | None) -> str:
    """The metrics of one record in one line, each once."""
    place = f"step {record['step']}" + (f"/{total_steps}" if total_steps else "")
    parts = [place, *([f"epoch {record['epoch']}"] if "epoch" in record else []), *_numbers(record)]
    if left_s is not None:
        parts.append(f"{format_duration(left_s)} left")
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """As on a clock: 0:35, 12:05, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _numbers(record: Record) -> list[str]:
    parts = []
    for name, value in record.items():
        if name in _PLACE or not isinstance(value, int | float):
            continue
        if name == "samples_per_s":
            parts.append(f"{value:,.0f} samples/s" if value >= 100 else f"{value:.3g} samples/s")
        elif name == "data_time_pct":
            parts.append(f"data {value:.0f}%")
        else:
            parts.append(f"{name} {value:.4g}")
    if "world_size" in record:
        parts.append(_workers(record["world_size"]))
    return parts


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"


def _describe_failure(record: Record) -> str:
    verb = "lost" if record.get("kind", "lost") == "lost" else "failed"
    again = "starting again"
    if record.get("step"):
        again += f" at step {record['step']}"
    else:
        again += " from the beginning"
    if record.get("max_failures", -1) >= 0:
        again += f" (failure {record['num_failures']} of {record['max_failures']} allowed in a row)"
    return f"worker {record['rank']} {verb}: {record['message']}; {again}"


def _discard(stream: TextIO) -> None:
    """Send what is left in the stream's buffer nowhere, or Python would fail on it once more at exit."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):
        # No file behind the stream.
        return


class Screen(Protocol):
    """Where the text goes; `stream` is what is behind it."""

    stream: TextIO

    def line(self, text: str) -> None: ...

    def progress(self, record: Record, total_steps: int | None, left_s: float | None) -> None: ...

    def close(self) -> None: ...


class _Lines:
    def __init__(self, stream: TextIO):
        self.stream = stream

    def line(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()

    def progress(self, record: Record, total_steps: int | None, left_s: float | None) -> None:
        self.line(describe_metrics(record, total_steps, left_s))

    def close(self) -> None:
        self.stream.flush()


class _Nowhere:
    stream = sys.stdout

    def line(self, text: str) -> None: ...

    def progress(self, record: Record, total_steps: int | None, left_s: float | None) -> None: ...

    def close(self) -> None: ...


class _Bar:
    """Drawn when a record comes, at most ten times a second: no thread of its own, which would take cores."""

    def __init__(self, stream: TextIO):
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, Progress, TextColumn

        self.stream = stream
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=Terminal(file=stream, force_terminal=True, highlight=False),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: Any = None
        self._drawn_s = 0.0

    def line(self, text: str) -> None:
        self._progress.console.out(text, highlight=False)

    def progress(self, record: Record, total_steps: int | None, left_s: float | None) -> None:
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("", total=total_steps, numbers="")
        step = record["step"]
        self._progress.update(
            self._task,
            completed=step,
            total=total_steps,
            description=f"step {step}/{total_steps}" if total_steps else f"step {step}",
            numbers="  ".join(describe_metrics(record, total_steps, left_s).split("  ")[1:]),
        )
        now_s = time.monotonic()
        if now_s - self._drawn_s >= 0.1 or step == total_steps:
            self._drawn_s = now_s
            self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()
