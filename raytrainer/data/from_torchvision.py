"""Data sets that torchvision downloads or reads, with errors that say what to do.

torchvision takes a second to import, so it is imported when one of them is made.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset

from raytrainer.data.in_memory import MNIST_MEAN, MNIST_STD, InMemoryImages
from raytrainer.errors import DataError

# Mean and standard deviation of ImageNet's red, green and blue, as torchvision's own weights expect them.
IMAGENET_COLOURS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class TorchvisionMnist(InMemoryImages):
    """The whole of MNIST: 60,000 digits to train on, 10,000 to evaluate; downloaded by torchvision.

    root: folder for the files (63 MB). split: "train" or "eval". download: fetch what is missing; of the
    processes on one machine only one does, the others wait. augment and samples: as in InMemoryImages.
    Raises DataError when the files are not there and cannot be downloaded.
    """

    classes = tuple("0123456789")

    def __init__(
        self,
        root: str = "data",
        split: str = "train",
        download: bool = True,
        augment: Literal["shift"] | Callable[[Tensor], Tensor] | None = None,
    ):
        if split not in ("train", "eval"):
            raise DataError(f'TorchvisionMnist: split = "{split}"\n  it is "train" or "eval"')
        from torchvision.datasets import MNIST

        try:
            with _one_at_a_time(Path(root)):
                mnist = MNIST(root, train=split == "train", download=download)
        # urllib's errors are OSErrors; torchvision raises RuntimeError for a bad checksum or missing files,
        # and ValueError or EOFError from the files of an interrupted download.
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            raise DataError(
                f"TorchvisionMnist: root = {root}\n"
                f"  the 60,000 digits are not there and cannot be downloaded ({_in_one_line(error)})\n"
                "  configs/mnist.yaml trains on 5,000 digits that ship with raytrainer and needs no network; "
                f"or copy MNIST's files to {Path(root) / 'MNIST' / 'raw'}"
            ) from error
        super().__init__(mnist.data, mnist.targets, MNIST_MEAN, MNIST_STD, augment)


class ImageFolder(Dataset):
    """Images in one folder a class, `root/<class>/<any name>.jpg`; classes are numbered by name.

    root: the folder of class folders. transforms: callables applied in turn to the PIL image, such as those
    of torchvision.transforms.v2, or a single one; what they give then becomes float32 [3, H, W] from 0 to 1.
    normalize: (mean, std), each of three numbers, or "imagenet", or None for none.
    `dataset[i]` is (image, class); `classes`, `targets` and `samples` are as torchvision's.
    Raises DataError when there is no such folder, no class folder, or a class without images.
    """

    def __init__(
        self,
        root: str,
        transforms: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] = (),
        normalize: Literal["imagenet"] | tuple[Sequence[float], Sequence[float]] | None = None,
    ):
        import torch
        from torchvision.datasets import ImageFolder as TorchvisionImageFolder
        from torchvision.transforms import v2

        steps = [transforms] if callable(transforms) else list(transforms)
        self._transforms = [repr(step) for step in steps]
        self._colours: Any = None
        steps += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        if normalize is not None:
            mean, std = IMAGENET_COLOURS if normalize == "imagenet" else normalize
            self._colours = [list(mean), list(std)]
            steps.append(v2.Normalize(mean, std))
        steps.append(v2.ToPureTensor())
        self._prepare = v2.Compose(steps)
        try:
            self._folder = TorchvisionImageFolder(root, transform=self._prepare)
        except OSError as error:
            raise DataError(
                f"ImageFolder: root = {root}\n  {_in_one_line(error)}\n"
                "  the layout is root/<class>/<image>.jpg, one folder a class"
            ) from error
        self.classes: list[str] = self._folder.classes
        self.samples: list[tuple[str, int]] = self._folder.samples
        self.targets: list[int] = self._folder.targets

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._folder[index]

    def prepare_image(self, image: Any) -> Tensor:
        """A PIL image as an input of the model, float32 [3, H, W], through this data set's own transforms."""
        return self._prepare(image.convert("RGB"))

    def preprocessing(self) -> dict[str, Any]:
        """How an image becomes an input: the transforms in words, the rest in numbers."""
        mean, std = self._colours or (None, None)
        return {"mode": "RGB", "transforms": self._transforms, "scale": 1 / 255, "mean": mean, "std": std}


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder, freed by the kernel when the process ends, however it ends."""
    if folder.is_dir() and not os.access(folder, os.W_OK):
        # A read-only folder that others filled: nothing can be downloaded into it.
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".download.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
