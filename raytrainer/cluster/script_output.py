"""A script's output on its way: from its pipes to the rank's log file and, for ranks that are shown, to the
driver.

Bytes are passed on as they come: carriage returns, colours and binary data stay, and nothing is collected but
the last few kilobytes, for the message when the script fails.
"""

from __future__ import annotations

import os
import re
import selectors
import socket
import threading
from contextlib import suppress
from pathlib import Path

CHUNK_BYTES = 1 << 16
TAIL_BYTES = 1 << 14
# A line without an end is passed on in parts of this size when lines get a prefix.
MAX_LINE_BYTES = 1 << 16

STDOUT, STDERR = b"O", b"E"
# For the driver to write to the log file, where the rank's machine cannot.
LOG = b"L"
_ENDS = re.compile(rb"[\n\r]")
# torch puts the rank before each line of an uncaught exception in a distributed run.
_TRACEBACK = re.compile(r"(\[\w+\]: )?Traceback \(most recent call last\)")


def pack(kind: bytes, data: bytes) -> bytes:
    """A frame of the output connection: its kind, four bytes of length, the bytes."""
    return kind + len(data).to_bytes(4, "big") + data


class FrameReader:
    """Takes a stream apart into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """The frames that are whole by now."""
        self._data += data
        frames, start = [], 0
        while len(self._data) - start >= 5:
            end = start + 5 + int.from_bytes(self._data[start + 1 : start + 5], "big")
            if len(self._data) < end:
                break
            frames.append((bytes(self._data[start : start + 1]), bytes(self._data[start + 5 : end])))
            start = end
        del self._data[:start]
        return frames


class Prefixer:
    """Puts a prefix before each line, and lets go of whole lines only, so that those of ranks do not mix.

    A carriage return ends a line too: a progress bar is shown as it moves.
    """

    def __init__(self, prefix: bytes):
        self._prefix = prefix
        self._line = bytearray()

    def feed(self, data: bytes) -> bytes:
        """The lines that are whole by now."""
        self._line += data
        ends = [match.end() for match in _ENDS.finditer(self._line)]
        if not ends:
            return self.rest() if len(self._line) > MAX_LINE_BYTES else b""
        # \r\n is one end; a \r that comes last may be the first half of one.
        ends = [end for end in ends if self._line[end - 1 : end + 1] != b"\r\n"]
        whole, starts = bytearray(), [0, *ends[:-1]]
        for start, end in zip(starts, ends, strict=True):
            whole += self._prefix + self._line[start:end]
        del self._line[: ends[-1]]
        return bytes(whole)

    def rest(self) -> bytes:
        """What has no end yet."""
        if not self._line:
            return b""
        rest = self._prefix + bytes(self._line) + b"\n"
        self._line.clear()
        return rest


class Output:
    """Carries a script's output until all that could write it have ended.

    log_path: the rank's log file, appended to; None: the driver writes it. connection: to the driver, None
    where nothing goes there; shown: the output goes to the console; prefix: before each of its lines there.
    separate: standard error has a pipe of its own, so that the console can tell it from standard output.
    """

    def __init__(
        self,
        log_path: Path | None,
        connection: socket.socket | None,
        *,
        shown: bool,
        prefix: bytes = b"",
        separate: bool = False,
    ):
        self._log = None if log_path is None else open(log_path, "ab", buffering=0)  # noqa: SIM115
        self._connection = connection
        self.shown = shown
        self._pipes: dict[int, bytes] = {}
        read, self.stdout = os.pipe()
        self._pipes[read] = STDOUT
        self.stderr = self.stdout
        if separate:
            read, self.stderr = os.pipe()
            self._pipes[read] = STDERR
        self._prefixers = {kind: Prefixer(prefix) for kind in self._pipes.values()} if prefix else {}
        # With a pipe of its own standard error alone is what to show of a failure.
        self._tail_kind = STDERR if separate else STDOUT
        self._tail = bytearray()
        self._thread = threading.Thread(target=self._carry, name="raytrainer-output", daemon=True)

    def start(self) -> None:
        """Call when the script has the pipes' other ends, which are closed here."""
        for fd in {self.stdout, self.stderr}:
            os.close(fd)
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Wait until all is carried; call when whoever could write has ended."""
        self._thread.join(timeout_s)

    @property
    def tail(self) -> str:
        """The last of it as text."""
        return self._tail.decode(errors="replace")

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            for fd, kind in self._pipes.items():
                selector.register(fd, selectors.EVENT_READ, kind)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, CHUNK_BYTES)
                    if data:
                        self._take(key.data, data)
                    else:
                        selector.unregister(key.fd)
                        os.close(key.fd)
        for kind, prefixer in self._prefixers.items():
            self._send(kind, prefixer.rest())
        if self._log is not None:
            self._log.close()
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)

    def _take(self, kind: bytes, data: bytes) -> None:
        if kind == self._tail_kind:
            self._tail += data
            del self._tail[:-TAIL_BYTES]
        if self._log is None:
            self._send(LOG, data)
        else:
            self._write_log(data)
        if self.shown:
            self._send(kind, self._prefixers[kind].feed(data) if self._prefixers else data)

    def _write_log(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._log.write(data) :]
        except OSError:
            # A full disk must not end the training.
            return

    def _send(self, kind: bytes, data: bytes) -> None:
        if self._connection is None or not data:
            return
        try:
            self._connection.sendall(pack(kind, data))
        except OSError:
            # The driver no longer reads; the log goes on.
            self._connection = None


def shorten(text: str, num_lines: int = 30) -> str:
    """The end of a script's output that says why it failed: from the last traceback on, else a few lines.

    Of a progress bar, which redraws its line, only the last state.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    starts = [number for number, line in enumerate(lines) if _TRACEBACK.match(line)]
    if starts:
        lines = lines[starts[-1] :]
        if len(lines) > num_lines:
            lines = [*lines[:1], "  ...", *lines[-num_lines:]]
        return "\n".join(lines)
    return "\n".join(lines[-10:])
