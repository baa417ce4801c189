"""The shipped configs: each is valid, and its targets build a model and batches that fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from raytrainer.config import instantiate, json_schema, load_config
from raytrainer.data import ElasticBatchSampler, build_loader, inspect_dataset

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_valid_and_named_after_its_file(path):
    config = load_config(path)
    assert config.name == path.stem
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n# ")


def test_the_schema_beside_the_configs_is_current():
    """`raytrainer schema > configs/schema.json` renews it."""
    assert json.loads((CONFIGS / "schema.json").read_text()) == json_schema()


def first_outputs(name, *overrides):
    """Builds a config's data, loader and model, and gives (batch, outputs) of the first two samples."""
    config = load_config(
        CONFIGS / name, overrides=["data.global_batch_size=2", "data.micro_batch_size=1", *overrides]
    )
    train, held_out = instantiate(config.data.train), instantiate(config.data.eval)
    assert inspect_dataset(held_out) > 0
    sampler = ElasticBatchSampler(inspect_dataset(train), 2, 2)
    batch = next(iter(build_loader(train, sampler, config.data.loader))).batch
    model = instantiate(config.model)
    return batch, model(batch[0])


def test_mnist_fits_together():
    batch, outputs = first_outputs("mnist.yaml")
    assert outputs.shape == (2, 10)
    assert batch[1].dtype == torch.int64


def test_char_lm_fits_together():
    _, outputs = first_outputs("char_lm.yaml")
    assert outputs.shape == (2, 128, 256)


def test_image_folder_fits_together(tmp_path, monkeypatch):
    for folder in ("train/cat", "train/dog", "eval/cat", "eval/dog"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (40, 30)).save(tmp_path / folder / "1.jpg")
    monkeypatch.setenv("IMAGE_ROOT", str(tmp_path))
    overrides = ["model.num_classes=2", "data.loader.num_workers=0", "data.loader.prefetch_factor=null"]
    batch, outputs = first_outputs("image_folder.yaml", *overrides)
    assert batch[0].shape == (2, 3, 224, 224)
    assert outputs.shape == (2, 2)


@pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="needs Debian's dataset-fashion-mnist"
)
def test_fashion_mnist_fits_together():
    batch, outputs = first_outputs("fashion_mnist.yaml")
    assert batch[0].shape == (2, 1, 28, 28)
    assert outputs.shape == (2, 10)
