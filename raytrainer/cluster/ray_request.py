"""What a run asks of a Ray cluster, and whether that could ever give it; pure, knows nothing of Ray."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raytrainer.errors import ClusterRequestError

# Ray counts resources in ten-thousandths; a float sum must not refuse what fits.
_EPSILON = 1e-4
# Of `label_selector`: "in(a, b)", "!in(a, b)", "!a" or "a".
_ANY_OF = re.compile(r"(?P<no>!?)\s*in\s*\((?P<values>.*)\)\s*$")


@dataclass(frozen=True)
class NodeCapacity:
    """A live node: all its resources, used or not, and its labels."""

    resources: dict[str, float]
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerRequest:
    """num_workers times `resources` (Ray's names: CPU, GPU, memory, custom ones), placed by `strategy`."""

    num_workers: int
    resources: dict[str, float]
    strategy: str = "PACK"
    labels: dict[str, str] = field(default_factory=dict)
    accelerator_type: str | None = None

    @property
    def num_gpus(self) -> float:
        return self.resources.get("GPU", 0)


def plan_request(scaling: Any, nodes: Sequence[NodeCapacity]) -> WorkerRequest:
    """The config's `scaling` as a request; `gpus_per_worker: auto` is 1 where the cluster has GPUs."""
    gpus = scaling.gpus_per_worker
    if gpus == "auto":
        gpus = 1 if any(node.resources.get("GPU", 0) > 0 for node in nodes) else 0
    resources = {"CPU": scaling.cpus_per_worker, "GPU": gpus, **scaling.resources_per_worker}
    return WorkerRequest(
        scaling.max_workers,
        {name: amount for name, amount in resources.items() if amount > 0},
        scaling.placement_strategy,
        dict(scaling.label_selector),
        scaling.accelerator_type,
    )


def at_least(request: WorkerRequest, num_workers: int) -> WorkerRequest:
    """The same request for another number of workers."""
    return replace(request, num_workers=num_workers)


def check_request(request: WorkerRequest, nodes: Sequence[NodeCapacity]) -> None:
    """Raises ClusterRequestError when these nodes, were they all free, could not hold the request."""
    num_fitting = count_fitting(request, nodes)
    if num_fitting >= request.num_workers:
        return
    raise ClusterRequestError(
        "\n".join(
            [
                f"scaling: the cluster can hold {num_fitting} of {_workers(request.num_workers)}",
                f"  asked for: {request.num_workers} x {{{_describe_worker(request)}}}, {request.strategy}",
                f"  there is: {_describe_nodes(nodes, request)}",
                f"  {_advice(request, nodes, num_fitting)}",
            ]
        )
    )


def count_fitting(request: WorkerRequest, nodes: Sequence[NodeCapacity]) -> int:
    """How many of the request's workers these nodes hold at once when nothing else runs on them."""
    per_node = [_fitting_on(request, node) for node in nodes]
    if request.strategy == "STRICT_PACK":
        return max(per_node, default=0)
    if request.strategy == "STRICT_SPREAD":
        return sum(count > 0 for count in per_node)
    return sum(per_node)


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether a node with `labels` satisfies every condition of a Ray label selector."""
    for name, condition in selector.items():
        value = labels.get(name)
        found = _ANY_OF.match(condition)
        if found:
            values = [each.strip() for each in found["values"].split(",")]
            holds = (value in values) != bool(found["no"])
        elif condition.startswith("!"):
            holds = value != condition[1:]
        else:
            holds = value == condition
        if not holds:
            return False
    return True


def _fitting_on(request: WorkerRequest, node: NodeCapacity) -> int:
    if not matches(request.labels, node.labels):
        return 0
    if request.accelerator_type and not _has_accelerator(node, request.accelerator_type):
        return 0
    if not request.resources:
        return request.num_workers
    return int(
        min(node.resources.get(name, 0) / amount + _EPSILON for name, amount in request.resources.items())
    )


def _has_accelerator(node: NodeCapacity, accelerator_type: str) -> bool:
    return f"accelerator_type:{accelerator_type}" in node.resources


def _describe_worker(request: WorkerRequest) -> str:
    parts = [f"{name}: {_amount(name, amount)}" for name, amount in request.resources.items()]
    if request.accelerator_type:
        parts.append(f"accelerator_type: {request.accelerator_type}")
    parts += [f"label {name}: {condition}" for name, condition in request.labels.items()]
    return ", ".join(parts)


def _describe_nodes(nodes: Sequence[NodeCapacity], request: WorkerRequest) -> str:
    names = dict.fromkeys(["CPU", "GPU", *request.resources])
    totals = {name: sum(node.resources.get(name, 0) for node in nodes) for name in names}
    text = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} with "
    text += ", ".join(f"{name}: {_amount(name, total)}" for name, total in totals.items())
    types = sorted(
        {
            name.split(":", 1)[1]
            for node in nodes
            for name in node.resources
            if name.startswith("accelerator_type:")
        }
    )
    if request.accelerator_type:
        text += f", accelerator types: {', '.join(types) or 'none'}"
    for name in request.labels:
        values = sorted({node.labels[name] for node in nodes if name in node.labels})
        text += f", label {name}: {', '.join(values) or 'none'}"
    return text


def _advice(request: WorkerRequest, nodes: Sequence[NodeCapacity], num_fitting: int) -> str:
    if num_fitting:
        return f"write scaling.num_workers: {num_fitting}, ask for less per worker, or add nodes (ray.wait)"
    if request.accelerator_type and not any(
        _has_accelerator(node, request.accelerator_type) for node in nodes
    ):
        return "write another scaling.accelerator_type, or leave it out"
    if request.labels and not any(matches(request.labels, node.labels) for node in nodes):
        return "no node satisfies scaling.label_selector: change it, or leave it out"
    for name, amount in request.resources.items():
        most = max((node.resources.get(name, 0) for node in nodes), default=0)
        if most + _EPSILON < amount:
            key = {"CPU": "cpus_per_worker", "GPU": "gpus_per_worker"}.get(
                name, f"resources_per_worker.{name}"
            )
            value = _amount(name, most, plain=True)
            return f"no node has that much {name}: write scaling.{key}: {value} or less"
    return "no single node has all of it: ask for less per worker"


def _amount(name: str, amount: float, plain: bool = False) -> str:
    if name == "memory" and not plain:
        return f"{amount / 2**30:.1f} GiB"
    return f"{amount:g}" if amount != int(amount) else str(int(amount))


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
