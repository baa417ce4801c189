"""The microbatches of this rank on its device, from wherever the run stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from raytrainer.build import Data
from raytrainer.data import ElasticBatchSampler, EvalBatches, build_loader
from raytrainer.errors import warn
from raytrainer.state import Progress
from raytrainer.timing import StepTimer
from raytrainer.transfer import ahead_of_use

if TYPE_CHECKING:
    from raytrainer.config import Config


def configured_loader(
    config: Config, data: Data, dataset: Any, sampler: Any, device: torch.device, where: str
) -> Any:
    """A MicrobatchLoader of `dataset` with the settings of `data.loader`; whoever makes it closes it."""
    return build_loader(
        dataset,
        sampler,
        config.data.loader,
        collate_fn=data.collate_fn,
        seed=config.seed,
        on_bad_sample=config.data.on_bad_sample,
        device_type=device.type,
        where=where,
    )


class TrainingInput:
    """Hands out an epoch's remaining microbatches, one iterator for all of its steps.

    warm_up: called once, with this rank's first microbatch, before the first step; None where none needs it.
    """

    def __init__(
        self,
        config: Config,
        data: Data,
        sampler: ElasticBatchSampler,
        device: torch.device,
        timer: StepTimer,
        warm_up: Callable[[Any], None] | None,
    ):
        self._config, self._data, self._sampler = config, data, sampler
        self._device, self._timer, self._warm_up = device, timer, warm_up
        self._loader = configured_loader(config, data, data.train, sampler, device, "data.train")
        self._microbatches: Iterator[Any] | None = None
        self._named: set[int] = set()  # samples left out that were told already

    def close(self) -> None:
        self._loader.close()

    def microbatches(self, progress: Progress) -> Iterator[Any]:
        """The current epoch's LoadedMicrobatches from its first step that is not finished; the same iterator
        until `end_epoch`."""
        if self._microbatches is None:
            self._sampler.set_position(progress.epoch, progress.step_in_epoch)
            loaded = self._naming_what_is_left_out(self._timer.timed(iter(self._loader)))
            self._microbatches = ahead_of_use(loaded, self._device)
            if self._warm_up is not None:
                self._microbatches = self._after_warm_up(self._microbatches, self._warm_up)
                self._warm_up = None
        return self._microbatches

    def end_epoch(self) -> None:
        self._microbatches = None

    def _naming_what_is_left_out(self, microbatches: Iterator[Any]) -> Iterator[Any]:
        """The same microbatches; each sample left out is named once, by the rank that met it."""
        if self._config.data.on_bad_sample != "skip":
            return microbatches
        return self._with_names(microbatches)

    def _with_names(self, microbatches: Iterator[Any]) -> Iterator[Any]:
        for loaded in microbatches:
            for sample in loaded.skipped:
                if sample.index not in self._named:
                    self._named.add(sample.index)
                    warn(f"{sample.name} is left out: {sample.reason}")
            yield loaded

    def _after_warm_up(self, microbatches: Iterator[Any], warm_up: Callable[[Any], None]) -> Iterator[Any]:
        first = next(microbatches, None)
        if first is None:  # this rank is idle in a short last step
            warm_up(self.first_samples())
            return microbatches
        warm_up(first)
        return _chain(first, microbatches)

    def first_samples(self) -> Any:
        """A LoadedMicrobatch of the data set's first samples, wherever the run stands."""
        config, dataset = self._config, self._data.train
        batches = EvalBatches(min(len(dataset), config.data.micro_batch_size), 10**9)
        loader = configured_loader(config, self._data, dataset, batches, self._device, "data.train")
        try:
            return next(iter(ahead_of_use(iter(loader), self._device)))
        finally:
            loader.close()


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest
