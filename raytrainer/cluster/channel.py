"""JSON lines on a socket between a rank's process and the one that started it.

Sending never waits: what the other side has not read is kept, and metrics are
dropped when that grows too long.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading

MAX_PENDING_BYTES = 1 << 20


class Channel:
    """One end of the connection; `send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._pending = bytearray()
        self._received = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict, *, droppable: bool = False) -> None:
        """Send `message`, or keep it for later while the other side does not read; nothing once it is gone.

        droppable: leave it out when over MAX_PENDING_BYTES wait already. A forked copy of the process sends
        nothing, since its bytes would land in the middle of the owner's.
        """
        if os.getpid() != self._owner:
            return
        line = json.dumps(message, default=_plain).encode() + b"\n"
        with self._lock:
            if droppable and len(self._pending) > MAX_PENDING_BYTES:
                return
            self._pending += line
            self._push()

    def flush(self) -> None:
        """Wait until all is sent, or the other side is gone."""
        with self._lock:
            while self._pending:
                select.select([], [self._socket], [])
                self._push()

    def receive(self, *, wait: bool = False) -> list[dict]:
        """The messages that have arrived so far; `closed` is True once there can be no more.

        wait: block until something comes.
        """
        try:
            while not self.closed:
                data = self._socket.recv(1 << 16, 0 if wait else socket.MSG_DONTWAIT)
                self._received += data
                self.closed = not data
                if wait:
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._socket.close()

    def _push(self) -> None:
        try:
            while self._pending:
                del self._pending[: self._socket.send(self._pending, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return
        except OSError:
            # The other side is gone; whoever reads from it finds out and acts.
            self._pending.clear()


def _plain(value: object) -> object:
    """A number for what is one (a tensor or array scalar), else its text."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)
