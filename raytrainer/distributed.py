"""Which process this is, on which device, and the few collective operations that the loop needs.

Knows torch.distributed's environment variables (RANK, WORLD_SIZE, MASTER_ADDR ...) and nothing of Ray.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from raytrainer.errors import ClusterRequestError


@dataclass(frozen=True)
class Process:
    """One rank of a training job. The default is the only rank of a job of one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @classmethod
    def from_environment(cls) -> Process:
        """Reads what torchrun sets; with none of it set, a job of one."""

        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        world_size = number("WORLD_SIZE", 1)
        return cls(
            rank=number("RANK", 0),
            world_size=world_size,
            local_rank=number("LOCAL_RANK", 0),
            local_world_size=number("LOCAL_WORLD_SIZE", world_size),
            node_rank=number("GROUP_RANK", 0),
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def device(self, wants_gpu: bool | None) -> torch.device:
        """The device of this rank. wants_gpu: True, False, or None for a GPU where there is one."""
        if wants_gpu and not torch.cuda.is_available():
            raise ClusterRequestError(
                "scaling.gpus_per_worker asks for a GPU, and torch sees none here\n"
                "  write scaling.gpus_per_worker: 0, or auto; or look at nvidia-smi and torch.version.cuda"
            )
        if wants_gpu is False or not torch.cuda.is_available():
            return torch.device("cpu")
        # A launcher may show this process its own card alone, or every card of the node.
        num_visible = torch.cuda.device_count()
        return torch.device("cuda", self.local_rank if self.local_rank < num_visible else 0)

    @contextlib.contextmanager
    def join(self, device: torch.device, timeout_s: float = 1800.0) -> Iterator[None]:
        """Is a member of the process group inside; starts one, and ends it, only where none is up yet."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.world_size == 1 or dist.is_initialized():
            yield
            return
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def broadcast_object(value: Any, world_size: int) -> Any:
    """Rank 0's picklable `value`, on every rank."""
    if world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: Any, process: Process) -> list[Any]:
    """Every rank's `value` in rank order on rank 0, and an empty list on the others."""
    if process.world_size == 1:
        return [value]
    box = [None] * process.world_size if process.is_first else None
    dist.gather_object(value, box, dst=0)
    return box or []


def broadcast_tensors(tensors: Iterable[torch.Tensor], world_size: int) -> None:
    """Overwrites each tensor, in place, with rank 0's."""
    if world_size == 1:
        return
    for work in [dist.broadcast(tensor, src=0, async_op=True) for tensor in tensors if tensor.numel()]:
        work.wait()


def sum_gradients(parameters: Sequence[torch.nn.Parameter], bucket_mib: float = 25.0) -> None:
    """Sums `.grad` over all ranks, in place; a gradient that is None counts as zeros.

    For the steps that DistributedDataParallel cannot reduce: those in which a rank has nothing to compute.
    """
    buckets: dict[torch.dtype, list[list[torch.nn.Parameter]]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        runs = buckets.setdefault(parameter.grad.dtype, [[]])
        num_bytes = sum(other.grad.numel() * other.grad.element_size() for other in runs[-1])
        if runs[-1] and num_bytes > bucket_mib * 2**20:
            runs.append([])
        runs[-1].append(parameter)
    pending = []
    for runs in buckets.values():
        for run in runs:
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in run])
            pending.append((run, flat, dist.all_reduce(flat, async_op=True)))
    for run, flat, work in pending:
        work.wait()
        parts = flat.split([parameter.numel() for parameter in run])
        torch._foreach_copy_(
            [parameter.grad for parameter in run],
            [part.view_as(parameter) for part, parameter in zip(parts, run, strict=True)],
        )
