"""One process of raytrainer whose step computes next to nothing, to see what logging adds to it."""

from __future__ import annotations

import sys
import time

from raytrainer.config import load_config
from raytrainer.task import StepOutput
from raytrainer.trainer import Trainer
from tests.benchmarks.contenders.ours import TurnsTask


class PacedTask(TurnsTask):
    """Waits in each step instead of computing, so that the logging thread runs as beside a real step.

    step_s: how long; it uses no CPU time, so what is measured is the loop's own.
    """

    def __init__(self, step_s: float):
        super().__init__()
        self._step_s = step_s

    def training_step(self, batch: object) -> StepOutput:
        loss = super().training_step(batch)
        time.sleep(self._step_s)
        return StepOutput(loss)


if __name__ == "__main__":
    Trainer(load_config(sys.argv[1])).train()
