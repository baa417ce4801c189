"""What a running rank and the driver tell each other: records one way, a request to stop the other.

Both go through the cluster's key-value store, put and polled by threads in the background: a step never waits
for them, and no further process is needed. Nothing is left in the store after the run.
"""

from __future__ import annotations

import os
import pickle
import queue
import resource
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from raytrainer.cluster import ray_adapter
from raytrainer.cluster.outcome import describe_exception
from raytrainer.cluster.ray_rescue import answer_rescues
from raytrainer.cluster.signals import RESIZE, StopSignal
from raytrainer.cluster.survivor import Survivor

POLL_S = 0.1
# A rank's resident size, in case it is killed for it.
MEMORY_POLL_S = 2.0
# Metrics that the driver has not fetched by then are dropped; events never are.
MAX_PENDING_RECORDS = 10_000


@dataclass(frozen=True)
class Keys:
    """Names in the key-value store. prefix: of this run; attempt: how often its ranks were started before."""

    prefix: str
    attempt: int

    def batch(self, number: int) -> str:
        return f"{self.prefix}/records/{self.attempt}/{number}"

    def memory(self, rank: int) -> str:
        return f"{self.prefix}/memory/{self.attempt}/{rank}"

    @property
    def stop(self) -> str:
        return f"{self.prefix}/stop/{self.attempt}"


def run_linked(payload: dict, place: tuple, link: dict, rescues: socket.socket) -> dict:
    """Runs a rank in this process: {"result": dict} or {"failure": RankFailure as a dict}; raises nothing.

    rescues: where the driver asks for what this rank holds, until the process is ended.
    """
    from raytrainer.cluster.worker import Place, run_rank

    process = Place(*place)
    choose_interface()
    stop = StopSignal()
    keys, survivor = Keys(**link), Survivor()
    rank_link = RankLink(keys, process.rank, stop)
    answer_rescues(rescues, keys.prefix, survivor)
    try:
        return {"result": run_rank({**payload, "survivor": survivor}, process, rank_link.observe, stop)}
    except BaseException as exc:  # whatever ends a rank is reported, sys.exit too
        traceback.print_exc()
        return {"failure": describe_exception(exc, process.rank).to_dict()}
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        rank_link.close()


def choose_interface() -> None:
    """Has gloo use Ray's network: by default it goes by the host's name, which may not resolve."""
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        return
    node_ip = ray_adapter.node_ip()
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == node_ip for address in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


class RankLink:
    """A rank's end: its thread sends what `observe` is given, and sets `stop` when the driver asks for it."""

    def __init__(self, keys: Keys, rank: int, stop: StopSignal):
        self._keys = keys
        self._rank = rank
        self._stop = stop
        self._records: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._num_batches = 0
        self._memory_gib = 0.0
        self._thread = threading.Thread(target=self._serve, name="raytrainer-link", daemon=True)
        self._thread.start()

    def observe(self, record: dict) -> None:
        """Takes a record without waiting; only rank 0's are passed on."""
        if self._rank != 0:
            return
        if "event" in record or self._records.qsize() < MAX_PENDING_RECORDS:
            self._records.put(record)

    def close(self) -> None:
        """Returns when everything was sent."""
        self._closing.set()
        self._thread.join()

    def _serve(self) -> None:
        num_polls = 0
        while not self._closing.wait(POLL_S):
            self._send_records()
            if num_polls % round(MEMORY_POLL_S / POLL_S) == 0:
                self._send_memory()
            num_polls += 1
            # One rank is enough: the ranks agree on the step at which they stop.
            if self._rank == 0 and self._stop.requested in (None, RESIZE):
                reason = ray_adapter.kv_get(self._keys.stop)
                if reason is not None:
                    self._stop.request(reason.decode())
        self._send_records()

    def _send_records(self) -> None:
        batch = []
        while not self._records.empty():
            batch.append(self._records.get())
        if batch:
            ray_adapter.kv_put(self._keys.batch(self._num_batches), pickle.dumps(batch))
            self._num_batches += 1

    def _send_memory(self) -> None:
        memory_gib = peak_memory_gib()
        if memory_gib > self._memory_gib * 1.05:
            self._memory_gib = memory_gib
            ray_adapter.kv_put(self._keys.memory(self._rank), str(memory_gib).encode())


class DriverLink:
    """The driver's end: hands out rank 0's records in order, to one thread at a time.

    training: the current group has begun to train, so that a stop has something to save.
    """

    def __init__(self, prefix: str, on_record: Callable[[dict], None]):
        self._prefix = prefix
        self._on_record = on_record
        self._lock = threading.Lock()
        self._keys = Keys(prefix, 0)
        self._num_batches = 0
        self.training = False

    @property
    def prefix(self) -> str:
        return self._prefix

    def start_attempt(self, attempt: int) -> None:
        """Reads the records of the group's start number `attempt` from now on."""
        self.poll()
        with self._lock:
            self._keys = Keys(self._prefix, attempt)
            self._num_batches = 0
            self.training = False

    def poll(self) -> None:
        """Hands out what has arrived."""
        with self._lock:
            while (batch := ray_adapter.kv_get(self._keys.batch(self._num_batches))) is not None:
                ray_adapter.kv_delete(self._keys.batch(self._num_batches))
                self._num_batches += 1
                for record in pickle.loads(batch):
                    self.training |= "step" in record or record.get("event") in ("started", "resumed")
                    self._on_record(record)

    def request_stop(self, reason: str) -> None:
        """Asks the current group to stop after its step."""
        ray_adapter.kv_put(self._keys.stop, reason.encode())

    def memory_gib(self, rank: int) -> float | None:
        """The peak resident size that `rank` last told."""
        value = ray_adapter.kv_get(self._keys.memory(rank))
        return None if value is None else float(value)

    def close(self) -> None:
        """Hands out the rest and removes the run's keys."""
        self.poll()
        ray_adapter.kv_delete_prefix(self._prefix + "/")


def peak_memory_gib() -> float:
    """This process's largest resident size so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
