"""From an image file to a model's input: what a data set must offer so that `raytrainer predict` can use it.

A data set may have

    def prepare_image(self, image: PIL.Image.Image) -> torch.Tensor: one input, without the batch dimension
    def preprocessing(self) -> dict: the numbers of that, for the metadata of an export
    classes: Sequence[str], names in the order of the model's outputs

`prepare_image` does to any image what `__getitem__` does to the evaluation images, without augmentation. The
image data sets of raytrainer have all three, but for the names of some; a class without one is its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from raytrainer.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


def image_preparation(dataset: Any, where: str = "data.eval") -> Callable[[Image], Tensor]:
    """The data set's `prepare_image`. Raises DataError, with what to add, when it has none."""
    root = _root(dataset)
    prepare = getattr(root, "prepare_image", None)
    if not callable(prepare):
        name = type(root).__name__
        raise DataError(
            f"{where}: {name} does not say how an image file becomes an input of the model\n"
            f"  add to {name}:\n"
            "    def prepare_image(self, image):  # a PIL.Image; as in evaluation, without augmentation\n"
            "        return tensor  # one input, without the batch dimension\n"
            "  and, for names in place of numbers: classes = ['cat', 'dog']"
        )
    return prepare


def class_names(dataset: Any) -> list[str] | None:
    """The names of the classes in the order of the model's outputs; None where the data set does not say."""
    classes = getattr(_root(dataset), "classes", None)
    if isinstance(classes, Sequence) and not isinstance(classes, str):
        return [str(name) for name in classes]
    return None


def preprocessing_of(dataset: Any) -> dict[str, Any] | None:
    """What the data set says about its own preprocessing, as plain values; None where it does not."""
    describe = getattr(_root(dataset), "preprocessing", None)
    return describe() if callable(describe) else None


def grey_pixels(image: Image, height: int, width: int) -> Tensor:
    """Any image as uint8 [height, width]: grey, and resized where it has another size."""
    if image.mode.startswith("I;16"):  # PIL's own conversion would cut 16 bits off at 255
        image = _from_array((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert("L")
    if image.size != (width, height):
        image = image.resize((width, height))
    return torch.from_numpy(np.array(image))


def _from_array(pixels: np.ndarray) -> Image:
    from PIL import Image

    return Image.fromarray(pixels)


def _root(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
