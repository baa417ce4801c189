"""All trials of one machine: starts them, carries their output, measures and ends them, on one thread.

The local backend has one of these, and on Ray an actor on each node. What happens is told in plain mappings,
so that it travels.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from raytrainer.cluster.mps import MpsDaemon
from raytrainer.cluster.pack_process import TrialProcess, TrialStart
from raytrainer.pack.cause import TrialEnd
from raytrainer.pack.machines import MachineFacts
from raytrainer.pack.share import usable_cores

# How often sizes are measured, metrics files read and time-outs looked at.
LOOK_S = 0.5
# A trial that has reported nothing by then is asked for among the clients of MPS all the same.
MPS_S = 30.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class TrialHost:
    """The trials that run on this machine. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, TrialProcess] = {}
        self._ooms: dict[int, int | None] = {}
        self._news: list[dict[str, Any]] = []
        self._has_news = threading.Event()
        self._closed = False
        self._mps: MpsDaemon | None = None
        self._not_seen_at_mps: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._next_look_s = time.monotonic() + LOOK_S
        self._thread = threading.Thread(target=self._run, name="raytrainer-trials", daemon=True)
        self._thread.start()

    def start(self, start: TrialStart) -> None:
        """Start a trial; that it could not be is told as its end."""
        if start.mps:
            start = self._with_mps(start)
        try:
            process = TrialProcess(start)
        except OSError as error:
            end = TrialEnd(127, error=f"{start.command[0]}: {error.strerror or error}")
            self._tell({"trial": start.trial, "end": end, "time_s": 0.0})
            return
        with self._lock:
            self._running[start.trial] = process
            self._ooms[start.trial] = oom_kills()
            self._selector.register(process.pipe, selectors.EVENT_READ, (process, "pipe"))
            self._selector.register(process.process, selectors.EVENT_READ, (process, "control"))
        self._wake()

    def _with_mps(self, start: TrialStart) -> TrialStart:
        """The first of them starts the daemon."""
        self._mps = self._mps or MpsDaemon()
        if not self._mps.environment:
            self._tell({"trial": start.trial, "mps": self._mps.why})
            return start
        self._not_seen_at_mps.add(start.trial)
        return replace(start, environment={**start.environment, **self._mps.environment})

    def end(self, trial: int, reason: str, number: int, grace_s: float | None = None) -> None:
        """Send a trial a signal; after grace_s, kill it."""
        with self._lock:
            if trial in self._running:
                self._running[trial].end(reason, number, grace_s)
        self._wake()

    def news(self, timeout_s: float) -> list[dict[str, Any]]:
        """What has happened since the last call, waiting for it: mappings with "trial" and more.

        "records", "times_s" (when each came), "rss_gib", "time_s" of one that runs; "mps", "" when MPS serves
        it, else why not; "end", a TrialEnd, is in the last of a trial.
        """
        self._has_news.wait(timeout_s)
        with self._lock:
            self._has_news.clear()
            news, self._news = self._news, []
        return news

    def close(self) -> None:
        """End all trials at once; nothing of them is left."""
        with self._lock:
            self._closed = True
        self._wake()
        self._thread.join()
        if self._mps is not None:
            self._mps.close()
        self._wake_read.close()
        self._wake_write.close()

    # The thread

    def _run(self) -> None:
        while True:
            ready = self._selector.select(self._wait_s())
            with self._lock:
                if self._closed:
                    break
                for key, _ in ready:
                    self._take(key)
                if time.monotonic() >= self._next_look_s:
                    self._next_look_s = time.monotonic() + LOOK_S
                    self._look()
                ended = [process for process in self._running.values() if process.has_ended()]
                for process in ended:
                    self._conclude(process)
        for process in self._running.values():
            process.close()
        self._selector.close()

    def _wait_s(self) -> float | None:
        with self._lock:
            if not self._running:
                return None
            lefts = [left for process in self._running.values() if (left := process.left_s) is not None]
        return max(0.0, min([self._next_look_s - time.monotonic(), *lefts]))

    def _take(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            self._wake_read.recv(4096)
            return
        process, what = key.data
        if what == "control":
            process.process.read()
            return
        process.read_output()
        if process.pipe is None:
            self._selector.unregister(key.fd)

    def _look(self) -> None:
        sizes = resident_gib({p.supervisor_pid: p.start.rss_cap_gib for p in self._running.values()})
        for process in self._running.values():
            process.measured(sizes.get(process.supervisor_pid, 0.0))
            process.look()
            if process.start.trial in self._not_seen_at_mps and (process.records or process.time_s > MPS_S):
                self._look_for_client(process)
            self._add_news(
                {
                    "trial": process.start.trial,
                    **process.take_records(),
                    "rss_gib": process.rss_gib,
                    "time_s": process.time_s,
                }
            )

    def _look_for_client(self, process: TrialProcess) -> None:
        """Once a trial: by its first report it has used the card."""
        self._not_seen_at_mps.discard(process.start.trial)
        served = self._mps.serves(process.supervisor_pid)
        why = "" if served else "it is none of the daemon's clients"
        self._add_news({"trial": process.start.trial, "mps": why})

    def _conclude(self, process: TrialProcess) -> None:
        trial, start = process.start.trial, process.start
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.data[0] is process:
                self._selector.unregister(key.fileobj)
        process.close()
        before, after = self._ooms.pop(trial), oom_kills()
        script = process.process
        peak_gib = max(process.peak_gib, script.rss_gib or 0.0)
        end = TrialEnd(
            script.returncode,
            process.tail,
            process.killed_for,
            peak_gib,
            start.rss_cap_gib,
            start.timeout_s,
            None if before is None or after is None else after - before,
            script.error,
            "its supervisor process was killed" if script.lost and process.killed_for is None else None,
        )
        del self._running[trial]
        self._add_news({"trial": trial, **process.take_records(), "end": end, "time_s": process.time_s})

    def _tell(self, news: dict[str, Any]) -> None:
        with self._lock:
            self._add_news(news)

    def _add_news(self, news: dict[str, Any]) -> None:
        self._news.append(news)
        self._has_news.set()

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_write.send(b"w")


def resident_gib(roots: dict[int, float]) -> dict[int, float]:
    """The resident size of all processes below each supervisor, in GiB. roots: its cap by supervisor.

    One pass over /proc for all. Pages that processes share are counted once each time; where that comes to
    more than the cap, it is measured again with shared pages shared out.
    """
    parents, pages = {}, {}
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return {}
    for name in names:
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            parents[int(name)], pages[int(name)] = int(fields[1]), int(fields[21])
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    sizes = {}
    for root, cap_gib in roots.items():
        # Below the root is the supervisor itself, and below that the trial.
        found = [pid for child in children.get(root, ()) for pid in _below(child, children)]
        sizes[root] = sum(pages[pid] for pid in found) * _PAGE_BYTES / 2**30
        if sizes[root] > cap_gib:
            sizes[root] = sum(_shared_out_gib(pid, pages[pid]) for pid in found)
    return sizes


def _below(pid: int, children: dict[int, list[int]]) -> list[int]:
    found, waiting = [], list(children.get(pid, ()))
    while waiting:
        each = waiting.pop()
        found.append(each)
        waiting += children.get(each, ())
    return found


def _shared_out_gib(pid: int, resident_pages: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 2**20
    except (OSError, ValueError):
        pass
    return resident_pages * _PAGE_BYTES / 2**30


def oom_kills() -> int | None:
    """How often the kernel has killed for memory in this cgroup, or on this machine; None where not told."""
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return None


def machine_facts() -> MachineFacts:
    """What this machine has, within affinity, cgroup and CUDA_VISIBLE_DEVICES. Loads no torch."""
    import psutil

    cpu_max = limit = shm = None
    with suppress(OSError):
        cpu_max = Path("/sys/fs/cgroup/cpu.max").read_text().strip()
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    with suppress(OSError):
        shm = shutil.disk_usage("/dev/shm").free / 2**30
    total = psutil.virtual_memory().total
    return MachineFacts(
        usable_cores(cpu_max), min(total, limit or total) / 2**30, shm, tuple(_gpus()), _torch_version()
    )


def _torch_version() -> str | None:
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[tuple[str, float]]:
    """(index or UUID, GiB) of the cards that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" or shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    cards = {}
    for line in answer.splitlines():
        index, uuid, mib = (part.strip() for part in line.split(","))
        with suppress(ValueError):
            cards[index] = cards[uuid] = int(mib) / 1024
    names = [name for name in cards if name.isdigit()] if visible is None else visible.split(",")
    return [(name.strip(), cards[name.strip()]) for name in names if name.strip() in cards]
