"""One of the fused trials: a Trainer whose gradients and updates come from the whole group's step."""

from __future__ import annotations

import os
import warnings
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from raytrainer.build import Data
from raytrainer.distributed import Process
from raytrainer.step import MicrobatchStep
from raytrainer.trainer import StopWish, Trainer
from raytrainer.updates import follow_update
from raytrainer.voting import LOSS, NUM_VOTES, STOP

if TYPE_CHECKING:
    from raytrainer.config import Config


class _GroupsGradients:
    """Where a Trainer looks for its step's votes: the group has put them there. See MicrobatchStep."""

    step_buffers: tuple = ()
    last_metrics: dict = {}  # noqa: RUF012 - never written to

    def __init__(self) -> None:
        self.votes_grad = torch.zeros(NUM_VOTES)

    def close(self) -> None:
        pass

    def share_buffers(self) -> None:
        pass


class EndWish:
    """The group's wish to stop, or that of this trial alone: a file in its directory, looked for when the
    trial has logged something, since that is what trials are ended early for."""

    def __init__(self, group: StopWish, path: str):
        self._group, self._path, self.alone = group, path, False

    def look(self) -> None:
        self.alone = self.alone or os.path.exists(self._path)

    @property
    def requested(self) -> str | None:
        return "SIGTERM" if self.alone else self._group.requested


class FusedTrial(Trainer):
    """number: of the trial in the search; data: shared by all trials of the group. Steps in three parts:
    `collect`, then the group computes and updates, then `finish`."""

    def __init__(self, number: int, config: Config, data: Data, wish: EndWish, observer: Any):
        super().__init__(config, process=Process(), observer=observer, stop=wish)
        self.number, self.wish, self._shared = number, wish, data
        self.stopping = False

    def _build_data(self) -> Data:
        return self._shared

    def _gradient_step(self) -> MicrobatchStep:
        return _GroupsGradients()

    def begin(self) -> None:
        self._records.begin()

    def collect(self, same: list[Any] | None = None) -> list[Any]:
        """The microbatches of the next step; same: those of a trial of the same seed, read once for both."""
        self._plan, microbatches = self._begin_step()
        return list(islice(microbatches, len(self._plan.local))) if same is None else same

    def first_samples(self) -> Any:
        """A microbatch to try the model on."""
        return self._input.first_samples()

    @property
    def is_over(self) -> bool:
        """Whether an earlier attempt came to its end."""
        progress = self.state.progress
        return progress.step >= self.total_steps or progress.stopped_early

    @property
    def num_samples(self) -> int:
        """Of the step that was collected."""
        return self._plan.num_samples

    def finish(self, loss: torch.Tensor, norm: torch.Tensor | None) -> None:
        """After the update: what a step counts and logs. Raises NonFiniteLossError."""
        votes = torch.zeros(NUM_VOTES, device=loss.device)
        votes[LOSS] = loss
        votes[STOP] = float(self.wish.requested is not None)
        self.gradients.votes_grad = votes
        if norm is not None:
            self._timer.gradient_norm = norm
        self.stopping = self._apply(self._plan)
        self._end_step(self._plan)
        if self.state.progress.step % self.config.logging.every_n_steps == 0:
            self.wish.look()

    def _update(self, name: str) -> None:
        if not self.state.schedules:
            follow_update(self.state, name)
            return
        with warnings.catch_warnings():
            # The optimizer's step was that of the whole group.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            follow_update(self.state, name)

    def fail(self, error: Exception) -> None:
        """Keeps what went wrong in this trial's run directory."""
        self._keep_failure(self._run_dir, error)
