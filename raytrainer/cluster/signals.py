"""Stopping on request: the first SIGINT or SIGTERM asks for a stop after the step, the second for one now.

Nothing here locks or waits, so that all of it may run inside a signal handler.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}
# The reason of a stop after which the run goes on at once, with another number of ranks.
RESIZE = "resize"


class StopSignal:
    """A request to stop, read by the training loop and passed on to ranks by a backend.

    `requested` is None or the reason of the first request ("SIGINT", "SIGTERM", or another word);
    `immediate` is True once somebody insisted: stop without finishing the step or saving.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self.immediate = False
        self._listeners: list[Callable[[], None]] = []

    def request(self, reason: str) -> None:
        """Ask for a stop after the current step; a later request changes nothing, unless this is a RESIZE."""
        if self.requested in (None, RESIZE) and self.requested != reason:
            self.requested = reason
            self._tell()

    def insist(self, reason: str) -> None:
        """Ask for a stop at once."""
        if self.requested in (None, RESIZE):
            self.requested = reason
        self.immediate = True
        self._tell()

    @property
    def exit_code(self) -> int:
        """What the command returns after this stop: 130, 143, or 0 when no signal asked for it."""
        return EXIT_CODES.get(self.requested or "", 0)

    @contextmanager
    def listening(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` after each request, in its thread or signal handler: it must not block."""
        self._listeners.append(callback)
        try:
            yield
        finally:
            self._listeners.remove(callback)

    def _tell(self) -> None:
        for callback in tuple(self._listeners):
            callback()


@contextmanager
def stop_on_signals(stop: StopSignal) -> Iterator[None]:
    """While open, SIGINT and SIGTERM go to `stop`; the handlers from before come back at the end.

    Off the main thread, where Python allows no handlers, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def handle(number: int, frame: object) -> None:
        if os.getpid() != owner:
            # A forked process (a loader worker, a pool) inherits the handler, but must end when told to.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        if stop.requested in (None, RESIZE):
            stop.request(name)
        else:
            stop.insist(name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that was not set from Python, and that Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
