"""Ratios of interleaved measurements, with a lower bound."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True)
class Ratio:
    """mean: geometric, over the rounds; low, high: bounds that the true mean passes with 5% chance each."""

    mean: float
    median: float
    low: float
    high: float


def ratio_of(ours: Sequence[float], theirs: Sequence[float], num_resamples: int = 4000) -> Ratio:
    """ours[i] / theirs[i] were measured in the same round i; bounds by resampling the rounds (bootstrap)."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    means = sorted(fmean(draw.choices(logs, k=len(logs))) for _ in range(num_resamples))
    low, high = means[int(0.05 * num_resamples)], means[int(0.95 * num_resamples) - 1]
    return Ratio(*(math.exp(value) for value in (fmean(logs), median(logs), low, high)))
