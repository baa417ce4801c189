"""The loop on several ranks: real processes and gloo, started as `raytrainer run --local` starts them."""

import json
import os

import pytest
import torch

import raytrainer
from raytrainer.errors import RaytrainerError
from raytrainer.rundir import read_result
from tests.training import Blobs, config, killed_once

EVAL = {"_target_": "tests.training.Blobs", "size": 37}
ACCURACY = {"accuracy": {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 4}}


def run(tmp_path, num_workers, *overrides, name=None, objects=None, **sections):
    """A run without console on `num_workers` ranks, in a directory of its own."""
    wanted = [f"scaling.num_workers={num_workers}", f"name={name or f'w{num_workers}'}", *overrides]
    return raytrainer.run(config(tmp_path, *wanted, objects=objects, **sections), local=True)


def weights(result):
    return torch.load(f"{result.run_dir}/{result.checkpoint}/model.pt", weights_only=True)


def test_any_number_of_ranks_comes_to_the_same_model(tmp_path):
    """Steps of 16, 16, 16, 16 and 6 samples in microbatches of 4: on 3 ranks the last step leaves
    one idle."""
    data = {**config(tmp_path).model_dump()["data"], "eval": EVAL}
    ema = "training.ema.decay=0.5"  # its copy of BatchNorm's statistics must be rank 0's everywhere
    ends = {size: run(tmp_path, size, ema, data=data, metrics=ACCURACY) for size in (1, 2, 3)}
    assert {result.samples_seen for result in ends.values()} == {210}
    for size in (2, 3):
        assert ends[size].world_sizes == [size]
        for name, value in weights(ends[1]).items():
            torch.testing.assert_close(weights(ends[size])[name], value, rtol=1e-4, atol=1e-5)
        for name, value in ends[1].metrics.items():
            assert ends[size].metrics[name] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_ranks_without_samples_in_the_second_step_are_not_waited_for(tmp_path, num_workers):
    """DDP lays its buckets anew in its second forward pass, with a broadcast of its own."""
    data = {
        **config(tmp_path).model_dump()["data"],
        "train": {"_target_": "tests.training.Blobs", "size": 19},
    }
    alone = run(tmp_path, 1, data=data)
    result = run(tmp_path, num_workers, data=data)
    assert (result.status, result.steps, result.samples_seen) == ("finished", 6, 57)
    for name, value in weights(alone).items():
        torch.testing.assert_close(weights(result)[name], value, rtol=1e-4, atol=1e-5)


def test_a_rank_killed_in_mid_epoch_changes_nothing(tmp_path):
    """Three ranks, since with two the order of a sum could not matter; killed between two checkpoints."""
    common = ["checkpoint.every={steps: 5}", "data.loader.num_workers=1"]
    kill = killed_once(tmp_path, 9, 1)
    told = tmp_path / "told"
    told.touch()
    whole = run(tmp_path, 3, *common, name="whole", **kill)
    told.unlink()
    result = run(tmp_path, 3, *common, name="killed", **kill)
    assert told.exists()
    assert (result.status, result.restarts, result.world_sizes) == ("finished", 1, [3])
    assert result.lost_steps <= 1
    assert (result.weights_sha256, result.state_sha256) == (whole.weights_sha256, whole.state_sha256)
    events = [json.loads(line) for line in (tmp_path / "killed/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] != "checkpointed"] == [
        "started",
        "worker_failed",
        "resumed",
        "finished",
    ]
    assert read_result(result.run_dir).weights_sha256 == whole.weights_sha256


class FailsOnRank1(Blobs):
    """Raises for one sample that, in the first step of two ranks, is rank 1's."""

    def __getitem__(self, index):
        if int(os.environ["RANK"]) == 1:
            raise KeyError("no such column: price")
        return super().__getitem__(index)


def test_a_rank_that_raises_ends_the_run_with_its_own_error(tmp_path):
    with pytest.raises(RaytrainerError) as caught:
        run(tmp_path, 2, objects={"data.train": FailsOnRank1()})
    assert "rank 1" in str(caught.value)
    assert "no such column: price" in str(caught.value)
    result = read_result(str(tmp_path / "w2"))
    assert (result.status, result.restarts) == ("failed", 0)
    assert "no such column: price" in result.error


class HeadUnused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

    def forward(self, inputs):
        return self.used(inputs)


def test_parameters_without_a_gradient_are_explained(tmp_path):
    unused = {"model": {"_target_": "tests.test_ranks.HeadUnused"}}
    with pytest.raises(RaytrainerError, match=r"unused\.weight.*\n.*find_unused_parameters: true"):
        run(tmp_path, 2, **unused)
    found = run(tmp_path, 2, "training.find_unused_parameters=true", name="found", **unused)
    assert found.status == "finished"
