"""Loads microbatches: seeds each sample's randomness, deals with bad samples, collates, pins.

What a microbatch holds depends on the seed and its place in the run alone, not on which process loaded it.
"""

from __future__ import annotations

import multiprocessing.connection
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from raytrainer.data.checks import answers_whole_batches, inspect_dataset, root_sample, sample_name
from raytrainer.data.loader_process import (
    begin_loader_worker,
    explain_loader_error,
    lost_loader_worker,
    start_loader_workers,
)
from raytrainer.data.order import MICROBATCH_STREAM, SAMPLE_STREAM, mix_seed
from raytrainer.data.sampler import Microbatch
from raytrainer.errors import DataError, RaytrainerError, SampleError

# Faults in the data set's code, or of the machine: never a bad sample, so `skip` does not hide them.
NEVER_SKIPPED = (MemoryError, NameError, ImportError, NotImplementedError)


class _Generator(NamedTuple):
    """A global random generator: how it is seeded with 64 bits, read and put back."""

    seed: Callable[[int], Any]
    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]


GENERATORS = {
    "python": _Generator(random.seed, random.getstate, random.setstate),
    # NumPy takes more than 32 bits only as an array, which is eight times slower to seed with.
    "numpy": _Generator(
        lambda seed: np.random.seed(seed & 0xFFFF_FFFF), np.random.get_state, np.random.set_state
    ),
    # Not torch.manual_seed: it would also seed the accelerator, which is the trainer's to seed.
    "torch": _Generator(
        torch.default_generator.manual_seed,
        torch.default_generator.get_state,
        torch.default_generator.set_state,
    ),
}
ALL_GENERATORS = tuple(GENERATORS)


@dataclass(frozen=True, slots=True)
class SkippedSample:
    """A sample that was left out: its index in the data set, its name for messages, and what it raised."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoadedMicrobatch:
    """What the loader yields.

    microbatch: what was asked for; batch: what the data set answered, collated, or None when every sample was
    skipped; num_samples: in the batch, skipped ones not counted; indices: of the samples in the batch, in its
    order; skipped: the samples left out.
    """

    microbatch: Microbatch
    batch: Any
    num_samples: int
    indices: list[int]
    skipped: tuple[SkippedSample, ...] = ()

    def pin_memory(self) -> LoadedMicrobatch:
        """Returns a copy in page-locked memory; called by the DataLoader."""
        return replace(self, batch=torch.utils.data._utils.pin_memory.pin_memory(self.batch))


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error on its way from a loader worker to the train worker, where it is raised as it is."""

    kind: type[RaytrainerError]
    message: str

    def pin_memory(self) -> _Failure:
        return self


class MicrobatchDataset:
    """Answers a Microbatch with a LoadedMicrobatch.

    Randomness: for data sets with only `__getitem__`, Python's, NumPy's and torch's generators are seeded
    from (seed, epoch, sample index) before each sample; for those with `__getitems__`, from (seed, epoch,
    step, microbatch number) before the call, as they are before a custom `collate_fn`. In a process that is
    no loader worker the generators are put back afterwards, so loading does not change what the model draws.
    A data set may say in `draws_from` which of ("python", "numpy", "torch") it draws from, or () for none:
    the others are then left alone, which saves some 0.1 ms a microbatch.

    `__getitems__(indices)` that returns a list gives samples to be collated; anything else is a ready batch.
    """

    def __init__(self, dataset: Any, seed: int, collate_fn: Callable | None, skip_bad_samples: bool):
        self.dataset = dataset
        self.seed = seed
        self.collate_fn = collate_fn
        self.skip_bad_samples = skip_bad_samples
        self.whole_batches = answers_whole_batches(dataset)
        self.draws_from = ALL_GENERATORS
        if collate_fn is None:
            self.draws_from = getattr(root_sample(dataset, 0)[0], "draws_from", ALL_GENERATORS)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, microbatch: Microbatch) -> LoadedMicrobatch | _Failure:
        if get_worker_info() is not None:
            return self._load(microbatch)
        states = [(GENERATORS[name], GENERATORS[name].get_state()) for name in self.draws_from]
        try:
            return self._load(microbatch)
        finally:
            for generator, state in states:
                generator.set_state(state)

    def _load(self, microbatch: Microbatch) -> LoadedMicrobatch | _Failure:
        try:
            if self.whole_batches:
                batch, skipped = self._whole_batch(microbatch)
            else:
                batch, skipped = self._samples(microbatch)
            left_out = {sample.index for sample in skipped}
            indices = microbatch.indices
            if left_out:
                indices = [index for index in indices if index not in left_out]
            if not indices:
                return LoadedMicrobatch(microbatch, None, 0, [], skipped)
            if isinstance(batch, list):
                batch = self._collate(microbatch, batch, indices)
            elif self.collate_fn is not None:
                raise DataError(
                    f"data.collate_fn: {type(self.dataset).__name__} answers ready batches, "
                    "so there are no samples to collate\n  leave collate_fn out"
                )
            return LoadedMicrobatch(microbatch, batch, len(indices), indices, skipped)
        except (DataError, SampleError) as error:
            return _Failure(type(error), str(error))

    def _samples(self, microbatch: Microbatch) -> tuple[list[Any], tuple[SkippedSample, ...]]:
        samples, skipped = [], []
        for index in microbatch.indices:
            self._seed(SAMPLE_STREAM, microbatch.epoch, index)
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                skipped.append(self._bad_sample(index, error))
        return samples, tuple(skipped)

    def _whole_batch(self, microbatch: Microbatch) -> tuple[Any, tuple[SkippedSample, ...]]:
        try:
            return self._ask(microbatch, microbatch.indices), ()
        except Exception as error:
            skipped = self._find_bad_samples(microbatch, error)
        left_out = {sample.index for sample in skipped}
        good = [index for index in microbatch.indices if index not in left_out]
        return (self._ask(microbatch, good) if good else None), skipped

    def _ask(self, microbatch: Microbatch, indices: list[int]) -> Any:
        self._seed(MICROBATCH_STREAM, microbatch.epoch, microbatch.step, microbatch.number)
        return self.dataset.__getitems__(indices)

    def _find_bad_samples(self, microbatch: Microbatch, error: Exception) -> tuple[SkippedSample, ...]:
        """Asks for the samples of a failed batch one by one. Raises SampleError when none is bad on
        its own."""
        bad = []
        for index in dict.fromkeys(microbatch.indices):
            try:
                self._ask(microbatch, [index])
            except Exception as sample_error:
                bad.append(self._bad_sample(index, sample_error))
        if not bad:
            raise SampleError(
                f"data: {type(self.dataset).__name__}.__getitems__ failed on {_some(microbatch.indices)}, "
                f"none of which fails alone\n  {_described(error)}"
            ) from error
        return tuple(bad)

    def _bad_sample(self, index: int, error: Exception) -> SkippedSample:
        name = sample_name(self.dataset, index)
        if not self.skip_bad_samples or isinstance(error, NEVER_SKIPPED):
            raise SampleError(
                f"data: {name} cannot be loaded\n  {_described(error)}\n"
                + (
                    "  an error of this kind is a fault in the code, not in the sample"
                    if isinstance(error, NEVER_SKIPPED)
                    else "  mend or remove it, or write data.on_bad_sample: skip"
                )
            ) from error
        return SkippedSample(index, name, _described(error))

    def _collate(self, microbatch: Microbatch, samples: list[Any], indices: list[int]) -> Any:
        try:
            if self.collate_fn is None:
                return default_collate(samples)
            self._seed(MICROBATCH_STREAM, microbatch.epoch, microbatch.step, microbatch.number)
            return self.collate_fn(samples)
        except Exception as error:
            raise SampleError(
                f"data: {_some(indices)} cannot be put into one batch\n  {_described(error)}\n"
                "  samples of one data set have one shape and type; bring them to it in the data set, "
                "or give data.collate_fn"
            ) from error

    def _seed(self, *numbers: int) -> None:
        if self.draws_from:
            seed = mix_seed(numbers[0], self.seed, *numbers[1:])
            for name in self.draws_from:
                GENERATORS[name].seed(seed)


class MicrobatchLoader(DataLoader):
    """A DataLoader of LoadedMicrobatch; its errors are raytrainer's. Made by `build_loader`.

    After an error, or when it is no longer needed, `close` ends the loader workers.
    """

    _running: Callable[[], Any] = staticmethod(lambda: None)

    def __iter__(self) -> Iterator[LoadedMicrobatch]:
        batches = start_loader_workers(self._batches, self.close) if self._forks() else self._batches()
        return _Iterator(self, batches)

    def _batches(self) -> Iterator[Any]:
        batches = super().__iter__()
        self._running = weakref.ref(batches)
        return batches

    def _forks(self) -> bool:
        """Whether loader workers are forked for the next iterator."""
        if self.num_workers == 0 or self._iterator is not None:
            return False
        return (self.multiprocessing_context or multiprocessing).get_start_method() == "fork"

    def close(self) -> None:
        """Ends the loader workers now; may be called twice, and the loader used again.

        Left to the garbage collector, each loader can wait 5 s for them, since Python may close the queue
        that tells them to stop before torch has used it.
        """
        running = self._running()
        self._iterator = None
        if hasattr(running, "_shutdown_workers"):
            running._shutdown_workers()


class _Iterator:
    def __init__(self, loader: MicrobatchLoader, batches: Iterator[Any]):
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> LoadedMicrobatch:
        try:
            loaded = next(self._batches)
        except RuntimeError as error:
            explained = explain_loader_error(error)
            if explained is None:
                raise
            self._close_after_loss()
            raise explained from error
        except (OSError, EOFError) as error:
            # What the data set raises comes as a _Failure: this is a broken connection to a loader worker.
            explained = self._cause_of_broken_connection(error)
            self._close_after_loss()
            raise explained from error
        if isinstance(loaded, _Failure):
            self._loader.close()
            raise loaded.kind(loaded.message)
        return loaded

    def _cause_of_broken_connection(self, error: Exception) -> RaytrainerError:
        workers = getattr(self._batches, "_workers", ())
        try:
            # The connection breaks just before the process is gone; torch's SIGCHLD handler tells why.
            multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=5)
        except RuntimeError as cause:
            explained = explain_loader_error(cause)
            if explained is not None:
                return explained
        return lost_loader_worker(f"a loader worker broke off ({type(error).__name__}: {error})")

    def _close_after_loss(self) -> None:
        try:
            self._loader.close()
        except RuntimeError as error:
            # torch's SIGCHLD handler may speak up a second time, about the same death.
            if explain_loader_error(error) is None:
                raise


def build_loader(
    dataset: Any,
    sampler: Any,
    settings: Any,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    on_bad_sample: str = "stop",
    device_type: str = "cpu",
    where: str = "data.train",
) -> MicrobatchLoader:
    """Returns a loader of this rank's microbatches, as the sampler orders them.

    sampler: iterable of Microbatch, such as ElasticBatchSampler and EvalBatches. settings: the config's
    `data.loader` section. seed: of the augmentation. device_type: "cuda" turns pinning on where it is `auto`.
    where: the config key that messages name.
    Raises DataError for a data set that is empty or can only be iterated; while iterating, SampleError for a
    bad sample (on_bad_sample "stop") and WorkerLostError when a loader worker is killed or timeout_s passes.
    """
    inspect_dataset(dataset, where)
    num_workers = settings.num_workers
    in_workers: dict[str, Any] = {}
    if num_workers > 0:
        in_workers = {
            "prefetch_factor": settings.prefetch_factor or 2,
            "persistent_workers": settings.persistent_workers,
            "multiprocessing_context": settings.multiprocessing_context,
            "timeout": settings.timeout_s,
            "worker_init_fn": begin_loader_worker,
        }
    return MicrobatchLoader(
        MicrobatchDataset(dataset, seed, collate_fn, on_bad_sample == "skip"),
        batch_sampler=sampler,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        pin_memory=device_type == "cuda" if settings.pin_memory == "auto" else settings.pin_memory,
        # A generator of its own: by default a DataLoader draws from torch's global one at each epoch.
        generator=torch.Generator().manual_seed(seed),
        **in_workers,
    )


def _as_it_is(loaded: Any) -> Any:
    return loaded


def _some(indices: list[int]) -> str:
    shown = ", ".join(str(index) for index in indices[:8])
    return f"samples {shown}{', ...' if len(indices) > 8 else ''}"


def _described(error: Exception) -> str:
    """One line: the exception and the innermost place of the user's code that it came from."""
    place = ""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    if frames is not None:
        while (
            frames.tb_next is not None and "site-packages" not in frames.tb_next.tb_frame.f_code.co_filename
        ):
            frames = frames.tb_next
        code = frames.tb_frame.f_code
        place = f" ({code.co_filename}:{frames.tb_lineno} in {code.co_name})"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}{place}"
