"""Contenders take turns: each is started once and parked, then given blocks of steps while the others wait.

On a busy machine of few cores two loops can only be compared within seconds of each other. A rank calls
`Turns.step` before each of its steps; at the end of a block that call tells the coordinator how long the
block took and waits for the next one. A block lasts from the first rank's start to the last one's end.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.benchmarks.measure import process_cpu_s

ADDRESS, NAME = "BENCH_TURNS", "BENCH_NAME"
_TIMEOUT_S = 300.0


class Turns:
    """A rank's side: `step` before every step; costs two attribute reads inside a block."""

    def __init__(self) -> None:
        self._left = 0
        self._started: _Reading | None = None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(os.environ[ADDRESS])
            self._stream = connection.makefile("rw")
        self._send(name=os.environ[NAME], pid=os.getpid())

    def step(self) -> None:
        if self._left == 0:
            self._next_block()
        self._left -= 1

    def _next_block(self) -> None:
        if self._started is not None:
            ended = _Reading.now()
            self._send(
                started=self._started.wall_s,
                ended=ended.wall_s,
                cpu_s=ended.cpu_s - self._started.cpu_s,
                page_faults=ended.page_faults - self._started.page_faults,
            )
        line = self._stream.readline()
        if not line:
            raise ConnectionError("the coordinator has gone")
        self._left = json.loads(line)["steps"]
        self._started = _Reading.now()

    def _send(self, **message: Any) -> None:
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()


class NoTurns:
    """What a rank calls when there is no coordinator."""

    def step(self) -> None:
        """Nothing to wait for."""


def join_turns() -> Turns | NoTurns:
    return Turns() if ADDRESS in os.environ else NoTurns()


class _Reading(NamedTuple):
    """cpu_s: of this process, all its threads and its loader workers, those that have ended too; page_faults:
    how often the kernel had to give this process a page of memory."""

    wall_s: float
    cpu_s: float
    page_faults: int

    @classmethod
    def now(cls) -> _Reading:
        alive = sum(process_cpu_s(child.pid) for child in multiprocessing.active_children())
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = time.process_time() + alive + ended.ru_utime + ended.ru_stime
        return cls(time.perf_counter(), cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


@dataclass(frozen=True)
class Block:
    """A block of steps: wall_s over all ranks; cpu_s, page_faults: of all ranks together."""

    num_steps: int
    wall_s: float
    cpu_s: float
    page_faults: int


@dataclass
class _Started:
    process: subprocess.Popen[bytes]
    ranks: list[IO[str]] = field(default_factory=list)


class Coordinator:
    """Starts contenders one after another and gives them blocks. Leaving it ends those that still run."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._address = str(folder / "turns.sock")
        self._contenders: dict[str, _Started] = {}

    def __enter__(self) -> Coordinator:
        if threading.current_thread() is threading.main_thread():
            # So that `with` ends the contenders then too.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._address)
        self._listener.listen()
        self._listener.settimeout(1.0)
        return self

    def start(self, name: str, command: Sequence[str], num_ranks: int, environment: dict[str, str]) -> None:
        """Returns when all its ranks stand before their first step."""
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment, ADDRESS: self._address, NAME: name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started = self._contenders[name] = _Started(process)
        give_up_at = time.monotonic() + _TIMEOUT_S
        while len(started.ranks) < num_ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if process.poll() is None and time.monotonic() < give_up_at:
                    continue
                raise self._failure(name) from None
            connection.settimeout(_TIMEOUT_S)
            with connection:
                stream = connection.makefile("rw")
            assert json.loads(stream.readline())["name"] == name, "another contender answered"
            started.ranks.append(stream)

    def block(self, name: str, num_steps: int) -> Block:
        """Has the contender do `num_steps` steps while the others wait."""
        for stream in self._contenders[name].ranks:
            stream.write(json.dumps({"steps": num_steps}) + "\n")
            stream.flush()
        done = []
        for stream in self._contenders[name].ranks:
            line = stream.readline()
            if not line:
                raise self._failure(name)
            done.append(json.loads(line))
        wall_s = max(rank["ended"] for rank in done) - min(rank["started"] for rank in done)
        cpu_s, page_faults = (sum(rank[key] for rank in done) for key in ("cpu_s", "page_faults"))
        return Block(num_steps, wall_s, cpu_s, page_faults)

    def rounds(
        self, names: Sequence[str], num_rounds: int, block_steps: int, warm_up_steps: int
    ) -> dict[str, list[Block]]:
        """Every contender's blocks by round, in another order each round; the warm-up before does not count.

        The contenders must be made for `num_steps_of` these numbers; the last step is theirs to end with.
        """
        order, blocks = random.Random(0), {name: [] for name in names}
        for name in names:
            self.block(name, warm_up_steps)
        for _ in range(num_rounds):
            for name in order.sample(list(names), len(names)):
                blocks[name].append(self.block(name, block_steps))
        for name in names:
            self._finish(name)
        return blocks

    def _finish(self, name: str) -> None:
        """Gives the contender its last step, and waits until its command has ended."""
        started = self._contenders[name]
        for stream in started.ranks:
            stream.write('{"steps": 1}\n')
            stream.flush()
        try:
            exit_code = started.process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise self._failure(name) from None
        if exit_code != 0:
            raise self._failure(name)

    def _failure(self, name: str) -> RuntimeError:
        log = (self._folder / f"{name}.log").read_text(errors="replace")
        exit_code = self._contenders[name].process.poll()
        return RuntimeError(f"{name} failed (exit code {exit_code}); the end of its log:\n{log[-4000:]}")

    def __exit__(self, *exc_info: object) -> None:
        for started in self._contenders.values():
            for stream in started.ranks:
                stream.close()
            if started.process.poll() is None:
                os.killpg(started.process.pid, signal.SIGTERM)
                try:
                    started.process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(started.process.pid, signal.SIGKILL)
                    started.process.wait()
        self._listener.close()


def num_steps_of(num_rounds: int, block_steps: int, warm_up_steps: int) -> int:
    """How many steps a contender does in `Coordinator.rounds`."""
    return warm_up_steps + num_rounds * block_steps + 1


def torchrun(module: str, num_ranks: int, *arguments: str) -> list[str]:
    """The command that starts `module` once a rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [sys.executable, *launcher, "-m", module, *arguments]
