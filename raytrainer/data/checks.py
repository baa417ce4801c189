"""Says in a few words why a data set cannot be trained on, before and after the training finds out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset

from raytrainer.errors import DataError, SampleError


def inspect_dataset(dataset: Any, where: str = "data.train") -> int:
    """Returns the number of samples. Raises DataError for a data set that is iterable only or empty.

    where: the config key that the message names.
    """
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{where}: {name} can only be iterated\n"
            "  every step must get exactly its samples at any number of workers and after a resume, "
            "so samples are asked for by index\n"
            "  give a map-style data set, one with __getitem__ and __len__"
        )
    try:
        length = len(dataset)
    except TypeError as error:
        raise DataError(
            f"{where}: {name} has no length ({error})\n  give the data set a __len__, its number of samples"
        ) from error
    if length == 0:
        raise DataError(f"{where}: {name} has 0 samples\n  check its path, split and filters")
    return length


def root_sample(dataset: Any, index: int) -> tuple[Any, int]:
    """Follows torch Subsets down: returns the data set that holds sample `index`, and its index there."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, int(dataset.indices[index])
    return dataset, index


def answers_whole_batches(dataset: Any) -> bool:
    """Says whether the data set has a `__getitems__` of its own (a torch Subset only passes the call on)."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def sample_name(dataset: Any, index: int) -> str:
    """Returns "sample 12" and, for data sets with `samples` of (path, ...) as torchvision's, the path."""
    root, root_index = root_sample(dataset, index)
    samples = getattr(root, "samples", None)
    name = f"sample {index}"
    if isinstance(samples, Sequence) and root_index < len(samples):
        entry = samples[root_index]
        path = entry[0] if isinstance(entry, (tuple, list)) and entry else entry
        if isinstance(path, str) or hasattr(path, "__fspath__"):
            name += f" ({path})"
    return name


def label_range_error(
    labels: Any, num_classes: int, indices: Sequence[int] | None = None, ignore_index: int = -100
) -> SampleError | None:
    """Returns the error for the first class label outside 0..num_classes-1, or None when there is none.

    labels: integers of any shape, the first dimension being samples; indices: the samples' places in the data
    set, default 0, 1, ...; ignore_index: a label that the loss leaves out.
    """
    labels = torch.as_tensor(labels)
    wrong = ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)
    if not bool(wrong.any()):
        return None
    place = wrong.nonzero()[0].tolist()
    sample = indices[place[0]] if indices is not None and place else (place or [0])[0]
    label = int(labels[tuple(place)])
    at_least = f"at least {label + 1} outputs" if label >= 0 else "labels that start at 0"
    return SampleError(
        f"data: sample {sample} has the label {label}\n"
        f"  the model has {num_classes} outputs, so labels go from 0 to {num_classes - 1}\n"
        f"  give the model {at_least}, or mend the label"
    )
