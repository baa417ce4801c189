"""`determinism: bitwise`: one result to the bit for every number of ranks, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raytrainer import numerics
from raytrainer.distributed import Process
from raytrainer.errors import ClusterRequestError, ConfigError, ResumeError
from raytrainer.numerics import numerics_of, refuse_unlike_ranks
from raytrainer.tree_reduction import TreeReduction
from tests import training
from tests.bitwise_ranks import Job, train_all
from tests.training import config

BITWISE = "training.determinism=bitwise"
BF16 = [BITWISE, "training.precision=bf16-mixed"]
FP16 = [BITWISE, "training.precision=fp16-mixed"]
TURNS = [BITWISE, "task={_target_: tests.bitwise_ranks.TwoOptimizers}"]
UNUSED = ["training.find_unused_parameters=true"]
SKIP = [
    BITWISE,
    "data.on_bad_sample=skip",
    "data.shuffle=false",
    "data.train._target_=tests.bitwise_ranks.Torn",
]


def bits(result):
    """All that must be equal: weights, state, and what the evaluations gave."""
    assert set(result.metrics) == {"train/loss", "eval/loss", "eval/accuracy", "eval/hinge"}
    return result.weights_sha256, result.state_sha256, result.metrics


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The last result of every run."""
    jobs = [
        Job("two", 2, [BITWISE]),
        Job("three", 3, [BITWISE]),
        Job("buckets", 3, [BITWISE], bucket_bytes=256),
        Job("history", 3, [BITWISE], stop_at=3),
        Job("history", 1, [BITWISE], stop_at=4),
        Job("history", 2, [BITWISE]),
        Job("bf16", 3, BF16),
        Job("fp16", 3, FP16),
        Job("turns", 3, TURNS),
        Job("skip", 3, SKIP),
        Job("order", 3, UNUSED),
        Job("one", 1, [BITWISE]),
        Job("one_bf16", 1, BF16),
        Job("one_fp16", 1, FP16),
        Job("one_turns", 1, TURNS),
        Job("one_skip", 1, SKIP),
        Job("one_order", 1, UNUSED),
    ]
    results = train_all(jobs, tmp_path_factory.mktemp("ranks"))
    return {job.name: result for job, result in zip(jobs, results, strict=True)}


@pytest.mark.parametrize(
    ("run", "alone"),
    [
        ("two", "one"),
        ("three", "one"),
        ("buckets", "one"),
        ("history", "one"),
        ("skip", "one_skip"),
        ("bf16", "one_bf16"),
        ("fp16", "one_fp16"),
        ("turns", "one_turns"),
    ],
)
def test_any_number_of_ranks_gives_the_same_bits(ends, run, alone):
    assert (ends[run].status, ends[run].steps) == ("finished", 10)
    assert bits(ends[run]) == bits(ends[alone])


def test_the_history_had_stops_in_mid_epoch(ends):
    events = (training.Path(ends["history"].run_dir) / "events.jsonl").read_text()
    assert [events.count(f'"event": "{name}"') for name in ("stopped", "resumed", "finished")] == [2, 2, 1]
    assert '"step": 3' in events
    assert '"step": 7' in events


def test_in_order_mode_the_bits_depend_on_the_ranks(ends):
    """Otherwise the comparison above would show nothing."""
    assert ends["order"].weights_sha256 != ends["one_order"].weights_sha256
    assert ends["one"].weights_sha256 != ends["one_bf16"].weights_sha256


def test_torch_is_left_as_it_was(tmp_path):
    before = torch.get_num_threads()
    training.train(config(tmp_path, BITWISE, "training.intra_op_threads=3", "training.max_steps=1"))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.get_num_threads() == before


class Unpooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.unpool = nn.MaxPool1d(2, return_indices=True), nn.MaxUnpool1d(2)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        pooled, places = self.pool(self.head.weight.new_zeros(len(inputs), 1, 8) + inputs[:, None])
        return self.head(self.unpool(pooled, places)[:, 0])


def test_what_has_no_deterministic_form_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"max_unpooling\w+ has no deterministic form"):
        training.train(config(tmp_path, BITWISE, objects={"model": Unpooling()}))


def test_a_gradient_that_comes_in_pieces_is_waited_for():
    """A shared layer in two reentrant checkpoints accumulates twice in one backward pass."""
    layer = nn.Linear(2, 2)
    reduction = TreeReduction(list(layer.parameters()), Process(0, world_size=2))
    for _ in range(2):
        reduction.begin(num_microbatches=2)
        reduction.expect()
        hidden = torch.ones(1, 2, requires_grad=True)
        for _ in range(2):
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        hidden.sum().backward()
        assert layer.bias.grad is not None  # else it was sent off by its first piece
        reduction.add()
        assert layer.bias.grad is None


class SparseTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(10, 4, sparse=True)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (SparseTokens(), "tokens is of type Embedding: its gradients are sparse"),
        (nn.Sequential(nn.Linear(8, 4), nn.SyncBatchNorm(4)), "1 is of type SyncBatchNorm"),
    ],
)
def test_what_has_no_fixed_sum_is_refused(tmp_path, model, reason):
    with pytest.raises(ConfigError, match=reason):
        training.train(config(tmp_path, BITWISE, objects={"model": model}))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.compile={dynamic: true}", "kernels for any shape"),
        ("training.compile={mode: max-autotune}", "kernels chosen by a stop-watch"),
        ("training.compile={options: {max_autotune: true}}", "kernels chosen by a stop-watch"),
    ],
)
def test_compilation_that_is_not_deterministic_is_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, BITWISE, override)


def test_kernels_are_compiled_for_one_shape(tmp_path):
    assert config(tmp_path, "training.compile=true").training.compile_options == {}
    bitwise = config(tmp_path, BITWISE, "training.compile={fullgraph: true}").training
    assert bitwise.compile_options == {"dynamic": False, "fullgraph": True}


def test_threads_are_for_bitwise_alone(tmp_path):
    with pytest.raises(ConfigError, match="determinism: bitwise alone"):
        config(tmp_path, "training.intra_op_threads=2")
    assert config(tmp_path, BITWISE, "scaling.cpus_per_worker=2.5").intra_op_threads == 2


def test_another_kind_of_node_does_not_go_on(tmp_path, monkeypatch):
    training.train(config(tmp_path, BITWISE), stop_at=2)
    with pytest.raises(ResumeError, match=r"numerics.intra_op_threads: 1 -> 2\n.*intra_op_threads"):
        training.train(config(tmp_path, BITWISE, "training.intra_op_threads=2"))
    with pytest.raises(ResumeError, match=r"training\.determinism: bitwise -> order"):
        training.train(config(tmp_path))
    monkeypatch.setattr(numerics, "_cpu_model", lambda: "Abacus")
    with pytest.raises(ResumeError, match=r"node that computes other bits:\n  numerics.cpu: .* -> Abacus\n"):
        training.train(config(tmp_path, BITWISE))


def test_unlike_ranks_are_refused(tmp_path, monkeypatch):
    facts = numerics_of(config(tmp_path, BITWISE), torch.device("cpu"))
    assert facts["numerics.torch"] == torch.__version__
    refuse_unlike_ranks(facts, Process())
    other = {**facts, "numerics.cpu_capability": "DEFAULT"}
    monkeypatch.setattr(numerics, "gather_objects", lambda value, process: [value, value, other])
    with pytest.raises(ClusterRequestError, match=r"cpu_capability: \w+ on rank 0, DEFAULT on rank 2"):
        refuse_unlike_ranks(facts, Process())
