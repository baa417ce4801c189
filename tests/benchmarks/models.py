"""Models whose step is short, so that what a loop does around it shows."""

from __future__ import annotations

from torch import nn


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
