"""From the config's targets to the objects of a run: data sets, model, task, metrics, optimizers,
schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raytrainer import optim
from raytrainer.checkpoint import read_weights
from raytrainer.config import callable_from, instantiate, names_places, takes
from raytrainer.data import ElasticBatchSampler, inspect_dataset
from raytrainer.errors import CheckpointError, ConfigError, Problem, TargetError
from raytrainer.evaluation import check_metric
from raytrainer.task import Task

if TYPE_CHECKING:
    from raytrainer.config import Config


@dataclass
class Schedule:
    """A learning-rate schedule and when it advances: each "step", "epoch" or "eval" (with the monitored
    value)."""

    scheduler: Any
    interval: str


@dataclass
class Data:
    """The data sets and what puts the samples of a step together."""

    train: Any
    eval: Any | None
    collate_fn: Any | None
    order: Any | None


@names_places
def build_data(config: Config) -> Data:
    """Raises DataError for a data set that is empty or has no length, TargetError when one cannot be made."""
    train = instantiate(config.data.train, at="data.train")
    inspect_dataset(train, "data.train")
    evaluation = build_eval_data(config)
    collate_fn = callable_from(config.data.collate_fn, at="data.collate_fn")
    order = None
    if config.data.order is not None:
        order = _with_what_it_takes(config.data.order, "data.order", dataset=train)
    return Data(train, evaluation, collate_fn, order)


@names_places
def build_eval_data(config: Config) -> Any | None:
    """The evaluation data set alone; None where there is none. Raises as `build_data` does."""
    if config.data.eval is None:
        return None
    evaluation = instantiate(config.data.eval, at="data.eval")
    inspect_dataset(evaluation, "data.eval")
    return evaluation


def build_sampler(config: Config, data: Data, rank: int, world_size: int) -> ElasticBatchSampler:
    return ElasticBatchSampler(
        len(data.train),
        config.data.global_batch_size,
        config.data.micro_batch_size,
        rank=rank,
        world_size=world_size,
        seed=config.seed,
        shuffle=config.data.shuffle,
        drop_last=config.data.drop_last,
        order=data.order,
    )


@names_places
def build_model(config: Config, device: torch.device) -> nn.Module:
    """The model on its device, its weights drawn from the config's seed or read from `init_from`, frozen as
    asked."""
    torch.manual_seed(config.seed)
    model = instantiate(config.model, at="model")
    if not isinstance(model, nn.Module):
        raise TargetError(f"it makes a {type(model).__name__}, not a torch.nn.Module", "model")
    if config.init_from is not None:
        load_weights(model, _weights_to_start_from(config.init_from), config.init_from)
    optim.freeze(model, config.parameters.freeze)
    return model.to(device)


def _weights_to_start_from(address: str) -> dict[str, torch.Tensor]:
    try:
        return read_weights(address)
    except CheckpointError as error:
        fix = "write a run directory, a checkpoint folder in one, or a .safetensors file"
        raise ConfigError(Problem("config", "init_from", str(error), address, fix)) from error


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], source: str) -> None:
    """Raises ConfigError that names what does not fit."""
    misfit = describe_misfit(model, weights)
    if misfit:
        raise ConfigError(
            Problem("config", "init_from", f"its weights do not fit the model: {misfit}", source)
        )
    model.load_state_dict(weights)


def describe_misfit(model: nn.Module, weights: dict[str, torch.Tensor]) -> str | None:
    """Why the weights are another model's, with the first few names; None when they fit."""
    own = model.state_dict()
    problems = [f"{name} is missing" for name in own if name not in weights]
    problems += [f"{name} is not in the model" for name in weights if name not in own]
    problems += [
        f"{name} is {tuple(weights[name].shape)}, the model's is {tuple(value.shape)}"
        for name, value in own.items()
        if name in weights and isinstance(value, torch.Tensor) and weights[name].shape != value.shape
    ]
    if not problems:
        return None
    return "; ".join(problems[:4]) + (f" and {len(problems) - 4} more" if len(problems) > 4 else "")


@names_places
def build_task(config: Config, model: nn.Module, device: torch.device) -> Task:
    task = Task() if config.task is None else instantiate(config.task, at="task")
    if not isinstance(task, Task):
        raise TargetError(f"it makes a {type(task).__name__}, not a raytrainer.Task", "task")
    task.model, task.device, task.seed = model, device, config.seed
    if config.loss is not None:
        task.loss = instantiate(config.loss, at="loss")
        if isinstance(task.loss, nn.Module):
            task.loss.to(device)
    return task


@names_places
def build_metrics(config: Config, device: torch.device) -> dict[str, Any]:
    """torchmetrics by name, on the device, counting in float64."""
    metrics = {}
    for name, target in config.metrics.items():
        metric = instantiate(target, at=f"metrics.{name}")
        check_metric(name, metric)
        metrics[name] = metric.set_dtype(torch.float64).to(device)
    return metrics


@names_places
def build_optimizers(config: Config, model: nn.Module, task: Task) -> dict[str, torch.optim.Optimizer]:
    """The task's optimizers by name; "" is the name of a single one."""

    def build(parameters: Any, **overrides: Any) -> torch.optim.Optimizer:
        return instantiate(config.optimizer, parameters, at="optimizer", **overrides)

    optimizers = task.configure_optimizers(optim.parameter_groups(model, config.parameters), build)
    if not isinstance(optimizers, dict):
        optimizers = {"": optimizers}
    for name, optimizer in optimizers.items():
        if not isinstance(optimizer, torch.optim.Optimizer):
            label = f"{name!r}: " if name else ""
            made = f"{label}it makes a {type(optimizer).__name__}, not a torch.optim.Optimizer"
            raise TargetError(made, "optimizer")
    if not optimizers:
        raise TargetError("configure_optimizers returned no optimizer", "task")
    return optimizers


@names_places
def build_schedules(
    config: Config, optimizers: dict[str, torch.optim.Optimizer], num_steps: int
) -> dict[str, Schedule]:
    """One schedule an optimizer; a target that takes `total_steps` and was not given it gets the run's."""
    if config.scheduler is None:
        return {}
    return {
        name: Schedule(
            _with_what_it_takes(config.scheduler_target, "scheduler", optimizer, total_steps=num_steps),
            config.scheduler_interval,
        )
        for name, optimizer in optimizers.items()
    }


def _with_what_it_takes(target: Any, where: str, *args: Any, **offers: Any) -> Any:
    """Instantiates `target` with those of `offers` that it has a parameter for and that the config leaves
    open."""
    given_already = target if isinstance(target, dict) else {}
    given = {
        name: value
        for name, value in offers.items()
        if name not in given_already and takes(target, name, where)
    }
    return instantiate(target, *args, at=where, **given)
