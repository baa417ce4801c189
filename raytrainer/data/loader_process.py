"""A loader worker's life: it starts for certain, ends with its parent, and its death is explained."""

from __future__ import annotations

import gc
import multiprocessing.connection
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from raytrainer.errors import RaytrainerError, WorkerLostError

# How long the loader workers of each attempt have until their first line of Python.
_START_LIMITS_S = (5, 10, 20, 40)


class _Start(NamedTuple):
    """What a loader worker that is forked now finds in its copy of the parent's memory."""

    report_to: int  # the pipe's end to which it writes one byte, its first act
    collects_garbage: bool


_starting: _Start | None = None


def start_loader_workers(make: Callable[[], Any], close: Callable[[], None]) -> Any:
    """Returns make(), an iterator of a DataLoader, once the loader workers it forked are at work.

    Forking a process with threads of other languages, as a process group has, leaves a worker in two dangers.
    Such a thread may hold a lock in that moment, in some versions one of Python's own, and the worker waits
    for it for ever, before its first line: it is closed and made again. And the worker has a copy of its
    parent's garbage without the threads and devices behind it: to destroy a process group there crashes it,
    so it starts with the collector off and never looks at what it inherited.

    close: ends the workers of the last iterator made. Raises WorkerLostError when they did not start in four
    attempts.
    """
    for limit_s in _START_LIMITS_S:
        with _reports() as reports:
            batches = make()
            workers = list(getattr(batches, "_workers", ()))
            if _all_report(reports, workers, limit_s):
                return batches
        close()
        for worker in workers:
            worker.kill()
            worker.join()
    raise lost_loader_worker(f"the loader workers did not start in {sum(_START_LIMITS_S)} s")


@contextmanager
def _reports() -> Iterator[int]:
    global _starting
    reports, report_to = os.pipe()
    _starting = _Start(report_to, gc.isenabled())
    gc.disable()
    try:
        yield reports
    finally:
        if _starting.collects_garbage:
            gc.enable()
        _starting = None
        os.close(report_to)
        os.close(reports)


def _all_report(reports: int, workers: Sequence[BaseProcess], limit_s: float) -> bool:
    """Whether each worker reports, or has died, which the iterator's next batch explains, within limit_s."""
    deadline = time.monotonic() + limit_s
    missing = len(workers)
    while missing > 0:
        sentinels = [worker.sentinel for worker in workers]
        ready = multiprocessing.connection.wait([reports, *sentinels], max(0, deadline - time.monotonic()))
        if reports in ready:
            missing -= len(os.read(reports, missing))
        else:
            return bool(ready)
    return True


def begin_loader_worker(worker_id: int) -> None:
    """Runs at the start of a loader worker, as its `worker_init_fn`."""
    if _starting is not None:
        os.write(_starting.report_to, b"1")
        gc.freeze()
        if _starting.collects_garbage:
            gc.enable()
    _exit_with_parent()


def _exit_with_parent() -> None:
    """Has this process exit as soon as its parent is gone.

    torch's own watchdog looks every 5 s, and only between batches; then the worker could still wait at its
    exit for somebody to read its last batch. Where the system has no pidfd, that watchdog is all there is.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or not hasattr(os, "pidfd_open"):
        return
    try:
        parent_fd = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        return
    threading.Thread(target=_exit_when_readable, args=(parent_fd,), daemon=True).start()


def _exit_when_readable(parent_fd: int) -> None:
    poll = select.poll()
    poll.register(parent_fd, select.POLLIN)
    poll.poll()
    os._exit(1)


def explain_loader_error(error: RuntimeError) -> RaytrainerError | None:
    """Returns what a RuntimeError of torch's DataLoader means, or None when it is another one.

    torch may raise these from its SIGCHLD handler in any line of the main thread, so the trainer asks too.
    """
    text = str(error)
    killed = re.search(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([^.]+)", text)
    if killed:
        pid, signal_name = killed.groups()
        cause = "probably the host ran out of memory" if signal_name.strip() == "Killed" else "see its output"
        if "Bus error" in text:
            cause = "probably /dev/shm is full"
        return WorkerLostError(
            f"loader worker {pid} was killed by a signal: {signal_name.strip()}\n  {cause}\n"
            "  fewer data.loader.num_workers, a smaller prefetch_factor or micro_batch_size take less memory"
        )
    exited = re.search(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) exited unexpectedly", text)
    if exited:
        return lost_loader_worker(f"loader worker {exited.group(1)} exited in the middle of its work")
    timed_out = re.search(r"DataLoader timed out after (\S+) seconds", text)
    if timed_out:
        return WorkerLostError(
            f"no batch came from the loader workers for {timed_out.group(1)} s (data.loader.timeout_s)\n"
            "  the storage hangs, or a sample takes longer than that; raise timeout_s, or 0 for no limit"
        )
    return None


def lost_loader_worker(what: str) -> WorkerLostError:
    """Returns the error for a loader worker that ended for a reason that nobody told."""
    return WorkerLostError(
        f"{what}\n  the data set called exit, or the process was killed (probably for memory)\n"
        "  data.loader.num_workers: 0 runs the data set in the train worker and shows its own error"
    )
