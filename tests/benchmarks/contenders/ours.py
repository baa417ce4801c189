"""raytrainer itself: a Task that is the usual one and takes turns, and `Trainer` under torchrun.

The commands `raytrainer run` and `raytrainer run --local` use the same Task through their config.
"""

from __future__ import annotations

import sys
from typing import Any

from raytrainer.task import Task
from tests.benchmarks.measure import mark
from tests.benchmarks.turns import join_turns


class TurnsTask(Task):
    """Supervised learning; each step waits for its turn first."""

    def __init__(self) -> None:
        self._turns = join_turns()
        self._counted_step: int | None = None

    def training_step(self, batch: Any) -> Any:
        # A step may have several microbatches, and on more than two ranks the first is warmed up for.
        if self.step != self._counted_step:
            self._turns.step()
            self._counted_step = self.step
        return super().training_step(batch)


class MarkingTask(Task):
    """Supervised learning; notes when this process began and when its first optimizer step was done."""

    def __init__(self) -> None:
        self._first_step_is_done = False
        mark("rank")

    def training_step(self, batch: Any) -> Any:
        if self.step == 1 and not self._first_step_is_done:
            self._first_step_is_done = True
            mark("first_step")
        return super().training_step(batch)


if __name__ == "__main__":
    from raytrainer.config import load_config
    from raytrainer.trainer import Trainer

    Trainer(load_config(sys.argv[1])).train()
