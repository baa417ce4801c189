"""What else decides the bits of a result than config and data: kernels, their threads, the kind of node."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from raytrainer.distributed import Process, broadcast_object, gather_objects
from raytrainer.errors import ClusterRequestError, ConfigError, Problem

if TYPE_CHECKING:
    from raytrainer.config import Config

_NO_DETERMINISTIC_FORM = re.compile(r"(\S+) does not have a deterministic implementation")


def numerics_of(config: Config, device: torch.device) -> dict[str, Any]:
    """This rank's part of what a checkpoint means under `determinism: bitwise`; nothing otherwise."""
    if config.training.determinism != "bitwise":
        return {}
    facts = {
        "torch": str(torch.__version__),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "intra_op_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"], facts["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    return {f"numerics.{name}": value for name, value in facts.items()}


def refuse_unlike_ranks(numerics: dict[str, Any], process: Process) -> None:
    """Raises ClusterRequestError, on every rank, when the ranks do not all compute alike."""
    gathered = gather_objects(numerics, process)
    unlike = [
        f"  {key}: {gathered[0][key]} on rank 0, {other.get(key)} on rank {rank}"
        for rank, other in enumerate(gathered)
        for key in gathered[0]
        if other.get(key) != gathered[0][key]
    ]
    unlike = broadcast_object(unlike, process.world_size)
    if unlike:
        raise ClusterRequestError(
            "training.determinism = bitwise\n"
            "  the ranks are on nodes of different kinds, which do not compute the same bits:\n"
            + "\n".join(unlike[:6])
            + "\n  choose nodes of one kind (scaling.label_selector, scaling.accelerator_type), "
            "or write determinism: order"
        )


@contextlib.contextmanager
def kernels_as_configured(config: Config, device: torch.device) -> Iterator[None]:
    """Inside, torch computes as `training` asks for; outside, everything is as before.

    Raises ConfigError inside when something has no deterministic form under `determinism: bitwise`.
    """
    training = config.training
    with contextlib.ExitStack() as settings:
        if training.tf32:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        if training.determinism != "bitwise":
            yield
            return
        settings.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.intra_op_threads)
        if training.compile and device.type == "cuda":
            _refuse_unsteady_compiler()
        settings.enter_context(_deterministic_kernels(device, compiled=bool(training.compile)))
        try:
            yield
        except RuntimeError as error:
            found = _NO_DETERMINISTIC_FORM.search(str(error))
            if found is None:
                raise
            raise _no_deterministic_form(found[1]) from error


@contextlib.contextmanager
def _deterministic_kernels(device: torch.device, compiled: bool) -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filling = torch.utils.deterministic.fill_uninitialized_memory
    cudnn = torch.backends.cudnn.benchmark
    if device.type == "cuda":
        # Read when cuBLAS starts, and by torch before each product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # torch's own function also tells the compiler, whose import alone takes seconds.
    set_mode = torch.use_deterministic_algorithms if compiled else torch._C._set_deterministic_algorithms
    set_mode(True, warn_only=False)
    # Filling would only matter to a kernel that reads memory that nobody wrote, and costs a pass over it.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        set_mode(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filling
        torch.backends.cudnn.benchmark = cudnn


def _refuse_unsteady_compiler() -> None:
    """Without its deterministic mode the compiler chooses among GPU kernels by their measured time."""
    import torch._inductor.config

    if not hasattr(torch._inductor.config, "deterministic"):
        rule = f"torch {torch.__version__} compiles for a GPU by measured times, in each process anew"
        fix = "leave out compile, or write determinism: order"
        raise ConfigError(Problem("config", "training.compile", rule, fix=fix))


def _no_deterministic_form(operation: str) -> ConfigError:
    return ConfigError(
        Problem(
            "config",
            "training.determinism",
            f"{operation} has no deterministic form in torch {torch.__version__}",
            "bitwise",
            "use another operation in the model or the task, or write determinism: order",
        )
    )


def _cpu_model() -> str:
    """The model, since libraries choose kernels and block sizes by more than the instruction set."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("model name", "CPU implementer", "CPU part")
    lines = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    found = [value.strip() for name, value in lines.items() if name.strip() in names]
    return " ".join(found) or platform.machine()
