"""The driver's side of a launched script: brings the ranks together, tells them to stop, shows their output.

Every rank connects to it over TCP, on Ray and on this machine alike. It decides nothing about new starts:
that is the backend's, which is told of a failure once all scripts have ended.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from raytrainer.cluster.channel import Channel
from raytrainer.cluster.script_output import CHUNK_BYTES, LOG, STDERR, FrameReader
from raytrainer.cluster.signals import StopSignal

# One rank has ended well and another goes on: worth a word after this long.
NOTICE_S = 30.0
HEADER_BYTES = 32 + 8
CLOSE_S = 5.0


class ConsoleOutput:
    """Where shown output goes: the process's standard output and error, byte by byte.

    A reader that goes away (`| head`) ends the output, not the script.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams = {True: sys.stderr, False: sys.stdout}

    def write(self, kind: bytes, data: bytes) -> None:
        is_error = kind == STDERR
        with self._lock:
            stream = self._streams[is_error]
            if stream is None:
                return
            try:
                if hasattr(stream, "buffer"):
                    stream.buffer.write(data)
                else:
                    stream.write(data.decode(errors="replace"))
                stream.flush()
            except (OSError, ValueError):
                _discard(stream)
                self._streams[is_error] = None

    @property
    def is_separate(self) -> bool:
        """Whether standard output and error lead to different places, so that each needs its own way there.

        Where they lead to the same one, the order between them is what matters.
        """
        try:
            ends = [os.fstat(stream.fileno()) for stream in self._streams.values()]
        except (OSError, ValueError, AttributeError):
            return True
        return (ends[0].st_dev, ends[0].st_ino) != (ends[1].st_dev, ends[1].st_ino)


def _discard(stream: IO) -> None:
    """Send what is in the stream's buffer nowhere, or Python would fail on it once more at exit."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class _Rank:
    """A rank of the current start, as the hub knows it."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.rank: int | None = None
        self.hello: dict = {}
        self.ended = False


class ScriptHub:
    """Use as a context. codes: how each rank's script ended in the latest start, by rank, as `subprocess`
    gives it.

    log_dir: where the logs go of ranks that do not see it; say: takes a sentence for the user.
    """

    def __init__(
        self,
        *,
        local: bool,
        log_dir: Path,
        stop: StopSignal,
        console: ConsoleOutput,
        say: Callable[[str], None],
    ):
        self.token = secrets.token_hex(16)
        self.codes: dict[int, int] = {}
        self.killed = False
        self.hosts = ["127.0.0.1"] if local else own_addresses()
        self._log_dir, self._stop, self._console, self._say = log_dir, stop, console, say
        self._bind = "127.0.0.1" if local else ""
        self._resources = ExitStack()
        self._readers: list[threading.Thread] = []
        self._ranks: dict[int, _Rank] = {}
        self._attempt = -1
        self._started = False
        self._failed = False
        self._notice_at: float | None = None
        self._closing = False

    def __enter__(self) -> ScriptHub:
        self._control, self._outputs = (
            self._resources.enter_context(socket.create_server((self._bind, 0), backlog=4096))
            for _ in range(2)
        )
        self.control_port, self.output_port = (
            server.getsockname()[1] for server in (self._control, self._outputs)
        )
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            self._resources.callback(end.close)
            end.setblocking(False)
        self._selector = self._resources.enter_context(selectors.DefaultSelector())
        for each in (self._control, self._wake_read):
            self._selector.register(each, selectors.EVENT_READ)
        self._resources.enter_context(self._stop.listening(self._wake))
        self._threads = [
            threading.Thread(target=target, name="raytrainer-hub", daemon=True)
            for target in (self._serve, self._accept_outputs)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Returns when all output has been shown."""
        deadline = time.monotonic() + CLOSE_S
        for reader in list(self._readers):
            reader.join(max(0.0, deadline - time.monotonic()))
        self._closing = True
        self._wake()
        # Wakes the thread that waits for connections.
        with suppress(OSError):
            self._outputs.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(CLOSE_S)
        self._resources.close()

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_write.send(b"w")

    # The ranks' control connections

    def _serve(self) -> None:
        while not self._closing:
            timeout_s = None if self._notice_at is None else max(0.0, self._notice_at - time.monotonic())
            for key, _ in self._selector.select(timeout_s):
                if key.fileobj is self._control:
                    connection, _ = self._control.accept()
                    rank = _Rank(Channel(connection))
                    self._resources.callback(rank.channel.close)
                    self._selector.register(rank.channel, selectors.EVENT_READ, rank)
                elif key.fileobj is self._wake_read:
                    with suppress(BlockingIOError):
                        self._wake_read.recv(4096)
                    self._pass_on_stop()
                else:
                    self._read(key.data)
            if self._notice_at is not None and time.monotonic() >= self._notice_at:
                self._notice_at = None
                self._notice()

    def _read(self, rank: _Rank) -> None:
        for message in rank.channel.receive():
            if rank.rank is None:
                if message.get("token") != self.token:
                    self._drop(rank)
                    return
                self._greet(rank, message)
            elif "ended" in message:
                self._note_end(rank, message["ended"])
        if rank.channel.closed:
            self._drop(rank)

    def _drop(self, rank: _Rank) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(rank.channel)
        rank.channel.close()
        if self._ranks.get(rank.rank) is rank and not rank.ended:
            # Lost, before it could say how its script ended.
            rank.ended = True
            self._end_the_others()
            self._close_if_over()

    def _greet(self, rank: _Rank, hello: dict) -> None:
        if hello["attempt"] != self._attempt:
            self._attempt = hello["attempt"]
            self._ranks.clear()
            self.codes = {}
            self._started = self._failed = self.killed = False
        rank.rank, rank.hello = hello["rank"], hello
        self._ranks[rank.rank] = rank
        if self._stop.requested:
            rank.channel.send({"tell": self._stop.requested})
        elif self._failed:
            rank.channel.send({"tell": "end"})
        elif len(self._ranks) == hello["world_size"]:
            self._start()

    def _start(self) -> None:
        ranks = self._ranks.values()
        if any(rank.hello["problem"] for rank in ranks):
            self._tell_all({"tell": "end"})
            return
        first = self._ranks[0].hello
        self._started = True
        self._tell_all({"start": {name: first[name] for name in ("master_addr", "master_port")}})

    def _note_end(self, rank: _Rank, ended: dict) -> None:
        rank.ended = True
        self.codes[rank.rank] = ended["code"]
        self.killed |= ended["killed"]
        if ended["failed"]:
            self._end_the_others()
        self._close_if_over()

    def _end_the_others(self) -> None:
        if not self._failed:
            self._failed = True
            self._tell_all({"tell": "end"})

    def _close_if_over(self) -> None:
        if all(rank.ended for rank in self._ranks.values()):
            self._notice_at = None
            for rank in self._ranks.values():
                rank.channel.send({"close": True})
        elif not self._failed and self._notice_at is None and not self._stop.requested:
            self._notice_at = time.monotonic() + NOTICE_S

    def _tell_all(self, message: dict) -> None:
        for rank in self._ranks.values():
            if not rank.ended:
                rank.channel.send(message)

    def _pass_on_stop(self) -> None:
        if self._stop.requested:
            self._tell_all({"tell": self._stop.requested})

    def _notice(self) -> None:
        ended = sorted(number for number, rank in self._ranks.items() if rank.ended)
        running = sorted(number for number, rank in self._ranks.items() if not rank.ended)
        self._say(
            f"rank {_listed(ended)} ended with exit code 0 over {NOTICE_S:.0f} s ago, and rank "
            f"{_listed(running)} still runs: it may wait for the others in a collective"
        )

    # Their output

    def _accept_outputs(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._outputs.accept()
            except OSError:
                return
            reader = threading.Thread(target=self._carry, args=(connection,), daemon=True)
            self._readers.append(reader)
            reader.start()

    def _carry(self, connection: socket.socket) -> None:
        with connection, ExitStack() as files:
            header = connection.recv(HEADER_BYTES, socket.MSG_WAITALL).decode(errors="replace")
            if header[:32] != self.token:
                return
            log: IO[bytes] | None = None
            frames = FrameReader()
            while data := _receive(connection):
                for kind, part in frames.feed(data):
                    if kind != LOG:
                        self._console.write(kind, part)
                        continue
                    if log is None:
                        path = self._log_dir / f"rank_{int(header[32:])}.log"
                        path.parent.mkdir(parents=True, exist_ok=True)
                        log = files.enter_context(open(path, "ab", buffering=0))
                    log.write(part)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(CHUNK_BYTES)
    except OSError:
        # The rank was killed.
        return b""


def _listed(numbers: list[int]) -> str:
    text = ", ".join(map(str, numbers[:8]))
    return text if len(numbers) <= 8 else f"{text} and {len(numbers) - 8} more"


def own_addresses() -> list[str]:
    """This machine's IPv4 addresses, those that others can reach first."""
    import psutil

    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    return sorted(dict.fromkeys(found), key=lambda address: address.startswith("127."))
