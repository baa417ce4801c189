"""What each step consumed, on every rank, so that any of them can write it down beside a checkpoint.

After a step's microbatches the ranks exchange which samples went into them: one small collective operation a
step, paid for only where `logging.ledger` is on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from raytrainer.distributed import Process
from raytrainer.ledger_files import LedgerLine

if TYPE_CHECKING:
    from raytrainer.data.loader import LoadedMicrobatch

# A checkpoint that was handed to the writer may not be committed yet, nor the one before it.
_NUM_SAVES_KEPT = 4


class Ledger:
    """Notes the samples of this rank's microbatches, and after each step those of all ranks.

    attempt: how often the run's ranks were started before. num_microbatches, micro_batch_size: of a full
    step. device: where collective operations want their tensors.
    """

    def __init__(
        self,
        process: Process,
        device: torch.device,
        attempt: int,
        num_microbatches: int,
        micro_batch_size: int,
    ):
        self._process, self._device, self._attempt = process, device, attempt
        # Of each microbatch: number, how many indices, how many skipped, and these.
        most_microbatches = -(-num_microbatches // process.world_size)
        self._size = 1 + most_microbatches * (3 + micro_batch_size)
        self._noted: list[LoadedMicrobatch] = []
        self._gathered: list[torch.Tensor] | None = None
        self._steps: deque[tuple[int, int, list[torch.Tensor]]] = deque()
        self._saves: deque[int] = deque(maxlen=_NUM_SAVES_KEPT)

    def watch(self, microbatches: Iterator[Any]) -> Iterator[Any]:
        """The same microbatches; those that are taken belong to the current step."""
        # Here and not in the iterator, which a rank that is idle in this step never starts.
        self._noted = []
        return self._noting(microbatches)

    def _noting(self, microbatches: Iterator[Any]) -> Iterator[Any]:
        for loaded in microbatches:
            self._noted.append(loaded)
            yield loaded

    def exchange(self) -> None:
        """Tells the other ranks what this one took for the current step; the step is not finished yet."""
        numbers = [len(self._noted)]
        for loaded in self._noted:
            skipped = [sample.index for sample in loaded.skipped]
            numbers += [loaded.microbatch.number, len(loaded.indices), len(skipped), *loaded.indices]
            numbers += skipped
        mine = torch.tensor(numbers + [0] * (self._size - len(numbers)), device=self._device)
        if self._process.world_size == 1:
            self._gathered = [mine]
            return
        self._gathered = [torch.empty_like(mine) for _ in range(self._process.world_size)]
        dist.all_gather(self._gathered, mine)

    def finish(self, step: int, epoch: int) -> None:
        """The current step is finished, as number `step` (from 1) of the run, in `epoch`."""
        self._steps.append((step, epoch, self._gathered or []))

    def saved(self, step: int) -> None:
        """The lines up to `step` were handed over; those of a few saves are kept, in case one is lost."""
        self._saves.append(step)
        if len(self._saves) == _NUM_SAVES_KEPT:
            while self._steps and self._steps[0][0] <= self._saves[0]:
                self._steps.popleft()

    def lines_after(self, step: int) -> list[LedgerLine]:
        """What the finished steps after `step` consumed."""
        return [
            line
            for number, epoch, gathered in tuple(self._steps)
            if number > step
            for rank, numbers in enumerate(gathered)
            for line in self._lines(number, epoch, rank, numbers.tolist())
        ]

    def _lines(self, step: int, epoch: int, rank: int, numbers: list[int]) -> Iterator[LedgerLine]:
        position = 1
        for _ in range(numbers[0]):
            microbatch, num_indices, num_skipped = numbers[position : position + 3]
            first, last = position + 3, position + 3 + num_indices
            position = last + num_skipped
            yield LedgerLine(
                step, epoch, microbatch, rank, self._attempt, numbers[first:last], numbers[last:position]
            )


class NoLedger:
    """Stands where nothing is written down."""

    def watch(self, microbatches: Iterator[Any]) -> Iterator[Any]:
        return microbatches

    def exchange(self) -> None:
        """Tells nobody."""

    def finish(self, step: int, epoch: int) -> None:
        """Keeps nothing."""

    def saved(self, step: int) -> None:
        """Kept nothing."""

    def lines_after(self, step: int) -> list[LedgerLine]:
        return []
