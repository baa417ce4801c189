"""`eval`, `predict` and `export`: what a run directory gives once the training is over."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import raytrainer
from raytrainer import Config, Trainer
from raytrainer.__main__ import main
from raytrainer.data import FashionMnist, ImageFolder, InMemoryImages, MnistSubset, image_preparation
from raytrainer.errors import DataError, UsageError
from raytrainer.finished import open_run
from raytrainer.manifest import list_checkpoints
from raytrainer.predict import ImagePredictor
from raytrainer.rundir import read_result
from raytrainer.storage import open_storage
from tests.training import config as small_config
from tests.training import train

ACCURACY = {"accuracy": {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 10}}
DIGITS = {
    "name": "digits",
    "data": {
        "train": {"_target_": "raytrainer.data.MnistSubset", "split": "train"},
        "eval": {"_target_": "raytrainer.data.MnistSubset", "split": "eval"},
        "global_batch_size": 128,
        "micro_batch_size": 64,
    },
    "model": {"_target_": "raytrainer.models.SmallCnn", "num_classes": 10, "width": 8},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
    "metrics": ACCURACY,
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 5e-3},
    "training": {"max_steps": 48},
    "eval": {"every": {"steps": 16}},
    "checkpoint": {"every": {"steps": 24}, "num_to_keep": None, "monitor": "eval/loss", "mode": "min"},
    "logging": {"sinks": []},
}
BLOBS = {
    "train": {"_target_": "tests.training.Blobs", "noise": 0.0},
    "eval": {"_target_": "tests.training.Blobs", "noise": 0.0, "size": 33},
    "global_batch_size": 16,
    "micro_batch_size": 4,
}


class BranchingNet(nn.Module):
    """What it computes depends on the values: torch.export cannot follow."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, inputs):
        return self.layer(inputs) if inputs.sum() > 0 else -self.layer(inputs)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run directory of three evaluations and four checkpoints."""
    storage_path = tmp_path_factory.mktemp("runs")
    result = Trainer(Config.from_mapping({**DIGITS, "storage_path": str(storage_path)})).train()
    return result.run_dir


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def output(capsys, *arguments, code=0):
    """What a command prints on stdout; it must exit with `code`."""
    assert main([str(argument) for argument in arguments]) == code, capsys.readouterr().err
    return capsys.readouterr().out


def failure(capsys, *arguments, code):
    assert main([str(argument) for argument in arguments]) == code
    return capsys.readouterr().err


@pytest.mark.parametrize("checkpoint", ["best", "last", "step_00000016", "32"])
def test_a_checkpoint_evaluates_to_the_numbers_of_the_training(digits, capsys, checkpoint):
    found = json.loads(output(capsys, "eval", digits, "--checkpoint", checkpoint, "--json"))
    kept = {info.name: info.metrics for info in list_checkpoints(open_storage(digits))}[found["checkpoint"]]
    assert found["metrics"] == {name: kept[name] for name in ("eval/loss", "eval/accuracy")}
    assert checkpoint in ("best", "last") or found["step"] in (16, 32)


def test_best_is_the_monitored_best(digits, capsys):
    found = json.loads(output(capsys, "eval", digits, "--json"))
    assert found["checkpoint"] == read_result(digits).best["checkpoint"]


def test_eval_shows_both_numbers_and_takes_overrides_and_another_config(digits, capsys, tmp_path):
    assert "in training" in output(capsys, "eval", digits)
    on_train = output(capsys, "eval", digits, "data.eval.split=train")
    assert "in training" not in on_train
    other = tmp_path / "other.yaml"
    other.write_text(
        (open_storage(digits).read("config.yaml")).decode().replace("split: eval", "split: train")
    )
    assert output(capsys, "eval", digits, other) == on_train


def test_a_moving_average_is_what_is_evaluated(tmp_path, capsys):
    config = small_config(tmp_path, "training.ema={decay: 0.9}", data=BLOBS)
    result = train(config)
    found = json.loads(output(capsys, "eval", result.run_dir, "--json"))
    assert found["ema"]
    assert found["metrics"] == {"eval/loss": result.metrics["eval/loss"]}
    raw = open_run(result.run_dir, overrides=["training.ema=null"]).evaluate()
    assert raw != found["metrics"]


def test_a_config_without_evaluation_data(tmp_path, capsys):
    result = train(small_config(tmp_path, "training.max_steps=1"))
    error = failure(capsys, "eval", result.run_dir, code=2)
    assert "data.eval" in error
    assert "nothing to evaluate on" in error


def test_a_run_of_objects_is_opened_with_its_config(tmp_path, capsys):
    model = nn.Linear(8, 4)
    result = train(small_config(tmp_path, "training.max_steps=3", data=BLOBS, objects={"model": model}))
    error = failure(capsys, "eval", result.run_dir, code=2)
    assert "in Python" in error
    config = small_config(tmp_path, data=BLOBS, objects={"model": nn.Linear(8, 4)})
    opened = open_run(result.run_dir, config=config)
    assert torch.equal(opened.model.weight, model.weight)
    assert opened.evaluate()["eval/loss"] == result.metrics["eval/loss"]


def test_a_run_is_opened_from_any_folder(tmp_path, capsys, monkeypatch):
    """The folders that the training imported from are remembered."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "net_of_the_project.py").write_text(
        "from torch import nn\ndef Net():\n    return nn.Linear(8, 4)\n"
    )
    config = small_config(tmp_path, "training.max_steps=1", data=BLOBS)
    (project / "a.yaml").write_text(
        config.stored_yaml().replace("tests.training.Net", "net_of_the_project.Net")
    )
    result = train(raytrainer.load_config(project / "a.yaml"))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(project)])
    monkeypatch.delitem(sys.modules, "net_of_the_project")
    monkeypatch.chdir(elsewhere)
    assert "eval/loss" in output(capsys, "eval", result.run_dir)


# Errors -----------------------------------------------------------------------------------------------------


def test_what_is_no_run_directory(digits, capsys, tmp_path):
    missing = failure(capsys, "eval", f"{digits}x", code=2)
    assert "no such run directory" in missing
    assert "has: digits" in missing
    assert "not a run directory" in failure(capsys, "predict", tmp_path, "a.png", code=2)


def test_a_checkpoint_that_is_not_there(digits, capsys):
    error = failure(capsys, "eval", digits, "--checkpoint", "step_9", code=2)
    assert "step_00000016, step_00000024, step_00000032, step_00000048" in error


def test_a_run_without_a_checkpoint(tmp_path, capsys, digits):
    (tmp_path / "young").mkdir()
    shutil.copy(f"{digits}/config.yaml", tmp_path / "young")
    assert "no checkpoint yet" in failure(capsys, "export", tmp_path / "young", tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_names_the_others(tmp_path, capsys, digits):
    copy = shutil.copytree(digits, tmp_path / "copy")
    model = copy / "checkpoints" / "step_00000048" / "model.pt"
    model.write_bytes(model.read_bytes()[:-1])
    error = failure(capsys, "eval", copy, "--checkpoint", "last", code=1)
    assert "damaged" in error
    assert "step_00000032" in error


def test_another_model_than_the_checkpoints(digits, capsys):
    error = failure(capsys, "eval", digits, "model.width=4", code=2)
    assert "does not fit the config's model: features.0.weight is (8, 1, 3, 3), the model's is (4," in error


def test_two_config_files(digits, capsys):
    assert "b.yaml: one config file at most" in failure(capsys, "eval", digits, "a.yaml", "b.yaml", code=2)


# predict ----------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path):
    """Every 25th evaluation digit as a PNG, named by its label."""
    data = MnistSubset("eval")
    files = []
    for index in range(0, 1000, 25):
        files.append(tmp_path / f"{index}_is_{data.targets[index]}.png")
        Image.fromarray(data.images[index].numpy()).save(files[-1])
    return files


def test_digits_in_files_are_predicted_as_in_evaluation(digits, images, capsys):
    answers = json.loads(output(capsys, "predict", digits, *images, "--json", "--top-k", "2"))
    assert [answer["file"] for answer in answers] == [str(file) for file in images]
    right = [answer["predictions"][0]["class"] == answer["file"][-5] for answer in answers]
    assert sum(right) >= 0.85 * len(right)
    # To the number what the model says of the data set's own samples.
    run = open_run(digits)
    with torch.inference_mode():
        expected = run.model(MnistSubset("eval").__getitems__(range(0, 1000, 25))[0]).softmax(1).topk(2)
    found = [[entry["probability"] for entry in answer["predictions"]] for answer in answers]
    assert torch.allclose(torch.tensor(found), expected.values, atol=1e-6)


def test_files_that_cannot_be_read_are_named_and_the_others_predicted(digits, images, capsys, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(images[0].read_bytes()[:100])
    files = [
        tmp_path / "none.png",
        images[0],
        tmp_path / "text.png",
        tmp_path / "cut.png",
        tmp_path,
        images[1],
    ]
    assert main(["predict", digits, *map(str, files)]) == 1
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == [str(images[0]), str(images[1])]
    errors = err.splitlines()
    assert [line.split(": ")[1] for line in errors] == [str(files[index]) for index in (0, 2, 3, 4)]
    assert "No such file" in errors[0]
    answers = json.loads(output(capsys, "predict", digits, *files, "--json", code=1))
    assert [("error" in answer) for answer in answers] == [True, False, True, True, True, False]


def test_colour_size_and_depth_of_a_file_do_not_matter():
    data = MnistSubset("eval")
    image = Image.fromarray(data.images[7].numpy())
    plain = data.prepare_image(image)
    assert torch.equal(plain, data[7][0])
    deep = Image.fromarray(np.asarray(image).astype(np.uint16) * 256)
    assert deep.mode.startswith("I;16")
    for other in (image.convert("RGB"), image.convert("RGBA"), deep):
        assert torch.equal(data.prepare_image(other), plain)
    assert data.prepare_image(image.resize((100, 60))).shape == (1, 28, 28)


def test_augmentation_and_subsets_do_not_reach_predictions():
    data = MnistSubset("train", augment="shift")
    prepare = image_preparation(torch.utils.data.Subset(data, [3]))
    assert torch.equal(prepare(Image.fromarray(data.images[3].numpy())), MnistSubset("train")[3][0])


def test_an_image_folder_prepares_files_as_its_own(tmp_path):
    from torchvision.transforms import v2

    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.effect_noise((50, 40), 90).save(tmp_path / name / "1.png")
    data = ImageFolder(str(tmp_path), [v2.Resize(32), v2.CenterCrop(32)], normalize="imagenet")
    assert torch.equal(data.prepare_image(Image.open(tmp_path / "dog" / "1.png")), data[1][0])
    assert data.preprocessing()["mean"] == [0.485, 0.456, 0.406]
    assert "CenterCrop" in data.preprocessing()["transforms"][1]


def test_a_data_set_that_does_not_prepare_images_says_what_to_add(tmp_path, capsys):
    result = train(small_config(tmp_path, "training.max_steps=1", data=BLOBS))
    error = failure(capsys, "predict", result.run_dir, "a.png", code=2)
    assert "data.eval: Blobs does not say" in error
    assert "def prepare_image(self, image)" in error


def test_faults_of_prepare_image_and_of_the_model_are_told(digits, images):
    predictor = ImagePredictor(open_run(digits))
    predictor._prepare = lambda image: torch.zeros(3, 28, 28)
    with pytest.raises(DataError, match=r"the model raised RuntimeError on 1 images \[3, 28, 28\]"):
        list(predictor([str(images[0])]))
    predictor._prepare = lambda image: 1 / 0
    with pytest.raises(DataError, match="raised ZeroDivisionError"):
        list(predictor([str(images[0])]))


def test_names_of_classes():
    assert MnistSubset.classes[3] == "3"
    assert FashionMnist.classes[9] == "ankle boot"
    assert not hasattr(InMemoryImages, "classes")


# export -----------------------------------------------------------------------------------------------------

LOAD = """
import sys
sys.modules["raytrainer"] = None  # importing it raises
import torch
inputs, outputs = torch.load(sys.argv[2])
program = torch.export.load(sys.argv[1]).module()
for size in (1, 5):
    assert torch.allclose(program(inputs[:size]), outputs[:size], atol=1e-5), size
"""


@pytest.fixture(scope="module")
def exported(digits, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "out"
    assert main(["export", digits, str(out)]) == 0
    return out


def test_the_program_needs_no_raytrainer_and_takes_any_batch_size(digits, exported, tmp_path):
    inputs = MnistSubset("eval").__getitems__(range(5))[0]
    with torch.no_grad():
        torch.save((inputs, open_run(digits).model(inputs)), tmp_path / "expected.pt")
    command = [sys.executable, "-c", LOAD, exported / "model.pt2", tmp_path / "expected.pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_weights_are_the_checkpoints_and_can_be_started_from(digits, exported, tmp_path):
    weights, model = load_file(exported / "model.safetensors"), open_run(digits).model
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    start = {**DIGITS, "storage_path": str(tmp_path), "init_from": str(exported / "model.safetensors")}
    config = Config.from_mapping(start, ["training.max_steps=1", "optimizer.lr=0.0", "eval.every={steps: 1}"])
    assert Trainer(config).train().metrics["eval/loss"] < 1.5


def test_the_metadata_says_what_goes_in_and_comes_out(digits, exported):
    metadata = json.loads((exported / "model.json").read_text())
    assert metadata["files"] == ["model.safetensors", "model.pt2"]
    assert metadata["input"] == {"shape": [None, 1, 28, 28], "dtype": "float32"}
    assert metadata["classes"] == list("0123456789")
    assert metadata["preprocessing"]["mean"] == [0.1307]
    assert metadata["model"]["width"] == 8
    assert metadata["origin"]["checkpoint"] == open_run(digits).checkpoint.name


def test_nothing_is_overwritten(digits, exported, capsys):
    before = (exported / "model.safetensors").stat().st_mtime_ns
    assert "is there already" in failure(capsys, "export", digits, exported, code=2)
    assert (exported / "model.safetensors").stat().st_mtime_ns == before


def test_one_format_alone_and_an_unknown_one(digits, capsys, tmp_path):
    output(capsys, "export", digits, tmp_path / "a", "--format", "safetensors")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["model.json", "model.safetensors"]
    error = failure(capsys, "export", digits, tmp_path / "b", "--format", "onnx", code=2)
    assert "safetensors, torch-export, both" in error


def test_a_model_that_torch_export_cannot_follow_still_gives_its_weights(tmp_path, capsys):
    target = {"_target_": f"{__name__}.BranchingNet"}
    result = train(small_config(tmp_path, "training.max_steps=1", data=BLOBS, model=target))
    assert main(["export", result.run_dir, str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: torch.export cannot export the model: ")
    assert "model.safetensors was written" in error
    assert len(error.splitlines()) == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.json", "model.safetensors"]
    only = failure(capsys, "export", result.run_dir, tmp_path / "no", "--format", "torch-export", code=1)
    assert "nothing was written" in only
    assert not (tmp_path / "no").exists()


def test_a_run_on_an_object_store(tmp_path):
    config = small_config(tmp_path, "training.max_steps=2", "storage_path=memory://after", data=BLOBS)
    result = train(config)
    opened = open_run("memory://after/run", checkpoint="last")
    assert opened.evaluate()["eval/loss"] == result.metrics["eval/loss"]
    with pytest.raises(UsageError, match="not a run directory"):
        open_run("memory://after/none")
