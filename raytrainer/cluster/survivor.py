"""What a rank that outlives its peers can still do: say which finished step it holds, and save it.

`choose_survivor` is the parent's side: which of the ranks is to save.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping
from typing import Any

# For a survivor to write its checkpoint.
SAVE_S = 60.0


class Survivor:
    """This rank's end. `trainer` is put in by the entry that trains; without one there is nothing to save."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self._released = threading.Event()

    def finished_step(self) -> int | None:
        """The step whose whole state this rank holds, None where it holds none."""
        return None if self.trainer is None else self.trainer.finished_step

    def save(self, committed_step: int) -> int | None:
        """Saves that state if it is newer than `committed_step`; the step, None if it was not saved."""
        try:
            return self.trainer.save_finished_step(committed_step)
        except Exception:  # whatever it is, the run goes on from the checkpoint before
            traceback.print_exc()
            return None

    def wait_released(self) -> None:
        """Keeps the state of a rank that has failed until it was asked for, or surely will not be."""
        if self.finished_step() is not None:
            self._released.wait(2 * SAVE_S)

    def release(self) -> None:
        """Nobody will ask for this rank's state any more."""
        self._released.set()


def choose_survivor(finished_steps: Mapping[int, int | None], committed_step: int | None) -> int | None:
    """The rank that is to save: the lowest of those with the highest finished step.

    finished_steps: by rank, of those alive. None where nobody holds more than the newest checkpoint does.
    """
    offers = {rank: step for rank, step in finished_steps.items() if step is not None}
    if not offers:
        return None
    rank = min(offers, key=lambda each: (-offers[each], each))
    return rank if offers[rank] > (committed_step or 0) else None
