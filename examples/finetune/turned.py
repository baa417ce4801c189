"""Digits lying on their side: data that a model of upright digits is to be adapted to."""

from collections.abc import Sequence

import torch
from torch import Tensor

from raytrainer.data import MnistSubset


class TurnedDigits(MnistSubset):
    """One in `every` of the packaged digits, turned by 90 degrees; whole batches at once, as MnistSubset.

    `raytrainer predict` takes image files of digits that lie on their side already.
    """

    def __init__(self, split: str = "train", every: int = 1):
        super().__init__(split)
        self.images, self.targets = self.images[::every], self.targets[::every]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        images, labels = super().__getitems__(indices)
        return torch.rot90(images, dims=(2, 3)), labels
