"""Which samples each rank computes in each step: the same steps whatever the number of ranks.

A step takes the next `global_batch_size` samples of the epoch's order and cuts them into microbatches of
`micro_batch_size`; of the V that the step has, rank r of W computes ceil(V*r/W) to ceil(V*(r+1)/W) - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from raytrainer.data.order import SampleOrder, epoch_order, validated_order
from raytrainer.errors import DataError, ResumeError

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The samples of one forward pass, and their place in the run.

    epoch; step: counted from the start of the run; number: place among the step's microbatches, over all
    ranks; indices: sample indices, in order.
    """

    epoch: int
    step: int
    number: int
    indices: list[int]

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step consists of, for all ranks: known to each without communication.

    step: counted from the start of the run; first_position: of the step's samples in the epoch's order;
    num_samples, num_microbatches: over all ranks; local: the numbers of this rank's microbatches (may be
    empty); num_idle_ranks: ranks that have no microbatch in this step.
    """

    epoch: int
    step: int
    step_in_epoch: int
    first_position: int
    num_samples: int
    num_microbatches: int
    micro_batch_size: int
    local: range
    num_idle_ranks: int

    def samples_in(self, number: int) -> int:
        """Returns the number of samples in microbatch `number`."""
        return min(self.micro_batch_size, self.num_samples - number * self.micro_batch_size)


def steps_per_epoch(num_samples: int, global_batch_size: int, drop_last: bool) -> int:
    """Returns the number of optimizer steps in an epoch."""
    return num_samples // global_batch_size if drop_last else -(-num_samples // global_batch_size)


def microbatches_of(num_samples: int, micro_batch_size: int, rank: int, world_size: int) -> range:
    """Returns the numbers of the microbatches that `rank` computes in a step of `num_samples` samples."""
    num_microbatches = -(-num_samples // micro_batch_size)
    return range(
        -(-num_microbatches * rank // world_size),
        -(-num_microbatches * (rank + 1) // world_size),
    )


class ElasticBatchSampler:
    """Gives one rank its microbatches, step by step, from the position of the last finished step on.

    Has DistributedSampler's contract (`set_epoch`, `__len__`, `__iter__`) and is `Stateful`. An epoch's order
    depends on (seed, epoch), not on the number of ranks, so a state saved at one world size continues exactly
    at another. The position counts *finished steps* and is moved by the trainer alone (`set_position`): what
    a loader prefetched does not move it. A running iterator is not affected by `set_position`.

    num_samples: length of the data set. order: a custom order (see `raytrainer.data.order`), which replaces
    `shuffle` and may have another length. drop_last: leave out the last step when it is short; by default it
    trains on the samples that are left, each once, and some ranks may have no microbatch in it.
    Raises DataError when an epoch would have no step or a custom order is not valid.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        order: SampleOrder | None = None,
    ):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        if not 1 <= micro_batch_size <= global_batch_size:
            raise ValueError(
                f"micro_batch_size {micro_batch_size} is not from 1 to global_batch_size {global_batch_size}"
            )
        self.dataset_length = num_samples
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.order = order
        self.epoch = 0
        self.step_in_epoch = 0
        self._cached_order: tuple[int, torch.Tensor] | None = None
        self.num_samples = num_samples if order is None else len(self._order_of(0))
        self.steps_per_epoch = steps_per_epoch(self.num_samples, global_batch_size, drop_last)
        if self.steps_per_epoch == 0:
            raise DataError(
                f"data.global_batch_size = {global_batch_size}\n"
                f"  an epoch has {self.num_samples} samples, and data.drop_last leaves out the short step\n"
                f"  write a global_batch_size of at most {self.num_samples}, or drop_last: false"
            )

    def set_epoch(self, epoch: int) -> None:
        """Moves to the start of `epoch`; does nothing when the position is in that epoch already."""
        if epoch != self.epoch:
            self.set_position(epoch, 0)

    def set_position(self, epoch: int, step_in_epoch: int) -> None:
        """Says that `step_in_epoch` steps of `epoch` are finished; all of them is the next epoch's start."""
        if epoch < 0 or not 0 <= step_in_epoch <= self.steps_per_epoch:
            raise ValueError(f"no step {step_in_epoch} in epoch {epoch} of {self.steps_per_epoch} steps")
        if step_in_epoch == self.steps_per_epoch:
            epoch, step_in_epoch = epoch + 1, 0
        self.epoch = epoch
        self.step_in_epoch = step_in_epoch

    def plan(self, step_in_epoch: int, epoch: int | None = None) -> StepPlan:
        """Returns what step `step_in_epoch` of an epoch (default: the current one) consists of."""
        if not 0 <= step_in_epoch < self.steps_per_epoch:
            raise ValueError(f"no step {step_in_epoch} in an epoch of {self.steps_per_epoch}")
        epoch = self.epoch if epoch is None else epoch
        first = step_in_epoch * self.global_batch_size
        num_samples = min(self.global_batch_size, self.num_samples - first)
        num_microbatches = -(-num_samples // self.micro_batch_size)
        return StepPlan(
            epoch=epoch,
            step=epoch * self.steps_per_epoch + step_in_epoch,
            step_in_epoch=step_in_epoch,
            first_position=first,
            num_samples=num_samples,
            num_microbatches=num_microbatches,
            micro_batch_size=self.micro_batch_size,
            local=microbatches_of(num_samples, self.micro_batch_size, self.rank, self.world_size),
            num_idle_ranks=max(0, self.world_size - num_microbatches),
        )

    def __len__(self) -> int:
        """The number of microbatches that this rank still has in the current epoch, from the position on."""
        num_steps = self.steps_per_epoch - self.step_in_epoch
        last = len(self.plan(self.steps_per_epoch - 1).local)
        full = microbatches_of(self.global_batch_size, self.micro_batch_size, self.rank, self.world_size)
        return (num_steps - 1) * len(full) + last

    def __iter__(self) -> Iterator[Microbatch]:
        # The position is read here, at the call, and not at the first `next`.
        return self._microbatches_from(self.epoch, self.step_in_epoch)

    def _microbatches_from(self, epoch: int, step_in_epoch: int) -> Iterator[Microbatch]:
        order = self._order_of(epoch)
        for step in range(step_in_epoch, self.steps_per_epoch):
            plan = self.plan(step, epoch)
            for number in plan.local:
                first = plan.first_position + number * self.micro_batch_size
                indices = order[first : first + plan.samples_in(number)].tolist()
                yield Microbatch(epoch, plan.step, number, indices)

    def _order_of(self, epoch: int) -> torch.Tensor:
        if self._cached_order is not None and self._cached_order[0] == epoch:
            return self._cached_order[1]
        if self.order is None:
            indices = epoch_order(self.seed, epoch, self.num_samples, self.shuffle)
        else:
            indices = validated_order(self.order, self.seed, epoch, self.dataset_length)
            if epoch != 0 and len(indices) != self.num_samples:
                raise DataError(
                    f"data.order: {type(self.order).__name__} gave {len(indices)} indices for epoch {epoch}"
                    f" and {self.num_samples} for epoch 0\n  an order has the same length in every epoch"
                )
        self._cached_order = (epoch, indices)
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Returns the position (finished steps only) and what gives it its meaning; plain numbers."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            **self._meaning(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved position. Raises ResumeError when it means other samples here than there."""
        if state.get("version") != STATE_VERSION:
            raise ResumeError(
                f"sampler state: version = {state.get('version')!r}\n"
                f"  this raytrainer reads version {STATE_VERSION}"
            )
        for key, here in self._meaning().items():
            if state[key] != here:
                raise ResumeError(
                    f"sampler state: {key} = {state[key]!r} when it was saved, {here!r} now\n"
                    "  the saved position would stand for other samples\n"
                    f"  set it back to {state[key]!r}, or start over with --fresh"
                )
        self.set_position(state["epoch"], state["step_in_epoch"])

    def _meaning(self) -> dict[str, Any]:
        return {
            "num_samples": self.num_samples,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }


class EvalBatches:
    """Gives one rank its part of an evaluation: every sample exactly once over all ranks, none repeated.

    Microbatch v holds samples v*batch_size onwards; rank r of W has those that `microbatches_of` gives. The
    numbers are global, so results can be merged in one fixed order. It can be iterated any number of times.
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1):
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"batch_size {batch_size}, rank {rank}, world_size {world_size}")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.local = microbatches_of(num_samples, batch_size, rank, world_size)

    def __len__(self) -> int:
        return len(self.local)

    def __iter__(self) -> Iterator[Microbatch]:
        for number in self.local:
            first = number * self.batch_size
            indices = list(range(first, min(first + self.batch_size, self.num_samples)))
            # Always epoch 0, step 0: a data set that draws at random answers alike in each evaluation.
            yield Microbatch(0, 0, number, indices)
