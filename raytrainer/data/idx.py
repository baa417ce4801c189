"""Reads images and labels from IDX files, the format of MNIST and Fashion-MNIST, compressed or not."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from raytrainer.data.in_memory import InMemoryImages
from raytrainer.errors import DataError

# The third byte of an IDX file is the type of its numbers: 8 is unsigned bytes, as images and labels have.
UNSIGNED_BYTE = 8
FILE_PREFIXES = {"train": "train", "eval": "t10k"}


def read_idx(path: Path, num_dims: int) -> Tensor:
    """Reads an IDX file of unsigned bytes, gzip-compressed when its name ends in `.gz`; returns uint8.

    Format: http://yann.lecun.com/exdb/mnist/ (two zero bytes, type, number of dimensions, one big-endian
    32-bit size a dimension, the bytes). Raises DataError when the file is something else, cut off or damaged.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream:
            header = stream.read(4 + 4 * num_dims)
            shape = _shape_of(header, path, num_dims)
            values = bytearray(math.prod(shape))
            num_read = _read_into(stream, values)
            has_more = bool(stream.read(1))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged or cut off ({error})\n  copy it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if num_read < len(values) or has_more:
        found = f"{num_read} bytes" if num_read < len(values) else "more"
        raise DataError(
            f"{path}: {found} after the header\n"
            f"  its header promises {len(values)} ({' x '.join(map(str, shape))})\n"
            "  the file is cut off or damaged: copy it again"
        )
    if not values:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(values, dtype=torch.uint8).reshape(shape)


def _shape_of(header: bytes, path: Path, num_dims: int) -> list[int]:
    expected = bytes((0, 0, UNSIGNED_BYTE, num_dims))
    if header[:4] != expected or len(header) < 4 + 4 * num_dims:
        raise DataError(
            f"{path}: starts with {header[:4].hex(' ') or 'nothing'}\n"
            f"  an IDX file of {'images' if num_dims == 3 else 'labels'} starts with {expected.hex(' ')}"
        )
    return [int.from_bytes(header[4 + 4 * dim : 8 + 4 * dim], "big") for dim in range(num_dims)]


def _read_into(stream, values: bytearray) -> int:
    view, num_read = memoryview(values), 0
    while num_read < len(values):
        got = stream.readinto(view[num_read : num_read + (1 << 22)])
        if not got:
            break
        num_read += got
    return num_read


class IdxImages(InMemoryImages):
    """Images and labels from four IDX files in one folder, as MNIST and its look-alikes are published.

    root: the folder with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
    `t10k-labels-idx1-ubyte`, each with or without `.gz`. split: "train" or "eval" (the `t10k` files).
    normalize: (mean, std) of the pixels scaled to 0..1. augment and samples: as in InMemoryImages. The pixels
    are kept as bytes (47 MB for 60,000 of 28 x 28).
    Raises DataError for files that are missing, damaged, or do not belong together.
    """

    how_to_get = "put the four IDX files there, or set root to their folder"

    def __init__(
        self,
        root: str,
        split: str = "train",
        normalize: tuple[float, float] = (0.5, 0.5),
        augment: Literal["shift"] | Callable[[Tensor], Tensor] | None = None,
    ):
        if split not in FILE_PREFIXES:
            raise DataError(f'{type(self).__name__}: split = "{split}"\n  it is "train" or "eval"')
        prefix = FILE_PREFIXES[split]
        images_path = self._find(Path(root), f"{prefix}-images-idx3-ubyte")
        labels_path = self._find(Path(root), f"{prefix}-labels-idx1-ubyte")
        images, labels = read_idx(images_path, num_dims=3), read_idx(labels_path, num_dims=1)
        if len(images) != len(labels):
            raise DataError(
                f"{labels_path}: {len(labels)} labels\n  {images_path.name} has {len(images)} images; "
                "the two files do not belong together"
            )
        mean, std = normalize
        super().__init__(images, labels, mean, std, augment)

    def _find(self, root: Path, name: str) -> Path:
        for path in (root / name, root / f"{name}.gz"):
            if path.is_file():
                return path
        raise DataError(
            f"{type(self).__name__}: root = {root}\n"
            f"  {name} is not there, with or without .gz\n  {self.how_to_get}"
        )


class FashionMnist(IdxImages):
    """Fashion-MNIST: 60,000 images of clothes to train on and 10,000 to evaluate, 10 classes, 28 x 28 pixels.

    root: by default where Debian's and Ubuntu's package `dataset-fashion-mnist` puts them. split, augment: as
    in IdxImages. Source: Xiao, Rasul and Vollgraf, 2017, https://github.com/zalandoresearch/fashion-mnist.
    """

    classes = (
        "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
    )  # fmt: skip
    how_to_get = (
        "on Debian and Ubuntu: apt-get install dataset-fashion-mnist; elsewhere put the four files of "
        "https://github.com/zalandoresearch/fashion-mnist in a folder and set root to it"
    )

    def __init__(
        self,
        root: str = "/usr/share/datasets/fashion-mnist",
        split: str = "train",
        augment: Literal["shift"] | Callable[[Tensor], Tensor] | None = None,
    ):
        super().__init__(root, split, normalize=(0.2860, 0.3530), augment=augment)
