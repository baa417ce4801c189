"""Models whose step is short, so that what a loop does around it shows, and one with many parameters."""

from __future__ import annotations

import torch
from torch import nn


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


class _GreyResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet18

        self.network = resnet18(num_classes=10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images.expand(-1, 3, -1, -1))


def resnet18() -> nn.Module:
    """torchvision's, with its 11 million parameters, on small grey images."""
    return _GreyResNet()
