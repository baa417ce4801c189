"""Trains for a few steps in this process, without Ray: `pytest` tells in seconds whether all still fits."""

from pathlib import Path

import raytrainer

CONFIG = Path(__file__).parent / "config.yaml"


def test_a_few_steps_of_training_lower_the_loss(tmp_path):
    config = raytrainer.load_config(
        CONFIG, overrides=[f"storage_path={tmp_path}", "training.max_steps=60", "eval.every={steps: 20}"]
    )
    records = []
    result = raytrainer.Trainer(config, observer=records.append).train()
    losses = [record["eval/loss"] for record in records if "eval/loss" in record]
    assert result.status == "finished"
    assert losses[-1] < losses[0]
