"""The JSON Schema and the reference that are made of the schema."""

import jsonschema
import pytest
import yaml

from raytrainer.config import Config, json_schema, reference_markdown
from raytrainer.config.reference import all_keys, fields
from raytrainer.config.suggest import ALIASES, distance, nearest

FULL = """
name: x
seed: ${oc.env:SEED,3}
scaling: {num_workers: 2, gpus_per_worker: auto}
data: {train: {_target_: a.B, x: [1]}, global_batch_size: 8, collate_fn: a.b, loader: {num_workers: 1}}
model: {_target_: a.B, _partial_: true}
loss: {_target_: a.B}
metrics: {f1: {_target_: a.B}}
parameters: {groups: [{match: a, lr: 1.0e-3}]}
training: {precision: bf16-mixed, compile: {mode: max-autotune}, ema: {decay: 0.9}}
checkpoint: {every: {minutes: 2}, monitor: train/loss}
"""


def test_every_field_has_a_description():
    undescribed = [
        key for key, field in fields() if not (field.description or "").strip().endswith((".", "`."))
    ]
    assert undescribed == []


def test_the_json_schema_accepts_a_config_and_what_is_stored_of_it():
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    validator.validate(yaml.safe_load(FULL))
    validator.validate(yaml.safe_load(Config.from_mapping(yaml.safe_load(FULL)).stored_yaml()))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("epochs",), 3),
        (("scaling", "num_workers"), 0),
        (("scaling", "num_workers"), "two"),
        (("scaling", "gpus_per_worker"), "many"),
        (("training", "precision"), "bf16"),
        (("training", "precison"), "fp32"),
        (("model",), {"in_features": 3}),
        (("model",), {"_target_": "Net"}),
        (("data", "global_batch_size"), None),
        (("logging",), {"sinks": ["consol"]}),
        (("parameters", "groups"), [{"lr": 3}]),
    ],
)
def test_the_json_schema_refuses_what_loading_refuses(path, value):
    mapping = yaml.safe_load(FULL)
    place = mapping
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert not jsonschema.Draft202012Validator(json_schema()).is_valid(mapping)
    with pytest.raises(Exception, match=r"."):
        Config.from_mapping(mapping)


def test_the_reference_has_every_key_its_type_default_and_meaning():
    text = reference_markdown()
    for key in all_keys():
        assert f"| `{key.rpartition('.')[2]}` |" in text
    assert "| `global_batch_size` | whole number ≥ 1 | **required** | Samples of an optimizer step" in text
    assert '| `precision` | `fp32`, `bf16-mixed`, `fp16-mixed` | `"fp32"` |' in text
    assert '| `gpus_per_worker` | `auto` or number ≥ 0 | `"auto"` |' in text
    assert "### `training.early_stopping`" in text
    assert "| any |" not in text


def test_every_alias_leads_to_a_key_that_exists():
    open_keys = ("optimizer.",)
    wrong = {
        word: key for word, key in ALIASES.items() if key not in all_keys() and not key.startswith(open_keys)
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("a", "b", "edits"), [("", "abc", 3), ("lr", "lr", 0), ("nmu", "num", 1), ("kitten", "sitting", 3)]
)
def test_edit_distance(a, b, edits):
    assert distance(a, b) == distance(b, a) == edits


def test_nothing_near_is_none():
    assert nearest("qwerty", ["seed", "name"]) is None
    assert nearest("x", []) is None
