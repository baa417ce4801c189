"""CPU time and memory of processes, read from /proc; and of a whole command with everything that it started.

`python -m tests.benchmarks.measure OUT.json TIMEOUT_S -- COMMAND ...` measures one command. It makes itself
the parent of all that the command leaves behind (Ray's daemons, say), so that none is missed.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MARKS = "BENCH_MARKS"
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36
_SAMPLE_INTERVAL_S = 0.25
_LEFT_BEHIND_S = 30.0


def process_cpu_s(pid: int) -> float:
    """CPU time of a live process, all threads; in nanoseconds' resolution where the kernel has it."""
    total_ns = 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            total_ns += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    except OSError:
        return 0.0
    return total_ns / 1e9


def peak_memory(pid: int) -> dict[str, int]:
    """In KiB: `peak`, the largest resident size so far (VmHWM), and `pss`, the present one with shared pages
    divided among those that share them; without what cannot be read."""
    found: dict[str, int] = {}
    for file, key, name in (("status", "VmHWM:", "peak"), ("smaps_rollup", "Pss:", "pss")):
        try:
            lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        except OSError:
            continue
        found.update((name, int(line.split()[1])) for line in lines if line.startswith(key))
    return found


def mark(event: str) -> None:
    """Notes for the measuring process that this one has started ("rank") or done its "first_step"."""
    if MARKS in os.environ:
        line = json.dumps({"event": event, "pid": os.getpid(), "time_s": time.time()}) + "\n"
        with open(os.environ[MARKS], "a") as file:
            file.write(line)


@dataclass
class Measured:
    """exit_s, gone_s: from the start of the command to its exit, and to that of the last process it started;
    cpu_s: of all of them; marks: of `mark`, times from the start; cpu_curve: (time, CPU-seconds so far);
    memory: last reading of `peak_memory` by pid, of the processes that marked themselves a rank; left_behind:
    names of processes that had to be killed."""

    exit_code: int = 0
    exit_s: float = 0.0
    gone_s: float = 0.0
    cpu_s: float = 0.0
    marks: list[dict[str, Any]] = field(default_factory=list)
    cpu_curve: list[tuple[float, float]] = field(default_factory=list)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)

    def first_s(self, event: str) -> float:
        """When it first happened, seconds from the start of the command."""
        return min(mark["time_s"] for mark in self.marks if mark["event"] == event)

    def cpu_s_at(self, time_s: float) -> float:
        """CPU-seconds used until then, between two samples in proportion."""
        before = (0.0, 0.0)
        for sample in [*self.cpu_curve, (self.gone_s, self.cpu_s)]:
            if sample[0] >= time_s:
                share = (time_s - before[0]) / max(1e-9, sample[0] - before[0])
                return before[1] + share * (sample[1] - before[1])
            before = sample
        return self.cpu_s


def measure(
    command: Sequence[str], folder: Path, environment: dict[str, str], timeout_s: float = 300.0
) -> Measured:
    """Runs the command under a measuring process of its own; its output goes to `folder`/output.log."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "measured.json"
    with open(folder / "output.log", "wb") as log:
        subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.measure", str(out), str(timeout_s), "--", *command],
            env={**os.environ, **environment, MARKS: str(folder / "marks.jsonl")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
        )
    measured = Measured(**json.loads(out.read_text()))
    if measured.exit_code != 0:
        log_text = (folder / "output.log").read_text(errors="replace")
        raise RuntimeError(f"{' '.join(command)}: exit code {measured.exit_code}\n{log_text[-4000:]}")
    return measured


class _Sampler:
    """Follows a command that this process has started, as the foster parent of all orphans below it."""

    def __init__(self) -> None:
        self.result = Measured()
        self._rank_pids: set[int] = set()
        self._seen: dict[tuple[int, int], float] = {}
        self._most_cpu_s = 0.0

    def run(self, command: Sequence[str], timeout_s: float) -> Measured:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        result, began, began_at = self.result, time.monotonic(), time.time()
        main_pid = os.posix_spawnp(command[0], list(command), dict(os.environ))
        sample_at, kill_at = began, began + timeout_s
        while self._reap(main_pid, began):
            now = time.monotonic()
            if now >= sample_at:
                self._read_marks(began_at)
                result.cpu_curve.append((now - began, self._sample()))
                sample_at = now + _SAMPLE_INTERVAL_S
            if result.exit_s:
                kill_at = min(kill_at, began + result.exit_s + _LEFT_BEHIND_S)
            if now >= kill_at:
                self._kill_all()
            time.sleep(0.01)
        result.gone_s = time.monotonic() - began
        result.cpu_s = self._sample()
        self._read_marks(began_at)
        return result

    def _reap(self, main_pid: int, began: float) -> bool:
        """Takes leave of children that have ended; whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == main_pid:
                self.result.exit_s = time.monotonic() - began
                self.result.exit_code = os.waitstatus_to_exitcode(status)

    def _sample(self) -> float:
        """CPU-seconds so far: the kernel's sum over processes that were waited for, or, where that is less,
        what each process was last seen with. Ray's daemons do not wait for their children, whose time is then
        missing from the first; short-lived processes are from the second."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        waited_for_s = usage.ru_utime + usage.ru_stime
        for pid, process in _descendants().items():
            waited_for_s += process.cpu_s + process.children_cpu_s
            self._seen[pid, process.started] = process.cpu_s
            if pid in self._rank_pids:
                self.result.memory[str(pid)] = peak_memory(pid) or self.result.memory.get(str(pid), {})
        self._most_cpu_s = max(self._most_cpu_s, waited_for_s, sum(self._seen.values()))
        return self._most_cpu_s

    def _read_marks(self, began_at: float) -> None:
        path = Path(os.environ.get(MARKS, os.devnull))
        lines = path.read_text().splitlines() if path.is_file() else []
        marks = [json.loads(line) for line in lines]
        self.result.marks = [{**mark, "time_s": mark["time_s"] - began_at} for mark in marks]
        self._rank_pids = {mark["pid"] for mark in marks if mark["event"] == "rank"}

    def _kill_all(self) -> None:
        for pid, process in _descendants().items():
            self.result.left_behind.append(process.name)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


class _Process(NamedTuple):
    """started: in clock ticks, so that with the pid it is unique; children_cpu_s: of those waited for."""

    parent: int
    name: str
    started: int
    cpu_s: float
    children_cpu_s: float


def _descendants() -> dict[int, _Process]:
    """Every process below this one, by pid."""
    processes: dict[int, _Process] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue
        # The name is in brackets and may hold anything, brackets too; the numbers after it start at field 3.
        name, numbers = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        user, system, children_user, children_system = (int(number) * _TICK_S for number in numbers[11:15])
        processes[int(entry)] = _Process(
            int(numbers[1]), name, int(numbers[19]), user + system, children_user + children_system
        )
    found: dict[int, _Process] = {}
    below = {os.getpid()}
    while below:
        below = {pid for pid, process in processes.items() if process.parent in below and pid not in found}
        found |= {pid: processes[pid] for pid in below}
    return found


if __name__ == "__main__":
    _out, _timeout_s, _dashes, *_command = sys.argv[1:]
    Path(_out).write_text(json.dumps(asdict(_Sampler().run(_command, float(_timeout_s)))))
