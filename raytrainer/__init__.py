"""Trains PyTorch models on Ray from one YAML file.

    import raytrainer
    result = raytrainer.run("configs/mnist.yaml", overrides=["optimizer.lr=3e-4"])

Names are loaded when they are first used, so that importing the package loads neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Config": "raytrainer.config",
    "load_config": "raytrainer.config",
    "run": "raytrainer.api",
    "Trainer": "raytrainer.trainer",
    "Task": "raytrainer.task",
    "StepOutput": "raytrainer.task",
    "EvaluationOutput": "raytrainer.task",
    "Result": "raytrainer.result",
}

if TYPE_CHECKING:
    from raytrainer.api import run
    from raytrainer.config import Config, load_config
    from raytrainer.result import Result
    from raytrainer.task import EvaluationOutput, StepOutput, Task
    from raytrainer.trainer import Trainer

__all__ = ["Config", "EvaluationOutput", "Result", "StepOutput", "Task", "Trainer", "load_config", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'raytrainer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
