"""Data sets, the elastic batch sampler and the loader."""

from raytrainer.data.checks import inspect_dataset, label_range_error
from raytrainer.data.in_memory import InMemoryImages, MnistSubset
from raytrainer.data.loader import LoadedMicrobatch, MicrobatchLoader, SkippedSample, build_loader
from raytrainer.data.loader_process import explain_loader_error
from raytrainer.data.order import ClassBalancedOrder, WeightedOrder, epoch_order, mix_seed
from raytrainer.data.sampler import (
    ElasticBatchSampler,
    EvalBatches,
    Microbatch,
    StepPlan,
    microbatches_of,
    steps_per_epoch,
)

__all__ = [
    "ClassBalancedOrder",
    "ElasticBatchSampler",
    "EvalBatches",
    "InMemoryImages",
    "LoadedMicrobatch",
    "Microbatch",
    "MicrobatchLoader",
    "MnistSubset",
    "SkippedSample",
    "StepPlan",
    "WeightedOrder",
    "build_loader",
    "epoch_order",
    "explain_loader_error",
    "inspect_dataset",
    "label_range_error",
    "microbatches_of",
    "mix_seed",
    "steps_per_epoch",
]
