"""What a config keeps of its file: values from the environment, objects from Python, the config written."""

import copy
import functools
import pickle
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrainer.config import Config, difference, load_config
from raytrainer.errors import ConfigError


def mapping(**more) -> dict:
    base = {
        "name": "x",
        "data": {"train": {"_target_": "my.Train"}, "global_batch_size": 8},
        "model": {"_target_": "my.Net"},
        "loss": {"_target_": "my.Loss"},
    }
    return base | more


SECRET = "hunter2-secret"


@pytest.fixture
def secret_config(monkeypatch):
    monkeypatch.setenv("RT_TOKEN", SECRET)
    monkeypatch.setenv("RT_WORKERS", "4")
    return Config.from_mapping(
        mapping(
            scaling={"num_workers": "${oc.env:RT_WORKERS}"},
            task={
                "_target_": "my.Task",
                "token": "${oc.env:RT_TOKEN}",
                "deep": [{"t": "Bearer ${oc.env:RT_TOKEN}"}],
            },
            ray={
                "address": "ray://${oc.env:RT_TOKEN}@head",
                "runtime_env": {"env_vars": {"T": "${task.token}"}},
            },
            training={"max_epochs": "${oc.decode:${oc.env:RT_EPOCHS,7}}", "max_steps": "${seed}"},
            seed=5,
        )
    )


def test_the_environment_is_read_and_numbers_are_numbers(secret_config):
    assert secret_config.scaling.num_workers == 4
    assert secret_config.training.max_epochs == 7
    assert secret_config.training.max_steps == 5
    assert secret_config.task["token"] == SECRET
    assert secret_config.task["deep"] == [{"t": f"Bearer {SECRET}"}]
    assert secret_config.ray.address == f"ray://{SECRET}@head"
    assert secret_config.ray.runtime_env["env_vars"]["T"] == SECRET
    assert secret_config.env_names() == {"RT_WORKERS", "RT_TOKEN", "RT_EPOCHS"}


@pytest.mark.parametrize(
    "show",
    [
        repr,
        str,
        Config.stored_yaml,
        lambda c: repr(c.ray),
        lambda c: repr(c.task),
        lambda c: str(c.payload()),
        lambda c: str(c.meaning()),
        lambda c: str(pickle.dumps(c)),
        lambda c: f"{c.ray}",
        lambda c: c.model_copy(update={"seed": 9}).stored_yaml(),
        lambda c: c.with_overrides("seed=9").stored_yaml(),
    ],
)
def test_a_secret_is_never_shown(secret_config, show):
    shown = show(secret_config)
    assert SECRET not in shown


def test_the_stored_config_keeps_the_names_and_loads_back_equal(secret_config, tmp_path):
    stored = yaml.safe_load(secret_config.stored_yaml())
    assert stored["task"]["token"] == "${oc.env:RT_TOKEN}"
    assert stored["scaling"]["num_workers"] == "${oc.env:RT_WORKERS}"
    assert stored["ray"]["runtime_env"]["env_vars"]["T"] == "${task.token}"
    assert stored["training"]["max_steps"] == 5  # no part of it came from the environment
    (tmp_path / "config.yaml").write_text(secret_config.stored_yaml())
    assert load_config(tmp_path / "config.yaml") == secret_config


def test_a_payload_reads_the_environment_where_it_is_rebuilt(secret_config, monkeypatch):
    payload = pickle.loads(pickle.dumps(secret_config.payload()))
    monkeypatch.setenv("RT_TOKEN", "other")
    rebuilt = Config.from_payload(payload)
    assert rebuilt.task["token"] == "other"
    assert rebuilt != secret_config
    monkeypatch.delenv("RT_TOKEN")
    with pytest.raises(ConfigError, match="environment variable RT_TOKEN is not set"):
        Config.from_payload(payload)


def test_unset_variables_are_all_named_with_their_places(tmp_path, monkeypatch):
    monkeypatch.delenv("RT_A", raising=False)
    path = tmp_path / "a.yaml"
    path.write_text("name: x\nseed: ${oc.env:RT_A}\nstorage_path: /r/${oc.env:RT_B}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    told = str(caught.value)
    assert f"{path}:2: seed = ${{oc.env:RT_A}}\n  the environment variable RT_A is not set" in told
    assert f"{path}:3: storage_path" in told
    assert "export RT_B=..." in told
    assert "${oc.env:RT_B,default}" in told
    assert "whole number" not in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("${nope}", "interpolation key 'nope' not found"),
        ("${foo:1}", "unsupported interpolation type foo"),
        ("${name", "not a valid ${...} expression"),
        ("${storage_path}", "refers to itself"),
    ],
)
def test_other_mistakes_of_interpolation(text, words):
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(mapping(storage_path=text))
    assert words in str(caught.value).lower()
    assert "config: storage_path" in str(caught.value)


def test_interpolation_of_other_keys_and_escapes():
    config = Config.from_mapping(
        mapping(storage_path="runs/${name}/\\${x}", metrics="${extra}") | {"metrics": {}}
    )
    assert config.storage_path == "runs/x/${x}"
    assert Config.from_mapping(yaml.safe_load(config.stored_yaml())) == config


def test_a_whole_section_can_be_referred_to(monkeypatch):
    monkeypatch.setenv("RT_ROOT", "/d")
    data = {
        "train": {"_target_": "my.D", "root": "${oc.env:RT_ROOT}"},
        "eval": "${data.train}",
        "global_batch_size": 1,
    }
    config = Config.from_mapping(mapping(data=data))
    assert config.data.eval == {"_target_": "my.D", "root": "/d"}
    assert "/d" not in config.stored_yaml()
    assert Config.from_mapping(yaml.safe_load(config.stored_yaml())) == config


def test_an_environment_value_that_is_not_right_is_not_shown(monkeypatch):
    monkeypatch.setenv("RT_N", "several")
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(mapping(scaling={"num_workers": "${oc.env:RT_N}"}))
    assert "scaling.num_workers = ${oc.env:RT_N}" in str(caught.value)
    assert "several" not in str(caught.value)


class Net:
    pass


def double(x):
    return 2 * x


def test_objects_from_python_stand_in_for_targets():
    net, pairs = Net(), functools.partial(double, 3)
    config = Config.from_mapping(
        mapping(task={"_target_": "my.Task", "helper": [net]}),
        objects={"model": net, "metrics.accuracy": Net, "data.collate_fn": double, "data.order": pairs},
    )
    assert config.model is net
    assert config.metrics == {"accuracy": Net}
    assert config.data.collate_fn is double
    assert config.task["helper"][0] is net
    stored = yaml.safe_load(config.stored_yaml())
    assert stored["model"] == "<object Net>"
    assert stored["data"]["collate_fn"] == "<object double>"
    assert stored["task"]["helper"] == ["<object Net>"]
    assert config.meaning()["model"] == "<object Net>"
    assert config.with_overrides("seed=3").model is net
    with pytest.raises(ConfigError, match="is an object from Python, and has no keys below it"):
        config.with_overrides("model.width=3")


def test_an_object_cannot_be_put_below_a_value():
    with pytest.raises(ConfigError, match="no object can be put into it"):
        Config.from_mapping(mapping(), objects={"name.x": Net()})


def test_copies_and_pickles_are_equal(secret_config):
    for other in (
        pickle.loads(pickle.dumps(secret_config)),
        copy.deepcopy(secret_config),
        secret_config.model_copy(),
    ):
        assert other == secret_config
        assert other.env_names() == secret_config.env_names()
        assert other.stored_yaml() == secret_config.stored_yaml()
    changed = secret_config.model_copy(update={"seed": 9})
    assert changed != secret_config
    assert yaml.safe_load(changed.stored_yaml())["seed"] == 9
    assert changed.payload()["mapping"]["seed"] == 9
    assert secret_config != "x"


def test_a_config_is_frozen(secret_config):
    with pytest.raises(ValueError, match="frozen"):
        secret_config.seed = 3
    with pytest.raises(ValueError, match="frozen"):
        secret_config.data.shuffle = False


def test_meaning_is_what_a_checkpoint_depends_on():
    config = Config.from_mapping(mapping())
    same = config.with_overrides("training.max_epochs=9", "storage_path=/y", "logging.every_n_steps=1")
    assert difference(config.meaning(), same.meaning()) == []
    other = config.with_overrides(
        "seed=1", "model.width=3", "data.global_batch_size=16", "optimizer._target_=torch.optim.SGD",
        "training.ema={decay: 0.9}", "parameters.freeze=[head]", "optimizer.lr=5",
    )  # fmt: skip
    assert difference(config.meaning(), other.meaning()) == [
        "seed: 0 -> 1",
        "data.global_batch_size: 8 -> 16",
        "data.micro_batch_size: 8 -> 16",
        "optimizer._target_: torch.optim.AdamW -> torch.optim.SGD",
        "optimizer.lr: 0.001 -> 5",
        "parameters.freeze: [] -> (not given)",
        "training.ema: null -> (not given)",
        "model.width: (not given) -> 3",
        "parameters.freeze.0: (not given) -> head",
        "training.ema.decay: (not given) -> 0.9",
    ]


def test_the_micro_batch_size_that_was_filled_in_is_marked():
    config = Config.from_mapping(mapping(scaling={"num_workers": 3}))
    assert (config.data.micro_batch_size, config.num_microbatches) == (3, 3)
    assert config.micro_batch_size_is_default
    kept = config.with_overrides("data.micro_batch_size=2")
    assert not kept.micro_batch_size_is_default
    assert kept.num_microbatches == 4


@pytest.mark.parametrize(
    ("training", "drop_last", "steps"),
    [({"max_epochs": 3}, False, 9), ({"max_epochs": 3}, True, 6), ({"max_steps": 5}, False, 5),
     ({}, False, 3), ({"max_epochs": 3, "max_steps": 4}, False, 4)],
)  # fmt: skip
def test_derived_numbers(training, drop_last, steps):
    data = {"train": {"_target_": "a.B"}, "global_batch_size": 8, "drop_last": drop_last}
    config = Config.from_mapping(mapping(training=training, data=data))
    assert config.data.steps_per_epoch(20) == (2 if drop_last else 3)
    assert config.total_steps(20) == steps
    assert config.training.num_epochs(config.data.steps_per_epoch(20)) == -(-steps // (2 if drop_last else 3))


def test_scheduler_interval():
    config = Config.from_mapping(mapping(scheduler={"_target_": "a.B", "interval": "epoch", "x": 1}))
    assert config.scheduler_interval == "epoch"
    assert config.scheduler_target == {"_target_": "a.B", "x": 1}
    assert Config.from_mapping(mapping()).scheduler_target is None
    assert Config.from_mapping(mapping(), objects={"scheduler": double}).scheduler_interval == "step"


def test_equal_in_another_process(secret_config, tmp_path):
    (tmp_path / "c.pickle").write_bytes(pickle.dumps((secret_config, secret_config.stored_yaml())))
    code = (
        "import pickle,sys; c, text = pickle.load(open(sys.argv[1], 'rb')); sys.exit(c.stored_yaml() != text)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "c.pickle"], timeout=60).returncode == 0


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
# The texts that are most likely to be read back as something else.
ODD = st.sampled_from(
    ["1e-3", "010", "yes", "null", "~", "1:30", "2024-01-01", "${x}", "\\${x}", "a\\\\${b", "0x1", "<<", "=",
     " a ", "#", "- x", "a: b", "\u2028", "\ufeff", "\x85", "_1", "1_0", ".inf", "1e5",
     "\\", "'", '"', "{", "!x", "&x", "*x"]
)  # fmt: skip
FLOATS = st.floats(allow_nan=False)
LEAVES = st.none() | st.booleans() | st.integers() | FLOATS | TEXT | ODD
# Keys such as _args_ are a target's own.
KEYS = (TEXT | ODD).filter(lambda key: not (key.startswith("_") and key.endswith("_")))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
KEYWORDS = st.dictionaries(
    st.from_regex(r"[a-z]\w{0,6}", fullmatch=True) | ODD, VALUES.filter(lambda v: v != "???"), max_size=4
)
TARGETS = KEYWORDS.map(lambda keywords: {"_target_": "my.Thing", **keywords})


@settings(max_examples=25, deadline=None)
@given(
    target=TARGETS,
    metrics=st.dictionaries(TEXT | ODD, TARGETS, max_size=2),
    runtime_env=st.dictionaries(TEXT | ODD, VALUES, max_size=2),
    batch=st.integers(1, 10**6),
    workers=st.integers(1, 9),
    lr=st.floats(1e-9, 1e9),
    seed=st.integers(0, 2**63 - 1),
    storage_path=(TEXT | ODD).filter(lambda s: s.strip()),
    every=st.sampled_from([{"epochs": 2}, {"steps": 7}, {"minutes": 0.5}]),
)
def test_any_config_that_is_written_loads_back_equal(
    tmp_path_factory, target, metrics, runtime_env, batch, workers, lr, seed, storage_path, every
):
    config = Config.model_validate(
        mapping(
            model=target,
            metrics=metrics,
            ray={"runtime_env": runtime_env},
            data={"train": target, "global_batch_size": batch * workers},
            scaling={"num_workers": workers},
            optimizer={"_target_": "torch.optim.AdamW", "lr": lr},
            seed=seed,
            storage_path=storage_path,
            checkpoint={"every": every},
        )
    )
    path = tmp_path_factory.getbasetemp() / "roundtrip.yaml"
    path.write_text(config.stored_yaml(), encoding="utf-8", newline="")
    loaded = load_config(path)
    assert loaded == config
    assert loaded.stored_yaml() == config.stored_yaml()
    assert Config.from_payload(loaded.payload()) == config
