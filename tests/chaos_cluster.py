"""The chaos of `python -m tests.chaos --ray`: a local Ray cluster of several nodes, a worker on each.

The cluster lives in the command's process, the training in a driver of its own, which asks for nodes to come
and go through a FIFO.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from raytrainer import elastic
from raytrainer.cluster import sizes
from raytrainer.cluster.run import run as run_config
from tests import chaos

DRAIN_NOTICE_S = 60


class Nodes:
    """Worker nodes with one CPU each, beside a head that has none."""

    def __init__(self, number: int):
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self._nodes = [self._cluster.add_node(num_cpus=1) for _ in range(number)]

    @property
    def address(self) -> str:
        return self._cluster.address

    def join(self) -> None:
        self._nodes.append(self._cluster.add_node(num_cpus=1))

    def kill(self) -> None:
        self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)

    def drain(self) -> None:
        """Tells Ray that a node will be gone after a notice, as a cloud does with a preempted machine."""
        from ray._raylet import GcsClient

        node = self._nodes.pop()
        deadline_ms = int((time.time() + DRAIN_NOTICE_S) * 1000)
        accepted, why = GcsClient(address=self.address).drain_node(node.node_id, 2, "chaos", deadline_ms)
        assert accepted, why

    def close(self) -> None:
        self._cluster.shutdown()


class DisturbanceOnRay(chaos.Disturbance):
    """In the driver; has the command do what only the cluster's owner can."""

    def carry_out(self, due: chaos.Event, gate: Path, record: dict) -> None:
        if due.kind in ("a node joins", "a node is drained"):
            self.gate = gate
        else:
            gate.unlink()
        if due.kind == "kill the driver":
            os.kill(os.getpid(), signal.SIGKILL)
        elif due.kind in ("kill a worker", "kill rank 0"):
            rank = 0 if due.kind == "kill rank 0" else record["world_size"] - 1
            os.kill(int((self.folder / f"pid_{rank}").read_text()), signal.SIGKILL)
        else:
            (self.folder / "wishes").write_text(due.kind)


def drive(folder: Path, address: str) -> None:
    """Runs the training in this process, which may be one of those that are killed."""
    from raytrainer.cluster.ray_link import DriverLink
    from raytrainer.cluster.signals import RESIZE

    disturb = DisturbanceOnRay(folder)
    request_stop = DriverLink.request_stop

    def request_and_open(link, reason) -> None:
        request_stop(link, reason)
        if reason == RESIZE:
            disturb.open_gate()

    DriverLink.request_stop = request_and_open
    # A restart of seconds never pays for a training of seconds.
    decide = elastic.decide
    sizes.decide = lambda now: decide(chaos.replace(now, restart_s=0.0))
    size = f"{{min: 1, max: {chaos.MAX_WORKERS}}}"
    more = [f"ray.address='{address}'", "scaling.grow_within_s=3"]
    chaos.note_begin(folder)
    run_config(chaos.build(folder, "disturbed", size, *more), observer=disturb)


@contextmanager
def _granting(folder: Path, nodes: Nodes) -> Iterator[Callable[[subprocess.Popen], int]]:
    """Gives a function that waits for a driver and does meanwhile what it asks for."""
    wishes = folder / "wishes"
    os.mkfifo(wishes)
    grants = {"a node joins": nodes.join, "kill a node": nodes.kill, "a node is drained": nodes.drain}

    def wait(driver: subprocess.Popen) -> int:
        # Ray starts nodes in the main thread only: another one waits for the driver's end.
        def tell_end() -> None:
            driver.wait()
            wishes.write_text("over")

        ending = threading.Thread(target=tell_end)
        ending.start()
        while (wish := wishes.read_text()) != "over":
            grants[wish.removesuffix("over")]()
            if wish.endswith("over"):
                break
        ending.join()
        return driver.returncode

    yield wait


def run_seed(folder: Path, seed: int, num_events: int) -> tuple[str, bool]:
    """As `tests.chaos.run_seed`."""
    first, events = chaos.schedule_on_ray(seed, num_events)
    (folder / "plan.json").write_text(json.dumps([asdict(event) for event in events]))
    for event in events:
        os.mkfifo(folder / f"gate_{event.step}")
    nodes = Nodes(first)
    command = [sys.executable, "-m", "tests.chaos", "--drive", str(folder), "--address", nodes.address]
    try:
        with _granting(folder, nodes) as wait:
            wrong = chaos.drive_to_the_end(folder, lambda: wait(subprocess.Popen(command)))
    finally:
        nodes.close()
    if wrong:
        return f"seed {seed}: {wrong}", False
    alone = run_config(chaos.build(folder, "undisturbed", first), local=True)
    return chaos.judge(folder, seed, first, events, alone)
