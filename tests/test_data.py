"""The data sets: what they answer, and what they say when their files are missing or damaged."""

from __future__ import annotations

import gzip
import multiprocessing
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from raytrainer.data import (
    EvalBatches,
    FashionMnist,
    IdxImages,
    ImageFolder,
    InMemoryImages,
    MnistSubset,
    TextFile,
    TorchvisionMnist,
    build_loader,
    label_range_error,
)
from raytrainer.data.augment import random_shift
from raytrainer.data.from_torchvision import _one_at_a_time
from raytrainer.errors import DataError, SampleError
from raytrainer.models import CharTransformer, SmallCnn
from raytrainer.tasks import LanguageModelling

LOADER = SimpleNamespace(
    num_workers=0,
    prefetch_factor=None,
    pin_memory="auto",
    persistent_workers=True,
    multiprocessing_context=None,
    timeout_s=0,
)


def test_the_packaged_digits_are_split_by_class_and_share_no_image():
    train, held_out = MnistSubset("train"), MnistSubset("eval")
    assert torch.bincount(train.targets).tolist() == [400] * 10
    assert torch.bincount(held_out.targets).tolist() == [100] * 10
    images = {image.numpy().tobytes() for image in [*train.images, *held_out.images]}
    assert len(images) == 5000
    batch, labels = train.__getitems__(range(4000))
    assert (batch.dtype, batch.shape, labels.dtype) == (torch.float32, (4000, 1, 28, 28), torch.int64)
    assert batch.mean().item() == pytest.approx(0, abs=0.02)
    assert batch.std().item() == pytest.approx(1, abs=0.02)


def test_the_packaged_digits_are_the_digits_that_their_labels_say():
    """A nearest-mean classifier gets 80% of real digits; of shuffled labels it would get 10%."""
    train, held_out = MnistSubset("train"), MnistSubset("eval")
    images, labels = train.__getitems__(range(4000))
    means = torch.stack([images[labels == digit].mean(0).flatten() for digit in range(10)])
    images, labels = held_out.__getitems__(range(1000))
    nearest = torch.cdist(images.flatten(1), means).argmin(1)
    assert (nearest == labels).float().mean() > 0.75


def test_one_sample_is_the_same_as_in_a_batch():
    dataset = MnistSubset("eval")
    image, label = dataset[7]
    batch, labels = dataset.__getitems__([3, 7])
    assert torch.equal(image, batch[1])
    assert label == labels[1]


@pytest.mark.parametrize("make", [MnistSubset, FashionMnist, TorchvisionMnist, TextFile])
def test_an_unknown_split_is_refused(make):
    with pytest.raises(DataError, match='split = "test"\n  it is "train" or "eval"'):
        make(split="test")


def test_an_unknown_augmentation_is_refused():
    with pytest.raises(DataError, match='augment = "flip"'):
        MnistSubset(augment="flip")


def test_a_random_shift_moves_images_whole_and_by_every_allowed_step():
    images = torch.zeros(500, 7, 7, dtype=torch.uint8)
    images[:, 3, 3] = 9
    torch.manual_seed(0)
    moved = random_shift(images, 2)
    places = {tuple(place) for place in moved.nonzero()[:, 1:].tolist()}
    assert len(moved.nonzero()) == 500
    assert places == {(row, column) for row in range(1, 6) for column in range(1, 6)}


def test_the_loader_is_told_which_generators_a_data_set_draws_from():
    images, labels = torch.zeros(2, 8, 8, dtype=torch.uint8), torch.zeros(2)
    assert InMemoryImages(images, labels, 0.5, 0.5).draws_from == ()
    assert InMemoryImages(images, labels, 0.5, 0.5, augment="shift").draws_from == ("torch",)
    assert "numpy" in InMemoryImages(images, labels, 0.5, 0.5, augment=lambda pixels: pixels).draws_from


def write_idx(path, values: np.ndarray, compress=False, magic=None):
    header = bytes((0, 0, 8, values.ndim)) if magic is None else magic
    content = header + struct.pack(f">{values.ndim}I", *values.shape) + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if compress else content)


@pytest.fixture
def idx_folder(tmp_path):
    rng = np.random.default_rng(0)
    for prefix, num_images in (("train", 6), ("t10k", 4)):
        pixels = rng.integers(0, 256, (num_images, 5, 3))
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", pixels, compress=True)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte", np.arange(num_images))
    return tmp_path


def test_idx_files_are_read_compressed_and_plain(idx_folder):
    dataset = IdxImages(str(idx_folder), "eval", normalize=(0.5, 0.25))
    images, labels = dataset.__getitems__([2, 0])
    assert images.shape == (2, 1, 5, 3)
    assert labels.tolist() == [2, 0]
    assert torch.allclose(images[0, 0] * 0.25 + 0.5, dataset.images[2] / 255, atol=1e-6)
    assert dataset.images.dtype == torch.uint8
    assert len(IdxImages(str(idx_folder), "train")) == 6


def test_missing_idx_files_name_the_package(tmp_path):
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte is not there(.|\n)*dataset-fashion-mnist"):
        FashionMnist(str(tmp_path))


def damage(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train-labels-idx1-ubyte", lambda content: content[:-2], "4 bytes after the header"),
        ("train-labels-idx1-ubyte", lambda content: content + b"x", "more after the header"),
        ("train-labels-idx1-ubyte", lambda content: b"\0\0\x0d" + content[3:], "starts with 00 00 0d 01"),
        ("train-labels-idx1-ubyte", lambda content: b"", "starts with nothing"),
        ("train-labels-idx1-ubyte", lambda content: content[:6], "starts with 00 00 08 01"),
        ("train-images-idx3-ubyte.gz", lambda content: content[:-20], "damaged or cut off"),
        ("train-images-idx3-ubyte.gz", lambda content: b"no gzip at all", "damaged or cut off"),
        ("train-images-idx3-ubyte.gz", lambda content: content[:40] + b"\xff" * 9 + content[49:], "damaged"),
    ],
)
def test_damaged_idx_files_are_named(idx_folder, name, change, message):
    damage(idx_folder / name, change)
    with pytest.raises(DataError, match=message) as caught:
        IdxImages(str(idx_folder))
    assert name in str(caught.value)


def test_idx_files_that_do_not_belong_together_are_refused(idx_folder):
    write_idx(idx_folder / "train-labels-idx1-ubyte", np.arange(5))
    with pytest.raises(DataError, match=r"5 labels\n(.|\n)*6 images"):
        IdxImages(str(idx_folder))


def test_a_failed_download_names_the_config_that_needs_no_network(tmp_path, monkeypatch):
    import torchvision

    def fail(*args, **kwargs):
        raise RuntimeError("Error downloading x.gz:\nTried https://a, got:\nno route to host")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", fail)
    with pytest.raises(DataError, match=r"no route to host(.|\n)*configs/mnist.yaml"):
        TorchvisionMnist(str(tmp_path / "new"))
    with pytest.raises(DataError, match=r"configs/mnist.yaml"):
        TorchvisionMnist(str(tmp_path), download=False)


def test_the_whole_of_mnist_answers_batches(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix in ("train", "t10k"):
        write_idx(raw / f"{prefix}-images-idx3-ubyte", np.full((4, 28, 28), 255))
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", np.arange(4))
    images, labels = TorchvisionMnist(str(tmp_path), "eval").__getitems__([1, 3])
    assert images.shape == (2, 1, 28, 28)
    assert images.max().item() == pytest.approx((1 - 0.1307) / 0.3081, rel=1e-5)
    assert labels.tolist() == [1, 3]


def _hold(folder, connection):
    with _one_at_a_time(folder):
        connection.send("held")
        connection.recv()


def test_only_one_process_downloads_at_a_time(tmp_path):
    context = multiprocessing.get_context("fork")
    (first, first_there), (second, second_there) = context.Pipe(), context.Pipe()
    holder = context.Process(target=_hold, args=(tmp_path, first_there))
    holder.start()
    assert first.poll(30)
    waiter = context.Process(target=_hold, args=(tmp_path, second_there))
    waiter.start()
    assert not second.poll(0.3)
    holder.kill()
    holder.join()
    assert second.poll(30), "the lock of a killed process is free"
    second.send("end")
    waiter.join()


@pytest.fixture
def image_root(tmp_path):
    for class_name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (tmp_path / class_name).mkdir()
        for number in range(3):
            Image.new("RGB", (8, 6), colour).save(tmp_path / class_name / f"{number}.png")
    return tmp_path


def test_image_folders_give_float_images_and_classes_by_name(image_root):
    dataset = ImageFolder(str(image_root))
    image, label = dataset[5]
    assert type(image) is torch.Tensor
    assert image.dtype == torch.float32
    assert image.shape == (3, 6, 8)
    assert image[:, 0, 0].tolist() == [1, 0, 0]
    assert (label, dataset.classes, dataset.targets) == (1, ["blue", "red"], [0, 0, 0, 1, 1, 1])


def test_image_folders_apply_transforms_and_normalise(image_root):
    from torchvision.transforms import v2

    dataset = ImageFolder(str(image_root), [v2.Resize(4), v2.CenterCrop(4)], normalize="imagenet")
    batch = next(iter(build_loader(dataset, EvalBatches(6, 6), LOADER))).batch
    assert batch[0].shape == (6, 3, 4, 4)
    assert batch[0][5, 0, 0, 0].item() == pytest.approx((1 - 0.485) / 0.229, rel=1e-4)
    assert ImageFolder(str(image_root), v2.Grayscale(1))[0][0].shape == (1, 6, 8)


def test_an_image_that_cannot_be_decoded_is_named(image_root):
    (image_root / "red" / "1.png").write_bytes(b"not an image")
    dataset = ImageFolder(str(image_root))
    with pytest.raises(SampleError, match=r"sample 4 \(.*red/1.png\)"):
        list(build_loader(dataset, EvalBatches(6, 3), LOADER))
    loaded = list(build_loader(dataset, EvalBatches(6, 3), LOADER, on_bad_sample="skip"))
    assert sum(microbatch.num_samples for microbatch in loaded) == 5


@pytest.mark.parametrize(
    "prepare", [lambda root: None, lambda root: root.mkdir(), lambda root: (root / "a").mkdir(parents=True)]
)
def test_folders_without_images_are_refused(tmp_path, prepare):
    root = tmp_path / "images"
    prepare(root)
    with pytest.raises(DataError, match=f"root = {root}\n(.|\n)*one folder a class"):
        ImageFolder(str(root))


def test_text_gives_the_next_character_as_target(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdé" * 20, encoding="utf-8")
    train = TextFile(str(path), block_size=4, eval_fraction=0.2)
    held_out = TextFile(str(path), block_size=4, eval_fraction=0.2, split="eval")
    assert train.vocabulary == held_out.vocabulary == "abcdé"
    assert (len(train), len(held_out), train.vocab_size) == (19, 4, 5)
    inputs, targets = train.__getitems__([0, 1])
    assert inputs.dtype == targets.dtype == torch.int64
    assert [train.decode(piece) for piece in inputs] == ["abcd", "éabc"]
    assert [train.decode(piece) for piece in targets] == ["bcdé", "abcd"]
    assert len(TextFile(str(path), block_size=4, eval_fraction=0.2, stride=1)) == 76
    assert train.decode(train.encode("éa")) == "éa"
    with pytest.raises(DataError, match="'z' is not in the vocabulary"):
        train.encode("az")


def test_text_that_cannot_be_used_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcd" * 5)
    with pytest.raises(DataError, match="4 different characters\n  write vocab_size: 4"):
        TextFile(str(path), block_size=2, vocab_size=3)
    with pytest.raises(DataError, match="eval split has 2 characters; a sample takes 5"):
        TextFile(str(path), block_size=4, split="eval")
    with pytest.raises(DataError, match="eval_fraction = 1"):
        TextFile(str(path), eval_fraction=1)
    with pytest.raises(DataError, match="No such file"):
        TextFile(str(tmp_path / "missing.txt"))
    path.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(DataError, match="not UTF-8"):
        TextFile(str(path))
    path.write_text("")
    with pytest.raises(DataError, match="0 characters"):
        TextFile(str(path))


def test_the_text_that_comes_with_python_is_long_enough_and_fits_the_vocabulary_of_the_config():
    dataset = TextFile(vocab_size=256)
    assert len(dataset) > 1000


@pytest.mark.parametrize(
    ("labels", "indices", "message"),
    [
        ([0, 9, 10], [5, 6, 7], "sample 7 has the label 10\n(.|\n)*0 to 9\n(.|\n)*at least 11 outputs"),
        ([0, -1], None, "sample 1 has the label -1(.|\n)*start at 0"),
        ([[0, 1], [2, 77]], [3, 4], "sample 4 has the label 77"),
    ],
)
def test_labels_outside_the_classes_are_named(labels, indices, message):
    error = label_range_error(torch.tensor(labels), 10, indices)
    with pytest.raises(SampleError, match=message):
        raise error


def test_labels_inside_the_classes_and_ignored_ones_pass():
    assert label_range_error(torch.tensor([0, 9, -100]), 10) is None
    assert label_range_error(MnistSubset("eval").targets, 10) is None


def test_models_give_logits_of_the_shapes_they_say():
    assert SmallCnn(num_classes=7)(torch.zeros(2, 1, 28, 28)).shape == (2, 7)
    assert SmallCnn(in_channels=3)(torch.zeros(2, 3, 32, 20)).shape == (2, 10)
    model = CharTransformer(vocab_size=30, block_size=16, num_layers=1, width=32)
    assert model(torch.zeros(2, 9, dtype=torch.int64)).shape == (2, 9, 30)


def test_the_transformer_does_not_look_ahead():
    torch.manual_seed(0)
    model = CharTransformer(vocab_size=30, block_size=16, num_layers=2, width=32).eval()
    tokens = torch.randint(30, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 30
    assert torch.allclose(model(tokens)[0, :10], model(changed)[0, :10], atol=1e-6)
    assert not torch.allclose(model(tokens)[0, 10], model(changed)[0, 10], atol=1e-3)


def test_language_modelling_weighs_tokens_and_leaves_padding_out():
    task = LanguageModelling()
    task.model = torch.nn.Embedding(4, 4)
    inputs = torch.tensor([[0, 1, 2], [3, 0, 1]])
    targets = torch.tensor([[1, 2, -100], [-100, -100, 2]])
    output = task.training_step((inputs, targets))
    expected = torch.nn.functional.cross_entropy(task.model(inputs[targets >= 0]), targets[targets >= 0])
    assert torch.allclose(output.loss, expected)
    assert output.weight == 3
    padding = task.training_step((inputs, torch.full_like(targets, -100)))
    assert (padding.loss.item(), padding.weight.item()) == (0, 0)
    evaluation = task.evaluation_step((inputs, targets))
    assert (evaluation.predictions.shape, evaluation.targets.shape) == ((6, 4), (6,))
