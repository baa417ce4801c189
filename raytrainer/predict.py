"""Predicts the classes of image files with a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raytrainer.data import class_names, image_preparation
from raytrainer.errors import DataError
from raytrainer.finished import FinishedRun
from raytrainer.transfer import to_device


@dataclass(frozen=True)
class Prediction:
    """One file's answer: (class, probability), the likeliest first; or why the file could not be read."""

    file: str
    classes: tuple[tuple[str, float], ...] = ()
    error: str | None = None


class ImagePredictor:
    """Predicts with `run`'s model and the preprocessing of its evaluation data, or else its training data.

    Raises DataError, with what to add, when that data set does not say how an image becomes an input.
    """

    def __init__(self, run: FinishedRun):
        self._run = run
        self._dataset, self._where = run.example_data()
        self._prepare: Callable[[Any], Tensor] = image_preparation(self._dataset, self._where)
        self._names = class_names(self._dataset)

    def __call__(self, files: Iterable[str], top_k: int = 3) -> Iterator[Prediction]:
        """The predictions in the order of the files; an unreadable one has an `error` and ends nothing."""
        waiting: list[tuple[str, Tensor | str]] = []
        for file in files:
            waiting.append((file, self._read(file)))
            if len(waiting) == self._batch_size:
                yield from self._answer(waiting, top_k)
                waiting = []
        yield from self._answer(waiting, top_k)

    @property
    def _batch_size(self) -> int:
        config = self._run.config
        return config.eval.batch_size or config.data.micro_batch_size

    def _read(self, file: str) -> Tensor | str:
        from PIL import Image, UnidentifiedImageError

        try:
            if Path(file).is_dir():
                return "it is a folder, not an image file"
            with Image.open(file) as image:
                image.load()
                image = image.copy()
        except UnidentifiedImageError:
            return "it is not an image that can be read"
        except OSError as error:
            return error.strerror or str(error)
        except (SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what a damaged file gives
            return str(error)
        try:
            prepared = self._prepare(image)
        except Exception as error:  # the data set's own code may raise anything: it is told, with its cause
            raise DataError(
                f"{self._where}: prepare_image of {type(self._dataset).__name__} raised "
                f"{type(error).__name__}: {error}\n  for {file}"
            ) from error
        if not isinstance(prepared, Tensor):
            raise DataError(
                f"{self._where}: prepare_image of {type(self._dataset).__name__} gave a "
                f"{type(prepared).__name__}\n  it gives a tensor, one input without the batch dimension"
            )
        return prepared

    def _answer(self, read: list[tuple[str, Tensor | str]], top_k: int) -> Iterator[Prediction]:
        """One forward pass for all inputs of one shape."""
        groups: dict[Any, list[int]] = {}
        for index, (_, value) in enumerate(read):
            if isinstance(value, Tensor):
                groups.setdefault((value.shape, value.dtype), []).append(index)
        answers: dict[int, Tensor] = {}
        for indices in groups.values():
            rows = self._probabilities(torch.stack([read[index][1] for index in indices]))
            answers.update(zip(indices, rows, strict=True))
        for index, (file, value) in enumerate(read):
            if isinstance(value, str):
                yield Prediction(file, error=value)
            else:
                yield Prediction(file, self._best(answers[index], top_k))

    def _probabilities(self, inputs: Tensor) -> Tensor:
        run = self._run
        try:
            with torch.inference_mode(), run.autocast():
                scores = run.task.predict_step(to_device(inputs, run.device))
        except Exception as error:  # the model's own code may raise anything: it is told, with its cause
            raise DataError(
                f"the model raised {type(error).__name__} on {len(inputs)} images {list(inputs.shape[1:])} "
                f"as {type(self._dataset).__name__}.prepare_image gives them: {error}"
            ) from error
        if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[1] < 2:
            found = f"a tensor {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            raise DataError(
                f"the model gave {found} for {len(inputs)} images\n"
                "  predictions are made from class scores [N, C], C at least 2; "
                "a task's predict_step can give them"
            )
        return scores.float().softmax(1).cpu()

    def _best(self, row: Tensor, top_k: int) -> tuple[tuple[str, float], ...]:
        values, classes = row.topk(min(top_k, len(row)))
        names = self._names if self._names is not None and len(self._names) == len(row) else None
        pairs = zip(classes.tolist(), values.tolist(), strict=True)
        return tuple((names[number] if names else str(number), value) for number, value in pairs)
