"""When something is due, and what counts as better: pure decisions of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytrainer.config import Config


@dataclass(frozen=True)
class Due:
    """What is due after a step."""

    evaluate: bool
    checkpoint: bool


@dataclass(frozen=True)
class DuePolicy:
    """Every how many steps or epochs to evaluate and to save; None means not by that count."""

    evaluate_steps: int | None = None
    evaluate_epochs: int | None = None
    checkpoint_steps: int | None = None
    checkpoint_epochs: int | None = None
    checkpoint_minutes: float | None = None

    @classmethod
    def from_config(cls, config: Config) -> DuePolicy:
        evaluation, saving = config.eval.every, config.checkpoint.every
        return cls(evaluation.steps, evaluation.epochs, saving.steps, saving.epochs, saving.minutes)

    def at(self, step: int, finished_epochs: int | None, last: bool) -> Due:
        """finished_epochs: their number when the step was an epoch's last, else None; last: of the run."""

        def due(steps: int | None, epochs: int | None) -> bool:
            by_step = steps is not None and step > 0 and step % steps == 0
            by_epoch = epochs is not None and finished_epochs is not None and finished_epochs % epochs == 0
            return by_step or by_epoch or last

        return Due(
            due(self.evaluate_steps, self.evaluate_epochs), due(self.checkpoint_steps, self.checkpoint_epochs)
        )

    def minutes_are_over(self, minutes: float) -> bool:
        return self.checkpoint_minutes is not None and minutes >= self.checkpoint_minutes


def improves(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Whether `value` is better than `best` by more than min_delta; NaN never is."""
    if value != value:
        return False
    if best is None:
        return True
    return value - best > min_delta if mode == "max" else best - value > min_delta
