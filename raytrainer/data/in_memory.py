"""Image data sets that lie in memory as bytes and answer whole batches, which makes small images fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from raytrainer.data.augment import random_shift
from raytrainer.data.prediction import grey_pixels
from raytrainer.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081


class InMemoryImages(Dataset):
    """Grey images kept as bytes, turned into normalised float32 a batch at a time.

    images: uint8 [N, H, W]; labels: integers [N]; mean, std: of the pixels scaled to 0..1.
    augment: "shift" (moved by up to 2 pixels), or a callable from uint8 [n, H, W] to the same, or None.
    `dataset[i]` is (image [1, H, W], label); `dataset.__getitems__(indices)` is the ready batch
    (images float32 [n, 1, H, W], labels int64 [n]). The classes of all samples are in `targets`.

    The contract that the loader follows for every data set: when `__getitems__(indices)` returns a list, its
    items are samples, to be collated; anything else is a ready batch and goes to the model as it is.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: float,
        std: float,
        augment: Literal["shift"] | Callable[[Tensor], Tensor] | None = None,
    ):
        if isinstance(augment, str) and augment != "shift":
            raise DataError(f'augment = "{augment}"\n  it is "shift", a callable or null')
        self.images = images
        self.targets = labels.to(torch.int64)
        self._mean, self._std = mean, std
        self._scale = 1.0 / (255.0 * std)
        self._offset = -mean / std
        self._augment = random_shift if augment == "shift" else augment
        # Read by the loader: a user's own callable may draw from any of the global generators.
        if augment is None:
            self.draws_from: tuple[str, ...] = ()
        else:
            self.draws_from = ("torch",) if augment == "shift" else ("python", "numpy", "torch")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        where = torch.as_tensor(indices)
        # index_select is several times faster than images[where] on small batches.
        images = self.images.index_select(0, where)
        if self._augment is not None:
            images = self._augment(images)
        return self._normalised(images), self.targets.index_select(0, where)

    def _normalised(self, images: Tensor) -> Tensor:
        """uint8 [n, H, W] to float32 [n, 1, H, W]."""
        return images.to(torch.float32).mul_(self._scale).add_(self._offset).unsqueeze_(1)

    def prepare_image(self, image: Image) -> Tensor:
        """Any PIL image as an input of the model, float32 [1, H, W]: grey, resized, normalised."""
        return self._normalised(grey_pixels(image, *self.images.shape[1:]).unsqueeze(0))[0]

    def preprocessing(self) -> dict[str, Any]:
        """How an image becomes an input, in numbers."""
        return {
            "mode": "L",
            "size": list(self.images.shape[1:]),
            "scale": 1 / 255,
            "mean": [self._mean],
            "std": [self._std],
        }


class MnistSubset(InMemoryImages):
    """5,000 real handwritten digits (MNIST) that ship with raytrainer: 10 classes, 28 x 28 pixels.

    split: "train" (4,000, of each digit 400) or "eval" (the other 1,000). augment: None or "shift", which
    moves each digit by up to 2 pixels at random. Samples are as in InMemoryImages.
    Origin and licence: raytrainer/data/files/ORIGIN.md. Digits are bright on a dark ground, and so must be
    those of an image file to predict.
    """

    classes = tuple("0123456789")

    def __init__(self, split: str = "train", augment: Literal["shift"] | None = None):
        if split not in ("train", "eval"):
            raise DataError(f'MnistSubset: split = "{split}"\n  it is "train" or "eval"')
        source = resources.files("raytrainer.data").joinpath("files/mnist_5k.npz")
        with source.open("rb") as stream, np.load(stream) as arrays:
            chosen = arrays["is_eval"] == (split == "eval")
            images, labels = arrays["images"][chosen], arrays["labels"][chosen]
        super().__init__(torch.from_numpy(images), torch.from_numpy(labels), MNIST_MEAN, MNIST_STD, augment)
