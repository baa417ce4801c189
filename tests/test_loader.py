"""The loader: the same batches from any number of loader workers, bad samples, no process left."""

from __future__ import annotations

import gc
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from raytrainer.data import (
    ElasticBatchSampler,
    EvalBatches,
    InMemoryImages,
    build_loader,
    explain_loader_error,
    loader_process,
)
from raytrainer.data.checks import inspect_dataset
from raytrainer.errors import DataError, SampleError, WorkerLostError

# More loader workers than cores is what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def loader_settings(num_workers=0, **changes):
    defaults = {
        "prefetch_factor": None,
        "pin_memory": "auto",
        "persistent_workers": True,
        "multiprocessing_context": None,
        "timeout_s": 0,
    }
    return SimpleNamespace(num_workers=num_workers, **{**defaults, **changes})


def load_all(dataset, sampler, num_workers=0, settings=None, **arguments):
    return list(build_loader(dataset, sampler, settings or loader_settings(num_workers), **arguments))


class Noisy:
    """Per-sample: each sample draws from all three global generators."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return index, random.random(), np.random.standard_normal(), torch.rand(3)


def noisy_images():
    """Whole batches, moved by a random shift."""
    pixels = torch.arange(11 * 64, dtype=torch.int64).remainder(251).byte().reshape(11, 8, 8)
    return InMemoryImages(pixels, torch.arange(11), 0.5, 0.5, augment="shift")


class Faulty:
    """Samples 1 and 4 cannot be read."""

    samples = tuple((f"folder/{index}.jpg", 0) for index in range(6))

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index in (1, 4):
            raise ValueError(f"broken header in {index}")
        return torch.tensor(index)


class FaultyBatches(Faulty):
    def __getitems__(self, indices):
        return torch.stack([self[index] for index in indices])


def equal(first, second) -> bool:
    return all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize(
    "make_dataset",
    [Noisy, noisy_images, lambda: Subset(Noisy(), range(9)), lambda: Subset(noisy_images(), range(9))],
)
def test_batches_do_not_depend_on_the_number_of_loader_workers_or_ranks(make_dataset):
    dataset = make_dataset()
    sampler = ElasticBatchSampler(len(dataset), 4, 2, seed=5)
    alone = load_all(dataset, sampler, num_workers=0, seed=5)
    with_workers = load_all(dataset, sampler, num_workers=3, seed=5)
    two_ranks = [
        loaded
        for rank in range(2)
        for loaded in load_all(dataset, ElasticBatchSampler(len(dataset), 4, 2, rank, 2, seed=5), seed=5)
    ]
    two_ranks.sort(key=lambda loaded: (loaded.microbatch.step, loaded.microbatch.number))
    for other in (with_workers, two_ranks):
        assert [loaded.microbatch for loaded in other] == [loaded.microbatch for loaded in alone]
        assert all(equal(a.batch, b.batch) for a, b in zip(alone, other, strict=True))


def test_augmentation_of_a_sample_depends_on_seed_and_epoch_not_on_its_neighbours():
    def noise_of(sample, micro, seed=0, epoch=0):
        sampler = ElasticBatchSampler(11, 11, micro, seed=0, shuffle=False)
        sampler.set_epoch(epoch)
        for loaded in load_all(Noisy(), sampler, seed=seed):
            if sample in loaded.indices:
                return loaded.batch[3][loaded.indices.index(sample)]
        raise AssertionError("not loaded")

    assert torch.equal(noise_of(7, micro=2), noise_of(7, micro=11))
    assert not torch.equal(noise_of(7, 2), noise_of(7, 2, epoch=1))
    assert not torch.equal(noise_of(7, 2), noise_of(7, 2, seed=1))
    assert not torch.equal(noise_of(7, 2), noise_of(8, 2))


@pytest.mark.parametrize("make_dataset", [Noisy, noisy_images])
def test_loading_in_the_train_worker_leaves_its_generators_as_they_were(make_dataset):
    def draw():
        # An odd number of normals: NumPy keeps the second of a pair for later.
        return random.random(), np.random.randn(), np.random.randn(), torch.rand(2).tolist()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    np.random.randn()
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    np.random.randn()
    for num_workers in (0, 1):
        load_all(make_dataset(), EvalBatches(11, 4), num_workers)
    assert draw() == expected


def test_whole_batch_data_sets_are_asked_once_a_microbatch():
    calls = []

    class Counting(FaultyBatches):
        def __getitems__(self, indices):
            calls.append(indices)
            return torch.tensor(indices)

    load_all(Subset(Counting(), [5, 4, 3, 2]), EvalBatches(4, 3))
    assert calls == [[5, 4, 3], [2]]


def test_a_list_is_collated_and_anything_else_is_a_ready_batch():
    class Lists(Noisy):
        def __getitems__(self, indices):
            return [{"x": torch.tensor(index)} for index in indices]

    class Ready(Noisy):
        def __getitems__(self, indices):
            return {"x": torch.tensor(indices)}

    for dataset in (Lists(), Ready()):
        loaded = load_all(dataset, EvalBatches(11, 4))[-1]
        assert loaded.batch["x"].tolist() == [8, 9, 10]
        assert (loaded.num_samples, loaded.indices) == (3, [8, 9, 10])


def random_collate(samples):
    return torch.tensor([sample[0] for sample in samples]), torch.rand(2)


def test_a_collate_fn_runs_in_the_loader_with_the_microbatch_s_randomness():
    first = load_all(Noisy(), EvalBatches(11, 4), 0, collate_fn=random_collate)
    second = load_all(Noisy(), EvalBatches(11, 4), 2, collate_fn=random_collate)
    assert all(equal(a.batch, b.batch) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0].batch[1], first[1].batch[1])


def test_a_collate_fn_for_ready_batches_is_refused():
    with pytest.raises(DataError, match="collate_fn: InMemoryImages answers ready batches"):
        load_all(noisy_images(), EvalBatches(11, 4), collate_fn=random_collate)


def test_samples_of_different_shapes_are_named():
    class Ragged(Noisy):
        def __getitem__(self, index):
            return torch.zeros(index + 1)

    with pytest.raises(
        SampleError, match=r"samples 0, 1, 2 cannot be put into one batch(.|\n)*data\.collate_fn"
    ):
        load_all(Ragged(), EvalBatches(11, 3))


@pytest.mark.parametrize("dataset", [Faulty(), FaultyBatches()])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_sample_stops_with_its_name_and_no_traceback(dataset, num_workers):
    with pytest.raises(SampleError) as caught:
        load_all(dataset, EvalBatches(6, 3), num_workers)
    message = str(caught.value)
    assert message.startswith(
        "data: sample 1 (folder/1.jpg) cannot be loaded\n  ValueError: broken header in 1"
    )
    assert "test_loader.py" in message
    assert "on_bad_sample: skip" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("dataset", [Faulty(), FaultyBatches()])
def test_a_bad_sample_is_skipped_and_named(dataset):
    first, second = load_all(dataset, EvalBatches(6, 3), num_workers=1, on_bad_sample="skip")
    assert first.batch.tolist() == first.indices == [0, 2]
    assert first.num_samples == 2
    assert [(bad.index, bad.name) for bad in first.skipped] == [(1, "sample 1 (folder/1.jpg)")]
    assert second.batch.tolist() == [3, 5]


@pytest.mark.parametrize("dataset", [Faulty(), FaultyBatches()])
def test_a_wholly_bad_microbatch_is_an_empty_marker(dataset):
    bad = load_all(dataset, EvalBatches(6, 1), on_bad_sample="skip")[4]
    assert (bad.batch, bad.num_samples, bad.indices, len(bad.skipped)) == (None, 0, [], 1)


def test_a_path_is_named_through_subsets():
    with pytest.raises(SampleError, match=r"sample 0 \(folder/4.jpg\)"):
        load_all(Subset(Subset(Faulty(), [0, 4]), [1]), EvalBatches(1, 1))


def test_skip_hides_no_fault_in_the_code():
    class Misspelt(Noisy):
        def __getitem__(self, index):
            return imdex  # noqa: F821

    with pytest.raises(SampleError, match=r"NameError(.|\n)*fault in the code"):
        load_all(Misspelt(), EvalBatches(11, 3), on_bad_sample="skip")


def test_a_batch_that_fails_only_as_a_whole_is_no_bad_sample():
    class NoPairs(Noisy):
        def __getitems__(self, indices):
            if len(indices) > 1:
                raise RuntimeError("only one at a time")
            return torch.tensor(indices)

    with pytest.raises(SampleError, match="none of which fails alone\n  RuntimeError: only one"):
        load_all(NoPairs(), EvalBatches(11, 3), on_bad_sample="skip")


def test_persistent_workers_follow_the_epoch():
    sampler = ElasticBatchSampler(11, 4, 2)
    loader = build_loader(Noisy(), sampler, loader_settings(2))
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(loader))
    sampler.set_epoch(0)
    again = list(loader)
    assert [loaded.microbatch.epoch for loaded in epochs[1]] == [1] * 6
    assert all(equal(a.batch, b.batch) for a, b in zip(again, epochs[0], strict=True))
    assert not equal(epochs[0][0].batch, epochs[1][0].batch)


def test_a_loader_left_in_mid_epoch_starts_again_from_the_position():
    sampler = ElasticBatchSampler(11, 4, 2)
    loader = build_loader(Noisy(), sampler, loader_settings(1))
    next(iter(loader))
    sampler.set_position(0, 1)
    assert next(iter(loader)).microbatch.step == 1


@pytest.mark.parametrize("persistent", [True, False])
def test_closing_a_loader_ends_its_workers(persistent):
    loader = build_loader(Noisy(), EvalBatches(11, 1), loader_settings(2, persistent_workers=persistent))
    batches = iter(loader)
    next(batches)
    workers = loader._running()._workers
    loader.close()
    loader.close()
    assert not any(worker.is_alive() for worker in workers)
    assert len(list(loader)) == 11, "it can be used again"
    loader.close()


class Tattling:
    """A cycle of garbage, such as a process group of gloo leaves, that tells which process destroys it."""

    def __init__(self, path):
        self.itself = self
        self.path = path

    def __del__(self):
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Collecting(Noisy):
    def __getitem__(self, index):
        gc.collect()
        return os.getpid(), gc.isenabled()


@pytest.mark.parametrize("collects", [True, False])
def test_a_forked_loader_worker_leaves_its_parent_s_garbage_alone(tmp_path, collects):
    settings = loader_settings(1, multiprocessing_context="fork")
    loader = build_loader(Collecting(), EvalBatches(11, 1), settings, collate_fn=list)
    gc.collect()
    if not collects:
        gc.disable()
    try:
        Tattling(tmp_path / "destroyed by")
        [[(worker, worker_collects)], *_] = [loaded.batch for loaded in loader]
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    loader.close()
    gc.collect()
    assert worker != os.getpid()
    assert worker_collects is collects
    assert (tmp_path / "destroyed by").read_text() == f"{os.getpid()}\n"


forks_to_hang = 0


def _hang_where_told():
    if forks_to_hang:
        threading.Event().wait()


os.register_at_fork(after_in_child=_hang_where_told)


def test_a_loader_worker_stuck_in_its_fork_is_forked_again(monkeypatch):
    monkeypatch.setattr(loader_process, "_START_LIMITS_S", (0.5, 40))
    settings = loader_settings(1, multiprocessing_context="fork")
    loader = build_loader(Noisy(), EvalBatches(11, 1), settings)
    stuck = []

    def batches(iterate=loader._batches):
        monkeypatch.setattr(sys.modules[__name__], "forks_to_hang", 1 - len(stuck))
        started = iterate()
        if forks_to_hang:
            stuck.extend(started._workers)
        return started

    monkeypatch.setattr(loader, "_batches", batches)
    assert len(list(loader)) == 11
    loader.close()

    [first] = stuck
    stuck.clear()
    monkeypatch.setattr(loader_process, "_START_LIMITS_S", (0.5,))
    with pytest.raises(WorkerLostError, match="did not start in"):
        iter(loader)
    [second] = stuck
    assert not first.is_alive()
    assert not second.is_alive()


def test_settings_reach_the_data_loader():
    loader = build_loader(
        Noisy(),
        EvalBatches(11, 4),
        loader_settings(
            1, prefetch_factor=7, persistent_workers=False, multiprocessing_context="spawn", timeout_s=9
        ),
        device_type="cuda",
    )
    assert isinstance(loader, DataLoader)
    assert (loader.prefetch_factor, loader.persistent_workers, loader.timeout) == (7, False, 9)
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert loader.pin_memory is True
    assert build_loader(Noisy(), EvalBatches(11, 4), loader_settings()).pin_memory is False
    assert len(loader) == 3
    pickle.dumps(build_loader(noisy_images(), EvalBatches(11, 4), loader_settings()).dataset)


def test_pinning_pins_the_batch_and_keeps_the_rest(monkeypatch):
    loaded = load_all(noisy_images(), EvalBatches(11, 4))[0]
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor + 1)
    pinned = loaded.pin_memory()
    assert torch.equal(pinned.batch[1], loaded.batch[1] + 1)
    assert (pinned.microbatch, pinned.num_samples) == (loaded.microbatch, loaded.num_samples)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1])


class Endless:
    def __getitem__(self, index):
        return index


class NoLength(Endless):
    def __len__(self):
        raise TypeError("unknown length")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Stream(), "Stream can only be iterated\n.*asked for by index\n.*map-style"),
        (iter([1]), "can only be iterated"),
        (Endless(), "has no length"),
        (NoLength(), "unknown length"),
        ([], "list has 0 samples"),
    ],
)
def test_data_sets_that_cannot_be_trained_on_are_refused(dataset, message):
    with pytest.raises(DataError, match=f"data.eval: {message}" if message[0].isupper() else message):
        build_loader(dataset, EvalBatches(1, 1), loader_settings(), where="data.eval")
    assert inspect_dataset([1, 2]) == 2


class Dying(Noisy):
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None and index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Exiting(Noisy):
    def __getitem__(self, index):
        os._exit(3)


class Hanging(Noisy):
    def __getitem__(self, index):
        threading.Event().wait(1.5)
        return index


# The same handler may raise inside a __del__, where Python can only warn.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("dataset", "timeout_s", "message"),
    [(Dying(), 0, "num_workers"), (Exiting(), 0, "exited|killed"), (Hanging(), 0.2, "0.2 s .*timeout_s")],
)
def test_a_lost_loader_worker_is_explained(dataset, timeout_s, message):
    settings = loader_settings(1, timeout_s=timeout_s, persistent_workers=False)
    # torch's SIGCHLD handler may also raise between two calls of the loader: the trainer asks as well.
    with pytest.raises((WorkerLostError, RuntimeError)) as caught:
        load_all(dataset, EvalBatches(11, 1), settings=settings)
    error = caught.value
    with pytest.raises(WorkerLostError, match=f"(?s){message}"):
        raise error if isinstance(error, WorkerLostError) else explain_loader_error(error) or error


@pytest.mark.parametrize("broken", [ConnectionResetError("reset"), EOFError()])
def test_a_broken_connection_to_a_loader_worker_is_a_lost_worker(broken, monkeypatch):
    loader = build_loader(Noisy(), EvalBatches(11, 1), loader_settings(1))
    batches = iter(loader)
    worker = loader._running()._workers[0]

    def fail(iterator):
        worker.terminate()
        raise broken

    monkeypatch.setattr(type(loader._running()), "_next_data", fail)
    with pytest.raises(WorkerLostError, match="loader worker"):
        next(batches)
    assert not worker.is_alive()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "worker 7 .*Killed\n.*out of memory"),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible", "/dev/shm is full"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "worker 7, 8 exited"),
        ("DataLoader worker (pid 7) exited unexpectedly with exit code 1.", "worker 7 exited"),
    ],
)
def test_messages_of_torch_are_explained(text, message):
    explained = explain_loader_error(RuntimeError(text))
    assert isinstance(explained, WorkerLostError)
    with pytest.raises(WorkerLostError, match=message):
        raise explained
    assert explain_loader_error(RuntimeError("shapes cannot be multiplied")) is None


PARENT = """
import sys, threading
from types import SimpleNamespace
from raytrainer.data import EvalBatches, build_loader

class Blocking:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index > 1:
            threading.Event().wait()  # busy for ever: torch's own watchdog never gets its turn
        return "x" * 100_000

settings = SimpleNamespace(num_workers=2, prefetch_factor=4, pin_memory=False, persistent_workers=True,
                           multiprocessing_context=None, timeout_s=0)
loader = build_loader(Blocking(), EvalBatches(100, 1), settings)
batches = iter(loader)
next(batches), next(batches)
print(*[worker.pid for worker in loader._iterator._workers], flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux's pidfd")
def test_no_loader_worker_outlives_a_killed_parent():
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        workers = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(workers) == 2
    for worker in workers:
        poll = select.poll()
        poll.register(worker, select.POLLIN)
        is_gone = bool(poll.poll(20_000))
        if not is_gone:
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        os.close(worker)
        assert is_gone, "a loader worker is still there"
