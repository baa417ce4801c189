"""From a step's microbatches to one gradient, summed over all ranks and equal to that of the whole batch.

The step's mean loss, its total weight and the wish to stop travel with the gradients, as the gradient of a
parameter of their own ("votes"): every rank learns them in the same step without a further message.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from raytrainer.distributed import Process, broadcast_object, broadcast_tensors, sum_gradients
from raytrainer.errors import ConfigError, Problem
from raytrainer.task import StepOutput, Task, as_step_output

if TYPE_CHECKING:
    from raytrainer.data.loader import LoadedMicrobatch
    from raytrainer.data.sampler import StepPlan

_LOSS, _WEIGHT, _STOP, _SKIPPED, _NUM_VOTES = 0, 1, 2, 3, 4


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
        self.votes = nn.Parameter(torch.zeros(_NUM_VOTES, device=device))
        self._values = torch.zeros(_NUM_VOTES, device=device)
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
        values[_LOSS] = loss.detach()
        values[_WEIGHT] = share
        values[_STOP] = float(stop)
        values[_SKIPPED] = float(len(loaded.skipped))
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

    def pending(self, until_step: int) -> list[Votes]:
        """The votes not read yet of the steps up to `until_step`, which stay; may be called in any thread."""
        found = []
        for step, host, event in self._pending.copy():
            if step <= until_step:
                if event is not None:
                    event.synchronize()
                loss, _, stop, num_skipped = host.tolist()
                found.append(Votes(step, loss, stop > 0, round(num_skipped)))
        return found

    def read(self, *, all_of_them: bool = False) -> Iterator[Votes]:
        while len(self._pending) > (0 if all_of_them else self._lag):
            step, host, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            loss, _, stop, num_skipped = host.tolist()
            yield Votes(step, loss, stop > 0, round(num_skipped))


class StepBuffers:
    """Keeps every buffer that the forward pass changes as microbatch 0, always rank 0's, left it.

    BatchNorm is told not to update its running statistics elsewhere; any other buffer that is seen to change
    is put back afterwards, and taken over from rank 0 after the step.
    """

    def __init__(self, model: nn.Module):
        self._norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        in_norms = {id(buffer) for norm in self._norms for buffer in norm.buffers()}
        self.changing = [buffer for buffer in model.buffers() if id(buffer) not in in_norms]
        self._versions: list[int] = []
        self._settled = False

    def remember(self) -> None:
        """Marks where each buffer stands before the first step, in which all count as changing."""
        self._versions = [buffer._version for buffer in self.changing]

    def find_changed(self) -> list[int]:
        """The positions of those that a forward pass has changed since; microbatch 0 has been through it."""
        return [i for i, buffer in enumerate(self.changing) if buffer._version > self._versions[i]]

    def settle(self, positions: list[int]) -> None:
        """Looks after these alone from now on."""
        self.changing = [self.changing[position] for position in positions]
        self._settled = True

    def share(self, world_size: int) -> None:
        """Takes over from rank 0 what its microbatch 0 changed."""
        if self._settled and self.changing:
            broadcast_tensors(self.changing, world_size)

    @property
    def all(self) -> list[torch.Tensor]:
        """Every buffer that a step can change; empty before it is known which these are."""
        if not self._settled:
            return []
        return [*(buffer for norm in self._norms for buffer in norm.buffers()), *self.changing]

    @contextlib.contextmanager
    def around(self, microbatch: int) -> Iterator[None]:
        if microbatch == 0:
            yield
            return
        kept = [buffer.clone() for buffer in self.changing]
        for norm in self._norms:
            norm.track_running_stats = False
        try:
            yield
        finally:
            for norm in self._norms:
                norm.track_running_stats = True
            for buffer, value in zip(self.changing, kept, strict=True):
                buffer.copy_(value)


class GradientStep:
    """Computes the gradients of one step after another.

    After `compute`, every trained parameter's `.grad` is the gradient of the step's weighted mean loss over
    all ranks (times the scaler's factor), and `votes_grad` holds what VoteReader reads.
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
        find_unused_parameters: bool = False,
        always_explicit: bool = False,
        may_lose_samples: bool = False,
    ):
        self._process, self._device, self._task = process, device, task
        self._autocast, self._scale, self._seed = autocast, scale, seed
        self._module = VotingStep(model, task, device)
        self._buffers = StepBuffers(model)
        self._parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        # A microbatch of unreadable samples alone computes nothing, and DDP would wait for its gradients.
        self._always_explicit = always_explicit or may_lose_samples
        self._may_lose_samples = may_lose_samples
        self._find_unused_parameters = find_unused_parameters
        self._weighted: bool | None = None
        self._ddp: DistributedDataParallel | None = None
        if process.world_size > 1 and not self._always_explicit:
            self._ddp = DistributedDataParallel(
                self._module,
                **_without_buffer_broadcast(),
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
            )

    @property
    def votes_grad(self) -> torch.Tensor:
        return self._module.votes.grad

    @property
    def step_buffers(self) -> list[torch.Tensor]:
        """The buffers that a step changes on rank 0; empty before the first step."""
        return self._buffers.all

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
        if self._weighted is None:
            self._buffers.remember()
        ranks_idle = plan.num_microbatches < self._process.world_size
        explicit = self._process.world_size > 1 and (self._always_explicit or ranks_idle)
        keywords = {} if optimizer is None else {"optimizer": optimizer}
        # DDP divides by the number of ranks; the loss is multiplied by it beforehand, since a step's mean is
        # ours.
        factor = float(self._process.world_size) if self._ddp is not None and not explicit else 1.0
        num_local, num_skipped = len(plan.local), 0
        for position in range(num_local):
            loaded = next(microbatches)
            num_skipped += len(loaded.skipped)
            if loaded.num_samples == 0:
                continue
            self._seed(step, loaded.microbatch.number)
            synchronize = position == num_local - 1 and not explicit
            with self._buffers.around(loaded.microbatch.number), self._communicating(synchronize):
                self._backward(loaded, plan.num_samples, factor, stop, keywords)
        self._vote_if_idle(stop, num_skipped)
        if explicit:
            sum_gradients(self._parameters if parameters is None else [*parameters, self._module.votes])
        self._buffers.share(self._process.world_size)
        if self._weighted is None:
            if self._ddp is not None and not explicit and not self._find_unused_parameters:
                self._refuse_unused_parameters()
            self._agree_on_first_step()
        if self._weighted:
            self._divide_by_weight()

    def warm_up(self, loaded: LoadedMicrobatch) -> None:
        """Lets DDP settle its bucket layout before the first real step, and leaves no other trace.

        DDP lays its buckets anew after the first backward pass; over more than two ranks the layout decides
        the order of a sum, so that a resumed run would differ in its first step from one that was never
        stopped.
        """
        if self._ddp is None or self._process.world_size <= 2:
            return
        kept = [buffer.clone() for buffer in self._module.buffers()]
        self._seed(0, 0)
        for _ in range(2):
            self._backward(loaded, max(1, loaded.num_samples), 1.0, False, {})
        for buffer, value in zip(self._module.buffers(), kept, strict=True):
            buffer.copy_(value)
        self.zero_grad()

    def share_buffers(self) -> None:
        """Gives every rank rank 0's buffers, as evaluation and predictions use them."""
        broadcast_tensors(self._module.model.buffers(), self._process.world_size)

    def _backward(
        self,
        loaded: LoadedMicrobatch,
        num_step_samples: int,
        factor: float,
        stop: bool,
        keywords: dict[str, Any],
    ) -> None:
        module = self._ddp if self._ddp is not None else self._module
        with self._autocast():
            loss, votes = module(loaded, num_step_samples, factor, stop, keywords)
        (self._scale(loss) + votes).backward()

    def _communicating(self, synchronize: bool) -> contextlib.AbstractContextManager[Any]:
        if self._ddp is None or synchronize:
            return contextlib.nullcontext()
        return self._ddp.no_sync()

    def _vote_if_idle(self, stop: bool, num_skipped: int) -> None:
        votes = self._module.votes
        if votes.grad is None:
            votes.grad = torch.zeros_like(votes)
            votes.grad[_STOP] = float(stop)
            votes.grad[_SKIPPED] = float(num_skipped)

    def _refuse_unused_parameters(self) -> None:
        """Without this, DDP would leave out sums in this step without a word, and only complain in
        the next."""
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

    def _agree_on_first_step(self) -> None:
        """Rank 0, which always has a microbatch, says whether losses come with weights and which buffers
        change."""
        output = self._module.last_output
        weighted = self._may_lose_samples or (output is not None and output.weight is not None)
        facts = weighted, self._buffers.find_changed()
        self._weighted, changed = broadcast_object(facts, self._process.world_size)
        self._buffers.settle(changed)
        self._buffers.share(self._process.world_size)

    def _divide_by_weight(self) -> None:
        """The losses were weighted, and divided by the number of samples: divide by the weight instead."""
        votes = self._module.votes
        total = votes.grad[_WEIGHT]
        factor = torch.where(total > 0, 1.0 / total.clamp_min(1e-30), torch.zeros_like(total))
        gradients = [p.grad for p in self._parameters if p.grad is not None and p is not votes]
        torch._foreach_mul_(gradients, factor)
        votes.grad[_LOSS] *= factor


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
