"""A text file as a character-level language modelling data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from raytrainer.errors import DataError


class TextFile(Dataset):
    """Pieces of a UTF-8 text; a model learns to predict each character from those before it.

    path: the text; null: Python's own language reference (some 450,000 characters), which every Python brings
    along. block_size: characters a sample. split: "train" or "eval", the last `eval_fraction` of it.
    vocab_size: outputs of the model, at least the number of different characters; default: just that number.
    stride: characters from one sample's start to the next's; default block_size: no overlap.

    `dataset.__getitems__(indices)` is the ready batch (inputs, targets), both int64 [n, block_size], targets
    one character ahead. `vocabulary` is the text's characters in order of their code points, the same for
    both splits. Raises DataError for a file that cannot be read, is too short, or has more characters than
    vocab_size.
    """

    draws_from = ()

    def __init__(
        self,
        path: str | None = None,
        block_size: int = 128,
        split: str = "train",
        eval_fraction: float = 0.1,
        vocab_size: int | None = None,
        stride: int | None = None,
    ):
        if split not in ("train", "eval"):
            raise DataError(f'TextFile: split = "{split}"\n  it is "train" or "eval"')
        if not 0 < eval_fraction < 1 or block_size < 1 or (stride is not None and stride < 1):
            raise DataError(
                f"TextFile: eval_fraction = {eval_fraction}, block_size = {block_size}, stride = {stride}\n"
                "  eval_fraction is between 0 and 1; block_size and stride are at least 1"
            )
        text = _python_reference() if path is None else _read(path)
        self.vocabulary = "".join(sorted(set(text)))
        if vocab_size is not None and len(self.vocabulary) > vocab_size:
            raise DataError(
                f"TextFile: vocab_size = {vocab_size}\n  it has {len(self.vocabulary)} different characters\n"
                f"  write vocab_size: {len(self.vocabulary)} or more, here and in the model"
            )
        self.vocab_size = vocab_size or len(self.vocabulary)
        self.block_size = block_size
        self.stride = stride or block_size
        boundary = round(len(text) * (1 - eval_fraction))
        self._tokens = self.encode(text[:boundary] if split == "train" else text[boundary:])
        if len(self._tokens) <= block_size:
            raise DataError(
                f"TextFile: path = {path}\n"
                f"  the {split} split has {len(self._tokens)} characters; a sample takes {block_size + 1}\n"
                "  give a longer text, a smaller block_size or another eval_fraction"
            )

    def encode(self, text: str) -> Tensor:
        """Returns the characters' numbers: int32 [len(text)]. Raises DataError for an unknown one."""
        known, wanted = _code_points(self.vocabulary), _code_points(text)
        numbers = np.searchsorted(known, wanted).clip(max=len(known) - 1)
        strange = known[numbers] != wanted
        if strange.any():
            raise DataError(f"TextFile: {chr(wanted[strange.argmax()])!r} is not in the vocabulary")
        return torch.from_numpy(numbers.astype(np.int32))

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """Returns the text that the numbers stand for."""
        return "".join(self.vocabulary[int(token)] for token in tokens)

    def __len__(self) -> int:
        return (len(self._tokens) - 1 - self.block_size) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        starts = torch.as_tensor(indices) * self.stride
        pieces = self._tokens[starts.unsqueeze(1) + torch.arange(self.block_size + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"TextFile: path = {path}\n  {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"TextFile: path = {path}\n  it is not UTF-8 text ({error})") from error


def _python_reference() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "TextFile: path = null\n  this Python lacks pydoc_data, the text of its language reference\n"
            "  set path to a text file of your own"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))
