"""A loader worker's life: it ends with the process that started it, and its death is explained."""

from __future__ import annotations

import multiprocessing
import os
import re
import select
import threading

from raytrainer.errors import RaytrainerError, WorkerLostError


def exit_with_parent(worker_id: int) -> None:
    """Runs at the start of a loader worker: the worker exits as soon as its parent is gone.

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
