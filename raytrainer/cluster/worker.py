"""What the process of one rank does, on Ray or started by `raytrainer run --local`.

Run as a file (`python worker.py --rank=0 ...`) it is a rank of the local backend: it talks to the process
that started it over a socket, and ends with its whole process group when that process is gone. Heavy imports
wait until the rank's environment is set.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Started with -P, so that nothing in this folder or the working directory hides a standard module.
    _root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if _root not in sys.path:
        sys.path.insert(0, _root)
    from raytrainer.cluster.worker import main

    main(sys.argv[1:])

import importlib
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TextIO

from raytrainer.cluster.channel import Channel
from raytrainer.cluster.signals import StopSignal, stop_on_signals
from raytrainer.errors import show_warnings_in_one_line

Observer = Callable[[dict], None]

DEFAULT_ENTRY = "raytrainer.cluster.worker:train_rank"


class Place(NamedTuple):
    """Where a rank stands; the fields of `raytrainer.distributed.Process`, which imports torch."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


def run_rank(payload: dict, process, observer: Observer | None, stop: StopSignal) -> dict:
    """Prepare this process for rank `process.rank` and train in it; returns plain values.

    payload: what `prepare` reads; `log_dir` (takes over stdout and stderr unless None); `entry`
    ("module:function", called with the arguments of this function; `train_rank` by default); and what the
    entry reads. process: has the fields of `Place`.
    Raises whatever the training raises; `outcome.describe_exception` tells what it means.
    """
    prepare(payload, process.local_world_size)
    if payload.get("log_dir"):
        redirect_output(Path(payload["log_dir"]) / f"rank_{process.rank}.log")
    with _output_to(observer if process.rank == 0 else None):
        module, _, function = payload.get("entry", DEFAULT_ENTRY).partition(":")
        return getattr(importlib.import_module(module), function)(payload, process, observer, stop)


def prepare(payload: dict, local_world_size: int) -> None:
    """Set up what imports depend on; safe to repeat.

    payload: `import_paths` (folders for sys.path), `env` (values that the process does not have yet).
    """
    for path in reversed(payload.get("import_paths", [])):
        if path not in sys.path:
            sys.path.insert(0, path)
    for name, value in payload.get("env", {}).items():
        os.environ.setdefault(name, value)
    limit_threads(local_world_size)
    show_warnings_in_one_line()


def train_rank(payload: dict, process, observer: Observer | None, stop: StopSignal) -> dict:
    """The usual entry: the config, trained by `Trainer` in the run directory that the driver has opened.

    payload: `config` (`Config.payload()`), `run_dir` (its root and token), `started_at` (Unix time, s).
    """
    from dataclasses import asdict

    from raytrainer.config import Config
    from raytrainer.deferred import defer_compiler
    from raytrainer.distributed import Process
    from raytrainer.rundir import RunDirectory
    from raytrainer.trainer import Trainer

    store_fd = payload.get("store_fd")
    store = host_store(store_fd) if store_fd is not None and process.world_size > 1 else None
    config = Config.from_payload(payload["config"])
    if not config.training.compile:
        defer_compiler()
    trainer = Trainer(
        config,
        process=Process(*process) if isinstance(process, tuple) else process,
        observer=observer,
        stop=stop,
        run_dir=RunDirectory(*payload["run_dir"]),
        started_at=payload.get("started_at"),
    )
    result = asdict(trainer.train())
    if result["status"] == "stopped":
        result["stop_reason"] = stop.requested
    del store  # it served the others until here
    return result


def host_store(listen_fd: int):
    """Serve the store of this rank's group on a socket that listens already; keep what is returned.

    The socket comes from the process that started the group, so no other run can take its port in between.
    """
    from torch.distributed import TCPStore

    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def usable_cores() -> int:
    """The cores that this process may use: its affinity, further limited by a cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def limit_threads(local_world_size: int) -> None:
    """Share this machine's cores among its ranks, unless OMP_NUM_THREADS says otherwise.

    Without it each rank starts a thread for every core, and W of them slow each other down.
    """
    count = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // local_world_size)))
    if "torch" in sys.modules and count.isdecimal():
        # torch has read the variable already.
        sys.modules["torch"].set_num_threads(int(count))


def redirect_output(path: Path) -> None:
    """Append this process's stdout and stderr, native code's included, to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


class _output_to:
    """While open, whole lines written to sys.stdout and sys.stderr go to `observer` too, as output records.

    Both streams write by line, so that what a log file holds is in order and whole up to a sudden end.
    """

    def __init__(self, observer: Observer | None):
        self._observer = observer
        self._before = (sys.stdout, sys.stderr)

    def __enter__(self) -> None:
        for stream in self._before:
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(line_buffering=True)
        if self._observer:
            sys.stdout = _Copied(sys.stdout, "stdout", self._observer)
            sys.stderr = _Copied(sys.stderr, "stderr", self._observer)

    def __exit__(self, *exc_info: object) -> None:
        if self._observer:
            sys.stdout.end_line()
            sys.stderr.end_line()
        sys.stdout, sys.stderr = self._before


class _Copied:
    """A text stream whose whole lines are also given to an observer."""

    def __init__(self, stream: TextIO, name: str, observer: Observer):
        self._stream = stream
        self._name = name
        self._observer = observer
        self._line = ""

    def write(self, text: str) -> int:
        count = self._stream.write(text)
        head, newline, rest = text.rpartition("\n")
        if newline:
            self._observer({"output": self._line + head, "stream": self._name})
            self._line = ""
        self._line += rest
        if "\r" in rest:
            # A progress bar redraws one line for ever.
            self._line = self._line[self._line.rindex("\r") + 1 :]
        return count

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def end_line(self) -> None:
        if self._line:
            self._observer({"output": self._line, "stream": self._name})
            self._line = ""

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def main(arguments: list[str]) -> None:
    """Run one rank of the local backend; arguments: `--name=integer`, from `rank_process`."""
    import faulthandler
    import io
    import pickle
    import socket

    given = {name: int(value) for name, _, value in (text[2:].partition("=") for text in arguments)}
    end_with_parent(given["life-fd"])
    faulthandler.enable()
    channel = Channel(socket.socket(fileno=given["control-fd"]))
    os.set_inheritable(given["control-fd"], False)
    stop = StopSignal()
    ended = threading.Event()
    threading.Thread(target=_follow_parent, args=(channel, stop, ended), daemon=True).start()
    world_size = given["world-size"]
    place = Place(given["rank"], world_size, given["rank"], world_size, 0)

    def observe(record: dict) -> None:
        channel.send({"record": record}, droppable="event" not in record)

    def run() -> dict:
        parts = io.BytesIO(os.pread(given["payload-fd"], given["payload-size"], 0))
        # First what is needed to unpickle the rest, in which objects of the user's may be.
        prepare(pickle.load(parts), world_size)
        payload = pickle.load(parts)
        return run_rank({**payload, "store_fd": given.get("store-fd")}, place, observe, stop)

    with stop_on_signals(stop), stop.listening(lambda: _end_if_insisted(stop)):
        code = _report(channel, run, place.rank)
    ended.set()
    channel.flush()
    raise SystemExit(code)


def end_with_parent(life_fd: int) -> None:
    """Have this process group killed when the far end of the pipe `life_fd` closes; nobody writes to it.

    On Linux the kernel sends the signal to the whole group itself: it reaches loader workers too, and needs
    no Python thread, which a native call that holds the interpreter would keep from running. Elsewhere only
    `_follow_parent` watches. PR_SET_PDEATHSIG covers a copy of the pipe's end in some fork of the parent;
    alone it would not do, since it reaches this process only.
    """
    import fcntl

    os.set_inheritable(life_fd, False)
    os.set_blocking(life_fd, False)
    if hasattr(fcntl, "F_SETSIG"):
        import ctypes

        fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    try:
        gone = os.read(life_fd, 1) == b""
    except BlockingIOError:
        gone = False
    if gone:
        os.killpg(0, signal.SIGKILL)


def _follow_parent(channel: Channel, stop: StopSignal, ended: threading.Event) -> None:
    """Act on what the parent says until it is gone; then end the whole process group."""
    while not channel.closed:
        for message in channel.receive(wait=True):
            if "stop" in message:
                stop.request(message["stop"])
            elif "abort" in message:
                threading.Thread(target=_show_stacks, args=(ended, message["abort"]), daemon=True).start()
    os.killpg(0, signal.SIGKILL)


def _show_stacks(ended: threading.Event, timeout_s: float) -> None:
    """Another rank failed, and this one is killed unless it ends too: leave in its log where it stood."""
    if not ended.wait(timeout_s):
        import faulthandler

        # Past sys.stderr, which rank 0 shows on the console: this is for the log alone.
        os.write(2, b"another rank failed, and this one did not end by itself; where it stands:\n")
        faulthandler.dump_traceback(file=2)


def _end_if_insisted(stop: StopSignal) -> None:
    if stop.immediate:
        number = signal.Signals[stop.requested]
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _report(channel: Channel, run: Callable[[], dict], rank: int) -> int:
    """Send what `run` returns or raises to the parent; returns the process's exit code."""
    try:
        channel.send({"result": run()})
    except BaseException as exc:  # whatever ends a rank is reported, sys.exit and Ctrl-C too
        import traceback

        from raytrainer.cluster.outcome import describe_exception

        traceback.print_exc()
        failure = describe_exception(exc, rank)
        channel.send({"failure": failure.to_dict()})
        return failure.exit_code or 1
    return 0
