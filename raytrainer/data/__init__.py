"""Data sets, the elastic batch sampler and the loader."""

from raytrainer.data.checks import inspect_dataset, label_range_error
from raytrainer.data.from_torchvision import ImageFolder, TorchvisionMnist
from raytrainer.data.idx import FashionMnist, IdxImages
from raytrainer.data.in_memory import InMemoryImages, MnistSubset
from raytrainer.data.loader import LoadedMicrobatch, MicrobatchLoader, SkippedSample, build_loader
from raytrainer.data.loader_process import explain_loader_error
from raytrainer.data.order import ClassBalancedOrder, WeightedOrder, epoch_order, mix_seed
from raytrainer.data.prediction import class_names, image_preparation, preprocessing_of
from raytrainer.data.sampler import (
    ElasticBatchSampler,
    EvalBatches,
    Microbatch,
    StepPlan,
    microbatches_of,
    steps_per_epoch,
)
from raytrainer.data.text import TextFile

__all__ = [
    "ClassBalancedOrder",
    "ElasticBatchSampler",
    "EvalBatches",
    "FashionMnist",
    "IdxImages",
    "ImageFolder",
    "InMemoryImages",
    "LoadedMicrobatch",
    "Microbatch",
    "MicrobatchLoader",
    "MnistSubset",
    "SkippedSample",
    "StepPlan",
    "TextFile",
    "TorchvisionMnist",
    "WeightedOrder",
    "build_loader",
    "class_names",
    "epoch_order",
    "explain_loader_error",
    "image_preparation",
    "inspect_dataset",
    "label_range_error",
    "microbatches_of",
    "mix_seed",
    "preprocessing_of",
    "steps_per_epoch",
]
