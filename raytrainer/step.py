"""From a step's microbatches to one gradient, summed over all ranks and equal to that of the whole batch.

`GradientStep` sums with DistributedDataParallel; `raytrainer.tree_step` along a fixed tree, for the same bits
whatever the number of ranks. What they have in common is `MicrobatchStep`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raytrainer.buffers import StepBuffers
from raytrainer.distributed import Process, broadcast_object, broadcast_tensors, sum_gradients
from raytrainer.errors import ConfigError, Problem
from raytrainer.voting import LOSS, SKIPPED, STOP, WEIGHT, VotingStep

if TYPE_CHECKING:
    from raytrainer.data.loader import LoadedMicrobatch
    from raytrainer.data.sampler import StepPlan
    from raytrainer.task import Task


class MicrobatchStep:
    """Computes the gradients of one step after another; the subclasses say how they are summed.

    After `compute`, every trained parameter's `.grad` is the gradient of the step's weighted mean loss over
    all ranks (times the scaler's factor), and `votes_grad` holds what VoteReader reads.

    may_lose_samples: a microbatch may turn out empty, its samples being unreadable.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        process: Process,
        device: torch.device,
        *,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
        scale: Callable[[torch.Tensor], torch.Tensor],
        seed: Callable[[int, int], None],
        may_lose_samples: bool = False,
    ):
        self._process, self._device = process, device
        self._autocast, self._scale, self._seed = autocast, scale, seed
        self._module = VotingStep(model, task, device)
        self._buffers = StepBuffers(model)
        self._parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._may_lose_samples = may_lose_samples
        self._first_step: int | None = None
        self._weighted = False

    @property
    def votes_grad(self) -> torch.Tensor:
        return self._module.votes.grad

    @property
    def step_buffers(self) -> list[torch.Tensor]:
        """The buffers that a step changes on rank 0; empty before the first step."""
        return self._buffers.of_step

    @property
    def last_metrics(self) -> dict[str, Any]:
        """What this rank's last `training_step` gave to log."""
        output = self._module.last_output
        return dict(output.metrics) if output else {}

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def compute(
        self,
        plan: StepPlan,
        microbatches: Iterator[LoadedMicrobatch],
        step: int,
        stop: bool,
        optimizer: str | None = None,
        parameters: list[nn.Parameter] | None = None,
    ) -> None:
        """Runs this rank's microbatches of the step and sums the gradients over all ranks.

        optimizer, parameters: whose turn it is, and what it trains, when there are several; else None.
        """
        raise NotImplementedError

    def warm_up(self, loaded: LoadedMicrobatch) -> None:
        """Does with a microbatch what must be settled before the first step; leaves no other trace."""

    def close(self) -> None:
        """Lets go of whatever holds the process group, which is to end after this."""

    def share_buffers(self) -> None:
        """Gives every rank rank 0's buffers, as evaluation and predictions use them."""
        broadcast_tensors(self._module.model.buffers(), self._process.world_size)

    def _backward(
        self,
        module: nn.Module,
        loaded: LoadedMicrobatch,
        num_step_samples: int,
        factor: float,
        stop: bool,
        keywords: dict[str, Any],
    ) -> None:
        with self._autocast():
            loss, votes = module(loaded, num_step_samples, factor, stop, keywords)
        (self._scale(loss) + votes).backward()

    def _begin(self, step: int) -> None:
        if self._first_step is None:
            self._first_step = step
        self._buffers.begin(step)

    def _finish(self, step: int) -> None:
        """After the gradients were summed: the buffers, and the division by the step's weight."""
        if step == self._first_step:
            self._agree_on_first_step()
        self._buffers.share(self._process.world_size)
        if self._weighted:
            self._divide_by_weight()

    def _vote_without_samples(self, stop: bool, num_skipped: int) -> None:
        votes = self._module.votes
        votes.grad = torch.zeros_like(votes)
        votes.grad[STOP] = float(stop)
        votes.grad[SKIPPED] = float(num_skipped)

    def _agree_on_first_step(self) -> None:
        """Rank 0, which always has a microbatch, says whether losses come with weights and which buffers
        change."""
        output = self._module.last_output
        weighted = self._may_lose_samples or (output is not None and output.weight is not None)
        facts = weighted, self._buffers.seen_to_change()
        weighted, changed = broadcast_object(facts, self._process.world_size)
        self._weighted = self._weighted or weighted
        self._buffers.learn(changed)

    def _divide_by_weight(self) -> None:
        """The losses were weighted, and divided by the number of samples: divide by the weight instead."""
        votes = self._module.votes
        total = votes.grad[WEIGHT]
        factor = torch.where(total > 0, 1.0 / total.clamp_min(1e-30), torch.zeros_like(total))
        gradients = [p.grad for p in self._parameters if p.grad is not None and p is not votes]
        torch._foreach_mul_(gradients, factor)
        votes.grad[LOSS] *= factor


class GradientStep(MicrobatchStep):
    """Sums with DistributedDataParallel, its all-reduce overlapped with the backward pass.

    always_explicit: several optimizers; the sums are then ours, since DDP would wait for all gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        process: Process,
        device: torch.device,
        *,
        find_unused_parameters: bool = False,
        always_explicit: bool = False,
        **common: Any,
    ):
        super().__init__(model, task, process, device, **common)
        # A microbatch of unreadable samples alone computes nothing, and DDP would wait for its gradients.
        self._always_explicit = always_explicit or self._may_lose_samples
        self._find_unused_parameters = find_unused_parameters
        self._ddp: DistributedDataParallel | None = None
        if process.world_size > 1 and not self._always_explicit:
            self._ddp = DistributedDataParallel(
                self._module,
                **_without_buffer_broadcast(),
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
            )

    def compute(
        self,
        plan: StepPlan,
        microbatches: Iterator[LoadedMicrobatch],
        step: int,
        stop: bool,
        optimizer: str | None = None,
        parameters: list[nn.Parameter] | None = None,
    ) -> None:
        self._begin(step)
        ranks_idle = plan.num_microbatches < self._process.world_size
        explicit = self._process.world_size > 1 and (self._always_explicit or ranks_idle)
        keywords = {} if optimizer is None else {"optimizer": optimizer}
        # DDP divides by the number of ranks; the loss is multiplied by it beforehand, since a step's mean is
        # ours.
        factor = float(self._process.world_size) if self._ddp is not None and not explicit else 1.0
        num_local, num_skipped = len(plan.local), 0
        # DDP lays its buckets anew in its second forward pass, with a broadcast: one of which a rank without
        # samples knows nothing, and the others would wait for it.
        module = self._module if self._ddp is None or explicit else self._ddp
        for position in range(num_local):
            loaded = next(microbatches)
            num_skipped += len(loaded.skipped)
            if loaded.num_samples == 0:
                continue
            self._seed(step, loaded.microbatch.number)
            synchronize = position == num_local - 1 and not explicit
            with self._buffers.around(loaded.microbatch.number), self._communicating(synchronize or explicit):
                self._backward(module, loaded, plan.num_samples, factor, stop, keywords)
        if self.votes_grad is None:
            self._vote_without_samples(stop, num_skipped)
        if explicit:
            sum_gradients(self._parameters if parameters is None else [*parameters, self._module.votes])
        if step == self._first_step and self._ddp is not None and not explicit:
            self._refuse_unused_parameters()
        self._finish(step)

    def warm_up(self, loaded: LoadedMicrobatch) -> None:
        """Lets DDP settle its bucket layout before the first real step.

        DDP lays its buckets anew after the first backward pass; over more than two ranks the layout decides
        the order of a sum, so that a resumed run would differ in its first step from one that was never
        stopped.
        """
        if self._ddp is None or self._process.world_size <= 2:
            return
        kept = [buffer.clone() for buffer in self._module.buffers()]
        self._seed(0, 0)
        for _ in range(2):
            self._backward(self._ddp, loaded, max(1, loaded.num_samples), 1.0, False, {})
            self._refuse_unused_parameters()
        for buffer, value in zip(self._module.buffers(), kept, strict=True):
            buffer.copy_(value)
        self.zero_grad()

    def _communicating(self, synchronize: bool) -> contextlib.AbstractContextManager[Any]:
        if self._ddp is None or synchronize:
            return contextlib.nullcontext()
        return self._ddp.no_sync()

    def close(self) -> None:
        self._ddp = None

    def _refuse_unused_parameters(self) -> None:
        """Without this, DDP would leave out sums in this step without a word, and only complain in
        the next."""
        if self._find_unused_parameters:
            return
        named = self._module.model.named_parameters()
        unused = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
        if unused:
            more = f" and {len(unused) - 4} more" if len(unused) > 4 else ""
            raise ConfigError(
                Problem(
                    "config",
                    "model",
                    f"these parameters got no gradient in the first step: {', '.join(unused[:4])}{more}",
                    fix="freeze them (parameters.freeze), use them in the loss, or write "
                    "training.find_unused_parameters: true",
                )
            )


def _without_buffer_broadcast() -> dict[str, bool]:
    """DDP's keyword for it, which newer versions of torch have renamed."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def refuse_communicating_modules(model: nn.Module, every_rank_always_has_as_many: bool) -> None:
    """Raises ConfigError for SyncBatchNorm where ranks can differ in how many microbatches they run."""
    if every_rank_always_has_as_many:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                Problem(
                    "config",
                    "model",
                    f"{name} is a SyncBatchNorm, which waits for all ranks in every forward pass, "
                    "and here ranks can differ in their number of microbatches",
                    fix="set data.drop_last: true, and micro_batch_size so that the number of microbatches "
                    "a step is a multiple of scaling.num_workers; or use BatchNorm",
                )
            )
