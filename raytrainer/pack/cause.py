"""Why a trial ended, in words, and whether starting it again can help: pure functions of what was seen."""

from __future__ import annotations

import re
import signal as signals
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "finished", "stopped", "pruned", "exception", "memory_error", "cuda_oom", "memory_cap", "host_oom",
    "exit_code", "signal", "timeout", "lost_node", "not_started",
]  # fmt: skip

# Out of memory, of whichever kind: with a card for itself the trial may fit.
OUT_OF_MEMORY = ("memory_error", "cuda_oom", "memory_cap", "host_oom")
TIMEOUT_EXIT_CODE = 124
_CUDA_OOM = re.compile(r"(torch\.(cuda\.)?OutOfMemoryError|CUDA out of memory|CUDA error: out of memory)")
_MEMORY = re.compile(
    r"^(\w+\.)*_?(Array)?MemoryError\b|DefaultCPUAllocator: (can't allocate|not enough) memory"
)
# The last line of a Python traceback: a dotted name of an exception, perhaps with a message.
_EXCEPTION = re.compile(r"^(\[\w+\]: )?(?P<type>[A-Za-z_][\w.]*(?<!\.))(?P<text>: .*)?$")
_TRACEBACK = re.compile(r"^(\[\w+\]: )?Traceback \(most recent call last\)")


@dataclass(frozen=True)
class TrialEnd:
    """What was seen of a process's end.

    returncode: as `subprocess` gives it, -N for signal N. tail: the last of its output. killed_for: why we
    ended it, "timeout", "memory_cap", "stopped" or "pruned". oom_kills: how often the kernel has killed for
    memory here while it ran, None where that cannot be known. error: it could not be started. lost: its node,
    or its supervisor, is gone.
    """

    returncode: int
    tail: str = ""
    killed_for: str | None = None
    peak_gib: float = 0.0
    cap_gib: float | None = None
    timeout_s: float | None = None
    oom_kills: int | None = None
    error: str | None = None
    lost: str | None = None


@dataclass(frozen=True)
class Cause:
    """kind: one of `Kind`; message: a line for the user; exit_code: as a shell gives it; signal: its name."""

    kind: Kind
    message: str
    exit_code: int
    signal: str | None = None

    @property
    def is_failure(self) -> bool:
        return self.kind not in ("finished", "stopped", "pruned")


def cause_of(end: TrialEnd) -> Cause:
    """Why the trial ended."""
    code = end.returncode if end.returncode >= 0 else 128 - end.returncode
    if end.lost is not None:
        return Cause("lost_node", f"lost: {end.lost}", code or 137)
    if end.error is not None:
        return Cause("not_started", f"could not be started: {end.error}", 127)
    if end.killed_for is not None:
        return _ended_by_us(end, code)
    if end.returncode == 0:
        return Cause("finished", "finished", 0)
    if end.returncode < 0:
        return _by_signal(end, code)
    lines = last_lines(end.tail)
    if any(_CUDA_OOM.search(line) for line in lines):
        return Cause("cuda_oom", f"the GPU ran out of memory: {_last_of(lines, _CUDA_OOM)}", code)
    if any(_MEMORY.search(line) for line in lines):
        return Cause("memory_error", f"ran out of memory: {_last_of(lines, _MEMORY)}", code)
    raised = exception_of(end.tail)
    # Of Python, for an exception that nobody caught, and of raytrainer.
    if raised is not None and end.returncode in (1, 2):
        return Cause("exception", raised, code)
    said = f": {lines[-1]}" if lines else ""
    return Cause("exit_code", f"exited with code {end.returncode}{said}"[:300], code)


def _ended_by_us(end: TrialEnd, code: int) -> Cause:
    if end.killed_for == "timeout":
        return Cause("timeout", f"did not end within {end.timeout_s:g} s: ended", TIMEOUT_EXIT_CODE)
    if end.killed_for == "memory_cap":
        message = (
            f"its processes came to {end.peak_gib:.2f} GiB, above the cap of {end.cap_gib:.2f} GiB: ended"
        )
        return Cause("memory_cap", message, 137)
    if end.killed_for == "pruned":
        return Cause("pruned", "stopped early, since others did better", 0)
    if end.returncode == 0:
        return Cause("finished", "finished", 0)
    return Cause("stopped", "stopped on request", code)


def _by_signal(end: TrialEnd, code: int) -> Cause:
    try:
        name = signals.Signals(-end.returncode).name
    except ValueError:
        name = f"signal {-end.returncode}"
    if name == "SIGKILL" and end.oom_kills:
        message = f"killed by the kernel, since the host ran out of memory (it had {end.peak_gib:.2f} GiB)"
        return Cause("host_oom", message, code, name)
    message = f"killed by {name}"
    if name == "SIGKILL":
        message += ": kill -9" if end.oom_kills == 0 else ": kill -9, or the host ran out of memory"
    elif name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"):
        message += ": a fault in native code"
    return Cause("signal", message, code, name)


def last_lines(tail: str, count: int = 20) -> list[str]:
    """The last lines that say something; of a line that redraws itself, its last state."""
    lines = [line.rstrip("\r").rpartition("\r")[2].strip() for line in tail.split("\n")]
    return [line for line in lines if line][-count:]


def exception_of(tail: str) -> str | None:
    """The last line of the last Python traceback, or None without one."""
    lines = [line.rstrip("\r") for line in tail.split("\n")]
    starts = [number for number, line in enumerate(lines) if _TRACEBACK.match(line)]
    if not starts:
        # What raytrainer itself says of a failed run, in place of a traceback.
        said = [line for line in lines if line.startswith("error: ")]
        return said[-1].removeprefix("error: ").strip() if said else None
    for line in lines[starts[-1] + 1 :]:
        match = _EXCEPTION.match(line)
        if match and not line.startswith(" "):
            return f"{match['type']}{match['text'] or ''}"[:300]
    return None


def _last_of(lines: list[str], pattern: re.Pattern) -> str:
    return [line for line in lines if pattern.search(line)][-1][:200]


def is_retried(cause: Cause, num_retries: int, max_retries: int, was_alone: bool) -> bool:
    """Whether the trial is started again; after it ran out of memory alone on its card it is not."""
    if num_retries >= max_retries:
        return False
    if cause.kind in OUT_OF_MEMORY:
        return not was_alone
    return cause.kind == "lost_node"
