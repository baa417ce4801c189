"""Gradients of a step's microbatches, summed along the fixed tree within a rank and over all ranks.

Shaped as a reduce-scatter and an all-gather: rank p gets the p-th part of every rank's nodes, folds them to
the root and gives the sum back to all. Where a rank has one node, as with a microbatch a rank, this moves no
more bytes than a ring all-reduce. Addition is element by element, so how vectors are cut changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raytrainer.distributed import Process
from raytrainer.errors import ConfigError, Problem
from raytrainer.tree import Exchange, plan_exchange, sum_along

# The first bucket is ready early in the backward pass; larger ones than this gain nothing any more, and cost
# the last one's exchange, which nothing overlaps with.
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2**20, 8 * 2**20
_ALIGNMENT = 16  # elements: each gradient starts at a cache line, as a tensor of its own would
_LAG = 2  # buckets that may be on their way before the oldest is folded


class TreeReduction:
    """Sums the gradients of `parameters` over the microbatches of a step; a missing one counts as zeros.

    In a step: `begin`, then for each local microbatch `expect`, a backward pass with all gradients None
    before it, and `add`; then `finish`, after which every parameter's `.grad` is the sum over all ranks. In
    the last local backward pass a bucket is sent off as soon as its gradients are there.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], process: Process):
        self._process = process
        self._buckets = [_Bucket(run, process) for run in _runs(parameters)]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._expecting = self._overlapping = False
        self._seen: set[nn.Parameter] = set()
        self._in_one_piece: bool | None = None  # whether each gradient was, so far; None: not known yet
        self._num_shipped = self._num_folded = 0
        self._merges: tuple[int, ...] = ()
        self._num_added = 0
        if process.world_size > 1:
            for parameter in self._bucket_of:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def begin(self, num_microbatches: int) -> None:
        """A step of `num_microbatches` over all ranks starts."""
        self._plan = plan_exchange(num_microbatches, self._process.world_size)
        self._merges = self._plan.local[self._process.rank].merges
        self._num_added = self._num_shipped = self._num_folded = 0
        for bucket in self._buckets:
            bucket.begin()

    def expect(self) -> None:
        """The backward pass of the next local microbatch is about to start."""
        last = self._num_added == len(self._merges) - 1
        self._expecting, self._overlapping = True, last and self._in_one_piece is True
        self._seen.clear()

    def add(self) -> None:
        """The backward pass is over: its gradients are taken in, and are None afterwards."""
        self._expecting = self._overlapping = False
        if self._seen and self._in_one_piece is None:
            self._in_one_piece = True
        for bucket in self._buckets[self._num_shipped :]:
            bucket.add(self._merges[self._num_added])
        self._num_added += 1

    def finish(self) -> None:
        """Waits for the sums and puts them into `.grad`."""
        while self._num_shipped < len(self._buckets) and self._process.world_size > 1:
            self._ship()
        while self._num_folded < self._num_shipped:
            self._fold()
        for bucket in self._buckets:
            bucket.finish()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._expecting:  # the turn of another optimizer
            return
        if parameter in self._seen:
            self._note_another_piece(parameter)
            return
        self._seen.add(parameter)
        if not self._overlapping:
            return
        self._bucket_of[parameter].num_ready += 1
        # In one order on all ranks, whichever is ready first on this one.
        while self._num_shipped < len(self._buckets) and self._buckets[self._num_shipped].is_ready:
            self._buckets[self._num_shipped].add(self._merges[-1])
            self._ship()

    def _note_another_piece(self, parameter: nn.Parameter) -> None:
        self._in_one_piece = False
        if self._bucket_of[parameter] in self._buckets[: self._num_shipped]:
            raise ConfigError(
                Problem(
                    "config",
                    "training.determinism",
                    "a parameter got its gradient in several pieces in this step, and in one in those before",
                    "bitwise",
                    "use torch.utils.checkpoint with use_reentrant=False, or write determinism: order",
                )
            )

    def _ship(self) -> None:
        self._buckets[self._num_shipped].ship(self._plan)
        self._num_shipped += 1
        if self._num_shipped - self._num_folded > _LAG:
            self._fold()

    def _fold(self) -> None:
        self._buckets[self._num_folded].fold(self._plan)
        self._num_folded += 1


class _Bucket:
    """Some parameters' gradients in one flat vector a node, cut into a part a rank."""

    def __init__(self, parameters: list[nn.Parameter], process: Process):
        self.parameters = parameters
        self.num_ready = 0
        self._process = process
        self._offsets, numel = [], 0
        for parameter in parameters:
            self._offsets.append(numel)
            numel += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self._part = -(-numel // process.world_size)
        self._flat: list[torch.Tensor] = []
        self._views: list[list[torch.Tensor]] = []
        self._received: torch.Tensor | None = None
        self._depth = 0
        self._pending: list[Any] = []

    @property
    def is_ready(self) -> bool:
        return self.num_ready == len(self.parameters)

    def begin(self) -> None:
        self.num_ready = self._depth = 0
        if not self._flat:
            self._allocate()

    def add(self, merges: int) -> None:
        """Adds the parameters' gradients as a node of their own, or to the one on top of the stack."""
        into = self._push() if merges == 0 else self._views[self._depth - 1]
        views, gradients = [], []
        for view, parameter in zip(into, self.parameters, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                views.append(view)
                gradients.append(gradient)
            elif merges == 0:
                view.zero_()
            else:
                view.add_(0.0)  # as on a rank that receives these zeros: -0.0 becomes 0.0
        if merges == 0:
            torch._foreach_copy_(views, gradients)
            return
        torch._foreach_add_(views, gradients)
        for _ in range(merges - 1):
            self._depth -= 1
            self._flat[self._depth - 1].add_(self._flat[self._depth])

    def ship(self, plan: Exchange) -> None:
        """Starts sending rank p the p-th part of each of our nodes; all ranks' j-th nodes go together."""
        num_nodes = [len(local.nodes) for local in plan.local]
        world_size, rank = self._process.world_size, self._process.rank
        received = self._rows(max(sum(num_nodes), world_size))
        first_row = 0
        for j in range(plan.max_nodes):
            sizes = [self._part if count > j else 0 for count in num_nodes]
            num_rows = sum(count > j for count in num_nodes)
            rows = received[first_row : first_row + num_rows].view(-1)
            first_row += num_rows
            ours = self._flat[j] if sizes[rank] else self._flat[0][:0]
            even = num_rows == world_size
            splits = () if even else (sizes, [sizes[rank]] * world_size)
            self._pending.append(dist.all_to_all_single(rows, ours, *splits, async_op=True))

    def fold(self, plan: Exchange) -> None:
        """Folds what was received to our part of the sum, and starts giving it to all."""
        self._wait()
        num_nodes = [len(local.nodes) for local in plan.local]
        received = self._rows(max(sum(num_nodes), self._process.world_size))
        row_of = _row_numbers(num_nodes)
        rows = [received[row_of[rank, j]] for rank, count in enumerate(num_nodes) for j in range(count)]
        sum_along(plan.combined, rows, torch.Tensor.add_)
        self._pending.append(_all_gather(self._flat[0], received, self._process.world_size))

    def finish(self) -> None:
        self._wait()
        for parameter, view in zip(self.parameters, self._views[0], strict=True):
            parameter.grad = view

    def _wait(self) -> None:
        for work in self._pending:
            work.wait()
        self._pending = []

    def _push(self) -> list[torch.Tensor]:
        if self._depth == len(self._flat):
            self._allocate()
        self._depth += 1
        return self._views[self._depth - 1]

    def _allocate(self) -> None:
        # Zeros, since what lies between the gradients is added and sent as well.
        like = self.parameters[0]
        flat = torch.zeros(self._part * self._process.world_size, dtype=like.dtype, device=like.device)
        self._flat.append(flat)
        self._views.append(
            [_view(flat, offset, p) for offset, p in zip(self._offsets, self.parameters, strict=True)]
        )

    def _rows(self, number: int) -> torch.Tensor:
        if self._received is None or len(self._received) < number:
            self._received = self._flat[0].new_zeros(number, self._part)
        return self._received


def _view(flat: torch.Tensor, offset: int, parameter: nn.Parameter) -> torch.Tensor:
    """A part of `flat` with the parameter's shape and, where it is dense, its order of elements."""
    run = flat[offset : offset + parameter.numel()]
    if _is_dense(parameter):
        return run.as_strided(parameter.shape, parameter.stride(), run.storage_offset())
    return run.view(parameter.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one run of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _row_numbers(num_nodes: list[int]) -> dict[tuple[int, int], int]:
    """(rank, j) -> the row where rank's j-th node arrives; the first, where the root ends up, is row 0."""
    numbers: dict[tuple[int, int], int] = {}
    for j in range(max(num_nodes)):
        for rank, count in enumerate(num_nodes):
            if count > j:
                numbers[rank, j] = len(numbers)
    return numbers


def _all_gather(flat: torch.Tensor, received: torch.Tensor, world_size: int) -> Any:
    """Starts filling `flat` with every rank's row 0."""
    if flat.device.type == "cuda":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(flat, received[0], async_op=True)
    # Gloo's all-gather copies through freshly allocated memory, which costs far more than this copy.
    rows = received[:world_size]
    rows[1:] = rows[:1]
    return dist.all_to_all_single(flat, rows.view(-1), async_op=True)


def _runs(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters of each bucket: from the last to the first, as their gradients come, one dtype each."""
    runs: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in reversed(parameters):
        key = parameter.dtype, parameter.device
        num_bytes = parameter.numel() * parameter.element_size()
        own = runs.setdefault(key, [])
        limit = _FIRST_BUCKET_BYTES if len(own) == 1 else _BUCKET_BYTES
        if not own or sizes[key] + num_bytes > limit:
            own.append([])
            sizes[key] = 0
        own[-1].append(parameter)
        sizes[key] += num_bytes
    return [run for own in runs.values() for run in own]
