"""Reading a YAML file: values, lines, overrides, and every mistake with its place, value, rule and fix."""

import pytest

from raytrainer.config import Config, load_config
from raytrainer.config.data import shared_evenly
from raytrainer.config.positions import parse_value
from raytrainer.errors import ConfigError

SMALL = """\
name: mnist
data:
  train: {_target_: my.Train}
  eval: {_target_: my.Eval}
  global_batch_size: 256
model: {_target_: my.Net}
loss: {_target_: torch.nn.CrossEntropyLoss}
metrics: {accuracy: {_target_: my.Accuracy}}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes run.yaml (SMALL and some more lines, or all of a text) into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(more: str = "", whole: str | bytes | None = None) -> str:
        text = SMALL + more if whole is None else whole
        (tmp_path / "run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return "run.yaml"

    return write


def message(path, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_small_file_gets_the_defaults(write):
    config = load_config(write())
    assert config.name == "mnist"
    assert config.optimizer == {"_target_": "torch.optim.AdamW", "lr": 1e-3}
    assert config.training.max_epochs == 1
    assert config.data.micro_batch_size == 256
    assert config.micro_batch_size_is_default
    assert config.eval.every.unit == "epochs"
    assert config.logging.sinks == ["console", "jsonl", "tensorboard"]
    assert config.source_path == "run.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("3e-4", 3e-4),
        ("1.5e+3", 1500.0),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1_000", 1000),
        ("0x10", 16),
        ("-7", -7),
        ("0", 0),
        ("true", True),
        ("no", False),
        ("null", None),
        ("~", None),
        ("2024-01-02", "2024-01-02"),
        ("2024-01-02 03:04:05", "2024-01-02 03:04:05"),
        ("010", "010"),
        ("0o17", "0o17"),
        ("12:30:45", "12:30:45"),
        ("1:30", "1:30"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("_1", "_1"),
        (".inf", float("inf")),
    ],
)
def test_scalars_are_read_without_surprises(text, value):
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_every_mistake_is_reported_at_once_in_the_order_of_the_file(write):
    text = message(write("epochs: 3\ntraining: {precison: fp32, tf32: 1}\nseed: -1\n"), ["checkpoint.evry=1"])
    places = [line for line in text.splitlines() if not line.startswith(" ")]
    assert places == [
        "run.yaml:9: epochs = 3",
        "run.yaml:10: training.tf32 = 1",
        "run.yaml:10: training.precison = fp32",
        "run.yaml:11: seed = -1",
        "override 'checkpoint.evry=1': checkpoint.evry = 1",
    ]


BAD_FILES = [
    ("", ["run.yaml\n", "the file is empty"]),
    ("  \n\n", ["the file is empty"]),
    ("# only\n", ["only comments"]),
    ("- name: x\n", ["run.yaml:1", "this is a list", "key: value"]),
    ("\n\njust text\n", ["run.yaml:3", "this is a single value"]),
    ("name: x\ndata: [1, 2\nmodel: y\n", ["run.yaml:3:6", "is not valid YAML"]),
    ("name: x\n\tdata: 1\n", ["run.yaml:2:1", "is not valid YAML", "spaces, not tabs"]),
    ('name: "x\n', ["is not valid YAML", "quoted scalar"]),
    ("name: x\nmodel: *nope\n", ["run.yaml:2:8", "undefined alias"]),
    ("name: x\n---\nname: y\n", ["is not valid YAML", "one file has one config"]),
    ("name: !!python/object:os.system x\n", ["run.yaml:1:7", "could not determine a constructor"]),
    ("name: x\nmodel: &a {b: *a}\n", ["an alias inside its own anchor"]),
    (b"name: \xff\xfe\n", ["run.yaml:1", "is not UTF-8"]),
    (b"name: ok\nseed: \x00\n", ["is not valid YAML"]),
    ("name: x\nseed: 1\nseed: 2\n", ["run.yaml:3: seed", "twice", "line 2", "line 3"]),
    ("data:\n  loader: {num_workers: 1, num_workers: 2}\n", ["run.yaml:2: data.loader.num_workers", "twice"]),
    ("name: x\n1: y\n", ["a key must be text, not 1", 'write "1"']),
    ("name: x\nmodel:\n  on: y\n", ["model", "a key must be text, not True"]),
    ("[" * 600, ["run.yaml", "nested too deeply"]),
]


@pytest.mark.parametrize(("text", "words"), BAD_FILES)
def test_a_file_that_is_no_config_says_where_and_why(write, text, words):
    told = message(write(whole=text))
    assert all(word in told for word in words), told


def test_a_missing_file_names_the_files_that_are_there(write):
    write()
    told = message("runn.yaml")
    assert "runn.yaml\n" in told
    assert "no such file" in told
    assert "there are: run.yaml" in told


def test_a_directory_is_no_file(write, tmp_path):
    write()
    assert "is a directory" in message(tmp_path)


def test_an_anchor_that_explodes_is_refused(write):
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 8)]
    assert "more than 100000 values" in message(write(whole="\n".join(rows)))


def test_anchors_and_merges_work_and_keep_their_lines(write):
    path = write(
        "optimizer: &o\n  _target_: torch.optim.SGD\n  lr: fast\n"
        "scheduler:\n  <<: *o\n  _target_: my.Schedule\n  interval: no_such\n"
    )
    told = message(path)
    assert "run.yaml:11: optimizer.lr = fast" in told
    path = write(
        "optimizer: &o {_target_: torch.optim.SGD, lr: 0.1}\nscheduler: {<<: *o, _target_: my.Schedule}\n"
    )
    assert load_config(path).scheduler == {"_target_": "my.Schedule", "lr": 0.1}


BAD_VALUES = [
    ("scaling: {num_workers: 0}", ["run.yaml:9: scaling.num_workers = 0", "at least 1", "num_workers: 2"]),
    ("scaling: {num_workers: -1}", ["scaling.num_workers = -1", "at least 1"]),
    ("scaling: {num_workers: 2.5}", ["scaling.num_workers = 2.5", "a whole number"]),
    ("scaling: {num_workers: .inf}", ["scaling.num_workers", "a whole number"]),
    ("scaling: {num_workers: 2.0}", ["a whole number", "write 2"]),
    ("scaling: {num_workers: true}", ["scaling.num_workers = true", "a whole number"]),
    ('scaling: {num_workers: "2"}', ['= "2"', "a whole number, not text", "without quotes: 2"]),
    ("scaling: {num_workers: {min: 1}}", ["a whole number, not a mapping"]),
    ("scaling: [1]", ["run.yaml:9: scaling", "a mapping of keys and values, not a list"]),
    ("scaling: 3", ["scaling = 3", "a mapping of keys and values, not a whole number"]),
    ("scaling: {gpus_per_worker: 1.5}", ["must be whole", "write 1 or 2"]),
    ("scaling: {gpus_per_worker: -1}", ["auto or a number"]),
    ("scaling: {gpus_per_worker: many}", ["auto or a number"]),
    ("scaling: {gpus_per_worker: .nan}", ["auto or a number"]),
    ("scaling: {gpus_per_worker: 0.5, num_workers: 2}", ["needs num_workers: 1, and it is 2"]),
    ("scaling: {cpus_per_worker: .inf}", ["a finite number"]),
    ("scaling: {placement_strategy: PAK}", ["one of PACK, SPREAD", "write PACK"]),
    ("scaling: {resources_per_worker: {GPU: 1}}", ["GPU is not a custom", "scaling.gpus_per_worker"]),
    ("scaling: {resources_per_worker: {tpu: -1}}", ["0 or more"]),
    ("training: {precision: bf16}", ["one of fp32, bf16-mixed", "write bf16-mixed"]),
    ("training: {max_epochs: 0}", ["at least 1"]),
    ("training: {gradient_clip_norm: 0}", ["above 0"]),
    ("training: {compile: 3}", ["true, false or a mapping"]),
    ("training: {tf32: 1}", ["true or false, not a whole number"]),
    ("training: {ema: {decay: 1}}", ["below 1"]),
    ("training: {ema: {}}", ["training.ema.decay", "is required", "decay: 0.999"]),
    ("training: {early_stopping: {monitor: eval/loss}}", ["early_stopping.patience", "is required"]),
    ("training: {early_stopping: {monitor: eval/acuracy, mode: max, patience: 1}}", ["write eval/accuracy"]),
    ("checkpoint: {monitor: accuracy, mode: max}", ["eval/<metric>", "write eval/accuracy"]),
    ("checkpoint: {monitor: eval/accuracy}", ["checkpoint.mode", "larger or a smaller", "mode: max"]),
    ("checkpoint: {every: 3}", ["a mapping with one of epochs, steps, minutes", "{epochs: 1}"]),
    ("checkpoint: {every: {epochs: 1, steps: 1}}", ["exactly one of"]),
    ("checkpoint: {every: {}}", ["exactly one of"]),
    ("checkpoint: {every: {epochs: 0}}", ["checkpoint.every.epochs = 0", "at least 1"]),
    ("checkpoint: {every: {hours: 1}}", ["exactly one of epochs, steps, minutes"]),
    ("eval: {every: {minutes: 1}}", ["exactly one of epochs, steps"]),
    ("logging: {sinks: console}", ["must be a list, not text", "write [console]"]),
    ("logging: {sinks: [consol]}", ["logging.sinks.0 = consol", "write console"]),
    ("failure: {max_failures: -2}", ["at least -1"]),
    ("seed: null", ["a whole number, not nothing"]),
    ("seed: 010", ["seed = 010", "a whole number"]),
    ("storage_path: ' '", ["must not be empty"]),
    ("init_from: 3", ["must be text", 'quotes: "3"']),
    ("optimizer: {_target_: torch.optim.AdamW, lr: fast}", ["optimizer.lr = fast", "a number", "1e-3"]),
    ('optimizer: {_target_: torch.optim.AdamW, lr: "1e-3"}', ['optimizer.lr = "1e-3"', "without quotes"]),
    ("optimizer: {_target_: torch.optim.SGD, momentum: true}", ["optimizer.momentum = true", "a number"]),
    ("optimizer: {_target_: torch.optim.AdamW, betas: 0.9}", ["optimizer.betas", "two numbers"]),
    ("optimizer: {_target_: torch.optim.AdamW, betas: [0.9, x]}", ["two numbers"]),
    ("optimizer: {lr: 1e-3}", ["optimizer", "has no _target_"]),
    ("optimizer: torch.optim.AdamW", ["optimizer = torch.optim.AdamW", "a mapping with _target_, not text"]),
    ("optimizer: {target: torch.optim.AdamW}", ["write _target_: in place of target:"]),
    ("optimizer: {_target_: AdamW}", ["optimizer._target_ = AdamW", "dotted name"]),
    ("optimizer: {_target_: 3}", ["optimizer._target_ = 3", "dotted name"]),
    ("optimizer: {_target_: a.B, _partal_: true}", ["_partal_ is not a key", "did you mean _partial_?"]),
    ("optimizer: {_target_: a.B, x: [{_target_: b}]}", ["optimizer.x.0._target_ = b"]),
    ("parameters: {freeze: ['(']}", ["parameters.freeze.0 = (", "not a regular expression"]),
    ("parameters: {groups: [{match: x, lr: high}]}", ["parameters.groups.0.lr = high", "a number"]),
    ("parameters: {groups: [{lr: 1}]}", ["parameters.groups.0.match", "is required"]),
    ("scheduler: {_target_: a.B, interval: batch}", ["scheduler.interval = batch", "step, epoch, eval"]),
    (
        "scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, interval: step}",
        ["scheduler.interval", "write interval: eval"],
    ),
]


@pytest.mark.parametrize(("line", "words"), BAD_VALUES)
def test_a_wrong_value_is_named_with_its_rule(write, line, words):
    told = message(write(line + "\n"))
    assert "run.yaml:9: " in told
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("name: mnist\n", "", ["run.yaml: name", "is required", "name: mnist"]),
        ("name: mnist", "name: a/b", ["run.yaml:1: name = a/b", "no slash", "write name: a_b"]),
        ("name: mnist", "name: ..", ["name = ..", "no slash"]),
        ("name: mnist", "name: ''", ['name = ""', "must not be empty"]),
        ("name: mnist", "name: 12", ["must be text, not a whole number", '"12"']),
        ("name: mnist", "name:", ["name = null", "must be text"]),
        ("name: mnist", f"name: {'x' * 300}", ["at most 200 bytes"]),
        ("256", "0", ["run.yaml:5: data.global_batch_size = 0", "at least 1"]),
        ("  global_batch_size: 256\n", "", ["run.yaml:2: data.global_batch_size", "is required"]),
        ("256", "256\n  micro_batch_size: 512", ["run.yaml:6", "= 512", "which is 256"]),
        (
            "256",
            "256\n  micro_batch_size: 256\nscaling: {num_workers: 3}",
            ["1 microbatches", "write micro_batch_size: 86"],
        ),
        ("256", "2\nscaling: {num_workers: 3}", ["2 samples, fewer than the 3 workers"]),
        ("256", "256\n  loader: {prefetch_factor: 2}", ["data.loader.prefetch_factor = 2", "num_workers: 2"]),
        ("256", "256\n  loader: {pin_memory: 1}", ["auto, true or false"]),
        ("256", "256\n  loader: auto", ["data.loader = auto", "a mapping of keys"]),
        ("256", "256\n  collate_fn: pad", ["data.collate_fn = pad", "dotted name of a function"]),
        ("256", "256\n  order: shuffle", ["data.order = shuffle", "a mapping with _target_"]),
        ("loss: {_target_: torch.nn.CrossEntropyLoss}\n", "", ["run.yaml: loss", "unless there is a task"]),
        ("model: {_target_: my.Net}\n", "", ["model", "is required", "_target_: my_module.Net"]),
        ("model: {_target_: my.Net}", "model: <object Net>", ["made in Python", "object of type Net"]),
        ("  train: {_target_: my.Train}\n", "", ["run.yaml:2: data.train", "is required"]),
        ("metrics: {", "metrics: [", ["is not valid YAML"]),
        ("256", "???", ["data.global_batch_size = ???", "no value yet", "data.global_batch_size=..."]),
    ],
)
def test_the_required_part_of_the_file(write, old, new, words):
    assert old in SMALL
    told = message(write(whole=SMALL.replace(old, new, 1)))
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("epochs: 3", "training.max_epochs"),
        ("learning_rate: 1e-3", "optimizer.lr"),
        ("lr: 1e-3", "optimizer.lr"),
        ("mixed_precision: true", "training.precision"),
        ("amp: true", "training.precision"),
        ("batch_size: 3", "data.global_batch_size"),
        ("workers: 3", "scaling.num_workers"),
        ("sed: 3", "seed"),
        ("optimzer: {}", "optimizer"),
        ("max_steps: 3", "training.max_steps"),
        ("training: {epochs: 3}", "training.max_epochs"),
        ("training: {max_epoch: 3}", "training.max_epochs"),
        ("training: {batch_size: 3}", "data.global_batch_size"),
        ("scaling: {workers: 3}", "scaling.num_workers"),
        ("scaling: {nmu_workers: 3}", "scaling.num_workers"),
        ("checkpoint: {keep: 3}", "checkpoint.num_to_keep"),
        ("logging: {every: 3}", None),
        ("qwertyuiop: 3", None),
    ],
)
def test_a_misspelt_key_gets_the_nearest_right_one(write, line, right):
    told = message(write(line + "\n"))
    assert "there is no such key" in told
    assert (f"did you mean {right}?" if right else "run.yaml:9") in told, told


@pytest.mark.parametrize(
    ("key", "right"), [("data.workers", "data.loader.num_workers"), ("data.lodaer.x", None)]
)
def test_a_misspelt_override_key_gets_the_nearest_right_one(write, key, right):
    told = message(write(), [f"{key}=3"])
    assert "override '" in told
    assert f"did you mean {right or 'data.loader'}?" in told


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("optimizer.lr=3e-4", lambda c: c.optimizer, {"_target_": "torch.optim.AdamW", "lr": 3e-4}),
        ("training.early_stopping=null", lambda c: c.training.early_stopping, None),
        ("data.train.root=/x", lambda c: c.data.train["root"], "/x"),
        ("logging.sinks=[jsonl, console]", lambda c: c.logging.sinks, ["jsonl", "console"]),
        ("parameters.groups=[{match: a, lr: 1}]", lambda c: c.parameters.groups[0].keywords, {"lr": 1}),
        (
            "checkpoint.every={steps: 5}",
            lambda c: (c.checkpoint.every.unit, c.checkpoint.every.count),
            ("steps", 5),
        ),
        ("name='a=b'", lambda c: c.name, "a=b"),
        ("metrics.f1._target_=my.F1", lambda c: sorted(c.metrics), ["accuracy", "f1"]),
        ("training.ema.decay=0.9", lambda c: c.training.ema.decay, 0.9),
    ],
)
def test_overrides(write, override, get, value):
    assert get(load_config(write(), [override])) == value


@pytest.mark.parametrize(
    "override",
    ["checkpoint.monitor=eval/loss", "training.early_stopping={monitor: eval/loss, patience: 1}"],
)
def test_an_evaluation_metric_needs_evaluation_data(write, override):
    assert "data.eval is not given" in message(write(), ["data.eval=null", override])


def test_overrides_reach_into_lists_and_the_last_one_wins(write):
    path = write("parameters: {groups: [{match: a, lr: 1}, {match: b, lr: 2}]}\n")
    config = load_config(
        path, ["parameters.groups.1.lr=5", "parameters.groups[0].match=c", "seed=1", "seed=2"]
    )
    assert [(g.match, g.keywords["lr"]) for g in config.parameters.groups] == [("c", 1), ("b", 5)]
    assert config.seed == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lr", ["has no = sign", "key=value"]),
        ("=3", ["is not a key"]),
        ("a..b=3", ["is not a key"]),
        ("a b=3", ["is not a key"]),
        ("seed=", ["has no value", "seed=null"]),
        ("+seed=3", ["no + before its key", "write seed=3"]),
        ("~seed", ["no ~ before", "seed=null"]),
        ("--seed=3", ["no such option"]),
        ("seed=[1", ["not valid YAML"]),
        ("seed=*x", ["not valid YAML", "quote it"]),
        ("name.x=3", ["name", "is text, and has no keys"]),
        ("parameters.groups.0.lr=3", ["parameters.groups", "must be a list"]),
        (
            "logging.sinks=console",
            ["override 'logging.sinks=console': logging.sinks = console", "must be a list"],
        ),
        ("scaling.num_workers=0", ["override 'scaling.num_workers=0'", "at least 1"]),
        ("scheduler.step_size=3", ["override 'scheduler.step_size=3': scheduler", "has no _target_"]),
        ("training=3", ["override 'training=3': training = 3", "a mapping"]),
    ],
)
def test_a_bad_override_is_named(write, override, words):
    told = message(write(), [override])
    assert f"override {override!r}" in told
    assert all(word in told for word in words), told


def test_an_index_outside_a_list_is_named(write):
    path = write("parameters: {groups: [{match: a}]}\n")
    assert "an index from 0 to 0" in message(path, ["parameters.groups.3.lr=1"])
    assert "an index from 0 to 0" in message(path, ["parameters.groups.lr=1"])


def test_empty_sections_are_the_defaults(write):
    assert load_config(write("scaling:\ntraining:\n")) == load_config(write())


def test_a_mapping_from_python_is_checked_the_same_way_and_not_changed():
    mapping = {"name": "x", "data": {"train": {"_target_": "a.B"}, "global_batch_size": 4}, "epochs": 3}
    with pytest.raises(ConfigError, match=r"(?s)config: epochs = 3.*did you mean training.max_epochs"):
        Config.from_mapping(mapping, ["data.global_batch_size=8"])
    assert mapping["data"]["global_batch_size"] == 4
    with pytest.raises(ConfigError, match="must be a mapping"):
        Config.from_mapping([1])


@pytest.mark.parametrize(
    ("batch", "workers", "size"), [(128, 2, 64), (9, 4, 2), (10, 4, 3), (7, 7, 1), (5, 1, 5), (100, 8, 13)]
)
def test_the_default_microbatch_leaves_no_worker_without_one(batch, workers, size):
    assert shared_evenly(batch, workers) == size
    assert -(-batch // size) >= workers
