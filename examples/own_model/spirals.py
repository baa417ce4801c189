"""A model and a data set of one's own: nothing in here knows raytrainer."""

import torch
from torch import nn


class Spirals(torch.utils.data.Dataset):
    """Points of two arms that wind around each other; the label is the arm."""

    def __init__(self, num_points: int = 2000, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(num_points) % 2
        angle = 6.0 * torch.rand(num_points, generator=generator).sqrt()
        turned = angle + torch.pi * self.labels
        self.points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 6

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int):
        return self.points[index], self.labels[index]


class Net(nn.Sequential):
    def __init__(self, width: int = 64):
        layers = (nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
        super().__init__(*layers)
