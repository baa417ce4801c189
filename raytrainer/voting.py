"""What each rank says in a step beside its gradients, and how all come to know it.

The step's mean loss, its total weight and the wish to stop travel with the gradients, as the gradient of a
parameter of their own ("votes"): every rank learns them in the same step without a further message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raytrainer.task import StepOutput, Task, as_step_output

if TYPE_CHECKING:
    from raytrainer.data.loader import LoadedMicrobatch

LOSS, WEIGHT, STOP, SKIPPED, NUM_VOTES = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Votes:
    """What all ranks know after a step: its number, mean loss, whether a rank wishes to stop, samples left
    out."""

    step: int
    loss: float
    stop: bool
    num_skipped: int


class VotingStep(nn.Module):
    """One microbatch's share of the step's loss; what DistributedDataParallel wraps."""

    def __init__(self, model: nn.Module, task: Task, device: torch.device):
        super().__init__()
        self.model = model
        self.votes = nn.Parameter(torch.zeros(NUM_VOTES, device=device))
        self._values = torch.zeros(NUM_VOTES, device=device)
        self._facts: tuple[Any, bool, int] | None = None
        # Not a submodule, even where a user's task is one: its parameters would be counted twice.
        self.__dict__["task"] = task
        self.last_output: StepOutput | None = None

    def forward(
        self,
        loaded: LoadedMicrobatch,
        num_step_samples: int,
        factor: float,
        stop: bool,
        keywords: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(this microbatch's part of the mean loss times factor, a term whose gradient is the votes)."""
        self.task.indices = loaded.indices
        output = self.last_output = as_step_output(self.task.training_step(loaded.batch, **keywords))
        share = (loaded.num_samples if output.weight is None else output.weight) * (factor / num_step_samples)
        loss = output.loss * share
        values = self._values
        values[LOSS] = loss.detach()
        facts = share, stop, len(loaded.skipped)
        # Mostly those of the step before. A weight on a device is not looked at, which would wait for it.
        if isinstance(share, torch.Tensor) or facts != self._facts:
            values[WEIGHT], values[STOP], values[SKIPPED] = share, float(stop), float(len(loaded.skipped))
            self._facts = facts
        return loss, torch.dot(self.votes, values)


class VoteReader:
    """Reads the votes of each step: at once on a CPU, `lag` steps later on a GPU, so that nothing waits for
    it.

    Every rank reads the votes of the same step in the same step, so all come to the same decision.
    """

    def __init__(self, device: torch.device, lag: int = 2):
        self._lag = lag if device.type == "cuda" else 0
        self._pending: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()

    def push(self, step: int, votes: torch.Tensor) -> None:
        if votes.device.type != "cuda":
            self._pending.append((step, votes.clone(), None))
            return
        host = torch.empty(votes.shape, dtype=votes.dtype, pin_memory=True)
        host.copy_(votes, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((step, host, event))

    def read(self, *, all_of_them: bool = False) -> Iterator[Votes]:
        while len(self._pending) > (0 if all_of_them else self._lag):
            step, host, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            loss, _, stop, num_skipped = host.tolist()
            yield Votes(step, loss, stop > 0, round(num_skipped))
