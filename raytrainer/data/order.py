"""The order in which an epoch visits the samples: a function of (seed, epoch) and of nothing else.

A custom order is any object with `__call__(seed, epoch)` that returns a 1-D integer tensor or array of
sample indices, of the same length for every epoch. It must depend on `seed` and `epoch` alone: each rank
calls it for itself, and a resumed run calls it again.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raytrainer.errors import DataError

SampleOrder = Callable[[int, int], Any]

# The first number that goes into a seed says what the seed is for, so that no two purposes share a stream.
ORDER_STREAM, WEIGHTED_STREAM, SAMPLE_STREAM, MICROBATCH_STREAM = range(4)


def mix_seed(*numbers: int) -> int:
    """Mixes integers (each taken modulo 2**64) into one 64-bit seed, the same on every machine."""
    packed = struct.pack(f"<{len(numbers)}Q", *(number & 0xFFFF_FFFF_FFFF_FFFF for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def epoch_order(seed: int, epoch: int, num_samples: int, shuffle: bool) -> torch.Tensor:
    """Returns the sample indices of an epoch in the order of their use: int64, shape [num_samples]."""
    if not shuffle:
        return torch.arange(num_samples)
    generator = torch.Generator().manual_seed(mix_seed(ORDER_STREAM, seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def validated_order(order: SampleOrder, seed: int, epoch: int, dataset_length: int) -> torch.Tensor:
    """Calls a custom order and checks what it answers; returns int64 indices.

    Raises DataError for anything but a non-empty 1-D sequence of integers from 0 to dataset_length - 1.
    """
    name = type(order).__name__
    indices = torch.as_tensor(order(seed, epoch))
    if (
        indices.ndim != 1
        or len(indices) == 0
        or indices.dtype.is_floating_point
        or indices.dtype == torch.bool
    ):
        raise DataError(
            f"data.order: {name} answered shape {list(indices.shape)} of {indices.dtype} for epoch {epoch}\n"
            "  an order is a non-empty 1-D tensor of integer sample indices"
        )
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= dataset_length:
        raise DataError(
            f"data.order: {name} answered sample index {low if low < 0 else high} for epoch {epoch}\n"
            f"  the data set has {dataset_length} samples, so indices go from 0 to {dataset_length - 1}"
        )
    return indices.to(torch.int64)


class WeightedOrder:
    """Draws each epoch's samples with probabilities in proportion to their weights.

    weights: one number a sample, none negative, not all zero. num_samples: draws an epoch; default: as many
    as there are weights. replacement: whether a sample may come more than once in an epoch.
    Raises DataError for weights that cannot be drawn from.
    """

    def __init__(self, weights: Sequence[float], num_samples: int | None = None, replacement: bool = True):
        self.weights = torch.as_tensor(weights, dtype=torch.float64)
        self.num_samples = len(self.weights) if num_samples is None else num_samples
        self.replacement = replacement
        if self.weights.ndim != 1 or not bool((torch.isfinite(self.weights) & (self.weights >= 0)).all()):
            raise DataError("data.order: the weights must be a list of finite numbers, none below 0")
        num_drawable = int((self.weights > 0).sum())
        if num_drawable == 0:
            raise DataError("data.order: all weights are 0\n  at least one sample needs a weight above 0")
        if self.num_samples < 1 or (not replacement and self.num_samples > num_drawable):
            raise DataError(
                f"data.order: num_samples = {self.num_samples}\n"
                f"  without replacement it goes from 1 to {num_drawable}, the number of weights above 0"
                if not replacement
                else f"data.order: num_samples = {self.num_samples}\n  it must be at least 1"
            )

    def __call__(self, seed: int, epoch: int) -> torch.Tensor:
        """Returns the indices of one epoch: int64, shape [num_samples]."""
        generator = torch.Generator().manual_seed(mix_seed(WEIGHTED_STREAM, seed, epoch))
        if self.replacement:
            edges = self.weights.cumsum(0)
            draws = torch.rand(self.num_samples, dtype=torch.float64, generator=generator) * edges[-1]
            # right=True: a sample of weight 0 has an empty interval and can never be drawn.
            last_drawable = int(self.weights.nonzero()[-1])
            return torch.searchsorted(edges, draws, right=True).clamp_(max=last_drawable)
        # Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006): the largest log(u)/w.
        uniform = torch.rand(len(self.weights), dtype=torch.float64, generator=generator)
        keys = uniform.clamp_(min=1e-300).log_().div_(self.weights)
        return keys.argsort(descending=True, stable=True)[: self.num_samples]


class ClassBalancedOrder(WeightedOrder):
    """Draws every class equally often, whatever its share of the data set.

    dataset: one with `targets`, the class of each sample as an integer. num_samples, replacement: as in
    WeightedOrder. Raises DataError for a data set without `targets`.
    """

    def __init__(self, dataset: Any, num_samples: int | None = None, replacement: bool = True):
        targets = getattr(dataset, "targets", None)
        if targets is None:
            raise DataError(
                f"data.order: {type(dataset).__name__} has no `targets`\n"
                "  ClassBalancedOrder reads each sample's class from dataset.targets; "
                "give the data set that attribute or use WeightedOrder with weights of your own"
            )
        _, class_of_sample, class_sizes = torch.unique(
            torch.as_tensor(targets), return_inverse=True, return_counts=True
        )
        super().__init__(1.0 / class_sizes[class_of_sample].double(), num_samples, replacement)
