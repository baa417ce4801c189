"""What happened to a rank, as data: pure functions that tell a user's mistake from its echo on the others.

Both backends collect one `RankFailure` a failed rank, choose the cause, and ask whether it is worth a retry.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from raytrainer import errors
from raytrainer.errors import RaytrainerError, ScriptError, UsageError, WorkerError, WorkerLostError

KINDS = ("user", "usage", "collateral", "lost", "exit", "script")

# Types that torch raises when a peer, not this rank, is in trouble.
_COLLATERAL_TYPES = frozenset(
    {"DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError"}
)

# The same trouble as a plain RuntimeError: gloo, NCCL and the store put these into the message.
_COLLATERAL_MESSAGES = re.compile(
    r"gloo/transport|connection closed by peer|socket closed|application timeout caused pair closure"
    r"|timed out waiting \d+ms for (recv|send|unbound)|watchdog caught collective|monitoredbarrier"
    r"|nccl(remote|system|internal)error|nccl communicator was aborted|nccl error in|tcpstore",
    re.IGNORECASE,
)

# A collective's error that this rank's own set-up causes: it comes back however often the run restarts.
_MISUSE = re.compile(r"nccl(InvalidUsage|InvalidArgument)|Duplicate GPU", re.IGNORECASE)

_LOADER_ERROR = re.compile(
    r"Caught (?P<type>[\w.]+) in (?P<where>DataLoader worker process \d+|pin memory thread[^\n]*?)\.\n"
    r"Original Traceback \(most recent call last\):\n(?P<body>.*)",
    re.DOTALL,
)

_PACKAGE_DIR = str(Path(__file__).resolve().parent.parent) + os.sep
_STDLIB_DIR = sysconfig.get_paths()["stdlib"] + os.sep


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended when it did not end well.

    kind: "user" (an exception), "usage" (a mistake in config or data), "collateral" (the echo of another
    rank's end), "lost" (the process died), "exit" (user code ended the process itself), "script" (a launched
    script failed; exit_code is the script's own, 128 + N for signal N).
    error_type: class name of the exception, "" without one; message: one or more lines, no traceback;
    traceback: the user's own frames first, "" without one; exit_code: the process's own, None if it died by a
    signal or has not ended; signal: name such as "SIGKILL"; rss_gib: its peak resident size; time: Unix, s.
    """

    rank: int
    kind: str
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    signal: str | None = None
    rss_gib: float | None = None
    time: float = 0.0

    def to_dict(self) -> dict:
        """Plain values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> RankFailure:
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @property
    def summary(self) -> str:
        """The cause in one line, without the rank."""
        first = self.message.strip().splitlines()[0] if self.message.strip() else ""
        if self.error_type and self.kind in ("user", "collateral"):
            return f"{self.error_type}: {first}" if first else self.error_type
        return first


@dataclass(frozen=True)
class Outcome:
    """How a run ended, whatever ran it.

    status: "finished", "stopped" or "failed"; exit_code: the command's; result: rank 0's plain values, None
    if it gave none; failure: the cause when failed; restarts: the cause of each new start, in order.
    """

    status: str
    exit_code: int
    result: dict | None = None
    failure: RankFailure | None = None
    restarts: tuple[RankFailure, ...] = ()


class RankFailed(Exception):
    """Raised in a rank for a failure that is described already."""

    def __init__(self, failure: RankFailure):
        super().__init__(failure.message)
        self.failure = failure


def describe_exception(exc: BaseException, rank: int) -> RankFailure:
    """The failure that `exc`, caught at the top of rank `rank`'s process, stands for."""
    if isinstance(exc, RankFailed):
        return exc.failure
    now = time.time()
    if isinstance(exc, SystemExit):
        return RankFailure(
            rank,
            "exit",
            "SystemExit",
            f"user code called sys.exit({exc.code!r}) before the training was over",
            format_traceback(exc),
            exit_code=_system_exit_code(exc.code),
            time=now,
        )
    if isinstance(exc, KeyboardInterrupt):
        return RankFailure(rank, "exit", "KeyboardInterrupt", "interrupted", format_traceback(exc), time=now)
    name = type(exc).__name__
    if isinstance(exc, RaytrainerError):
        kind = "usage" if isinstance(exc, UsageError) else "user"
        return RankFailure(rank, kind, name, str(exc), _cause_traceback(exc), exc.exit_code, time=now)
    message = str(exc)
    if _is_collateral(name, message):
        return RankFailure(rank, "collateral", name, message, format_traceback(exc), time=now)
    loader_error = _LOADER_ERROR.match(message)
    if loader_error:
        return _describe_loader_error(loader_error, rank, now)
    return RankFailure(rank, "user", name, message, format_traceback(exc), time=now)


def describe_exit(rank: int, returncode: int, rss_gib: float | None = None) -> RankFailure:
    """The failure of a process that ended without saying why.

    returncode: as `subprocess` gives it, -N for signal N. A process that ended with a code of its own did so
    on purpose (`os._exit`, a native library), and would again: only death by a signal counts as lost.
    """
    now = time.time()
    size = f" at a resident size of {rss_gib:.1f} GiB" if rss_gib is not None else ""
    if returncode >= 0:
        message = (
            f"the process ended itself with exit code {returncode} before the training was over"
            " and without an exception (os._exit or a native library; its log file may say more)"
        )
        return RankFailure(rank, "exit", message=message, exit_code=returncode, rss_gib=rss_gib, time=now)
    name = _signal_name(-returncode)
    if name == "SIGKILL":
        message = f"killed by SIGKILL{size}: probably the host ran out of memory, or someone ran kill -9"
    elif name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"):
        message = f"died by {name}{size}: a fault in native code; its log file may hold the stack"
    else:
        message = f"ended by {name}{size}, sent from outside"
    return RankFailure(rank, "lost", message=message, signal=name, rss_gib=rss_gib, time=now)


def choose_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure that the others follow from: what is no echo before what is, then the earliest.

    Raises ValueError when there are none.
    """
    return min(failures, key=lambda failure: (failure.kind == "collateral", failure.time, failure.rank))


def is_retryable(failure: RankFailure) -> bool:
    """Whether starting again can help: after a lost process, node or connection.

    After a script too, which is only started again where that is asked for.
    """
    return failure.kind in ("lost", "collateral", "script")


def to_error(failure: RankFailure) -> RaytrainerError:
    """The exception to raise in the process that the user started; says the rank and the cause once."""
    if failure.kind == "usage":
        # The same on every rank, so the rank would say nothing. ConfigError takes problems, not a text.
        cls = getattr(errors, failure.error_type, UsageError)
        return (UsageError if cls is errors.ConfigError else cls)(failure.message)
    head = f"rank {failure.rank}"
    if failure.kind in ("script", "collateral") and failure.exit_code is not None:
        text = f"{head} {failure.message}"
        return ScriptError(f"{text}\n{failure.traceback}" if failure.traceback else text, failure.exit_code)
    if failure.kind in ("lost", "collateral"):
        if failure.kind == "lost":
            return WorkerLostError(f"{head} was lost: {failure.message}")
        return WorkerLostError(f"{head} lost its connection to the others: {failure.summary}")
    cls = getattr(errors, failure.error_type, None) if failure.error_type else None
    if isinstance(cls, type) and issubclass(cls, RaytrainerError):
        text = f"{head}: {failure.message}"
        return cls(f"{text}\n{failure.traceback}" if failure.traceback else text)
    text = (
        f"{head}: {failure.summary}" if failure.kind == "exit" or not failure.traceback else f"{head} failed"
    )
    return WorkerError(f"{text}\n{failure.traceback}" if failure.traceback else text)


def format_traceback(exc: BaseException) -> str:
    """The user's own frames of `exc` and of what caused it, internal ones counted; the error itself is last.

    When no frame is the user's, all are kept: then the fault is ours and the frames are needed.
    """
    parts = []
    for number, link in enumerate(_cause_chain(exc)):
        frames = traceback.extract_tb(link.__traceback__)
        own = [frame for frame in frames if not is_internal(frame.filename)]
        lines = [line.rstrip("\n") for line in traceback.format_list(own or frames)]
        hidden = len(frames) - len(own) if own else 0
        if hidden:
            lines.append(f"  ({hidden} more {'frame' if hidden == 1 else 'frames'} inside libraries)")
        text = "".join(traceback.format_exception_only(link)).rstrip("\n")
        head = [] if number == 0 else ["caused by:"]
        parts.append("\n".join([*head, *lines, text]))
    return "\n".join(parts)


def is_internal(filename: str) -> bool:
    """Whether a frame of this file is raytrainer's, an installed library's or Python's own."""
    if filename.startswith("<"):
        return filename.startswith("<frozen")
    if "site-packages" in filename or "dist-packages" in filename:
        return True
    return filename.startswith((_PACKAGE_DIR, _STDLIB_DIR))


def _describe_loader_error(match: re.Match, rank: int, now: float) -> RankFailure:
    """A loader process's exception, which torch sends as text: the original one, not the wrapper."""
    lines = match["body"].rstrip("\n").split("\n")
    start = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    frames, message_lines = lines[:start], lines[start:]
    text = "\n".join(message_lines)
    message = re.sub(rf"^(?:[\w.]+\.)?{re.escape(match['type'])}(: )?", "", text)
    kept = _own_text_frames(frames)
    trace = "\n".join([*(kept or frames), f"  (in {match['where']})", text])
    name = match["type"].rsplit(".", 1)[-1]
    cls = getattr(errors, name, None)
    if isinstance(cls, type) and issubclass(cls, UsageError):
        return RankFailure(rank, "usage", name, message, exit_code=cls.exit_code, time=now)
    return RankFailure(rank, "user", name, message, trace, time=now)


def _own_text_frames(lines: list[str]) -> list[str]:
    """Of a printed traceback's frames those that are the user's, each with its source line."""
    kept: list[str] = []
    keep = False
    for line in lines:
        place = re.match(r'  File "([^"]+)"', line)
        if place:
            keep = not is_internal(place[1])
        if keep:
            kept.append(line)
    return kept


def is_echo(output: str) -> bool:
    """Whether a script's last line of output is a broken connection to another rank."""
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    # torch writes the rank first: "[rank0]: RuntimeError: ...".
    name, _, message = re.sub(r"^\[\w+\]: ", "", last).partition(":")
    return _is_collateral(name.rpartition(".")[2].strip(), message)


def _is_collateral(type_name: str, message: str) -> bool:
    if _MISUSE.search(message):
        return False
    if type_name in _COLLATERAL_TYPES:
        return True
    # Python's own errors (a user's ConnectionResetError from a download) are the user's, whatever they say.
    return type_name == "RuntimeError" and bool(_COLLATERAL_MESSAGES.search(message))


def _cause_chain(exc: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    link: BaseException | None = exc
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def _cause_traceback(exc: BaseException) -> str:
    """An error of ours stands for itself; what it was raised from keeps its frames if they are the user's."""
    cause = exc.__cause__
    if cause is None or isinstance(cause, RaytrainerError | OSError):
        return ""
    frames = traceback.extract_tb(cause.__traceback__)
    return format_traceback(cause) if any(not is_internal(frame.filename) for frame in frames) else ""


def _system_exit_code(code: object) -> int:
    if code is None:
        return 0
    return code if isinstance(code, int) else 1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
