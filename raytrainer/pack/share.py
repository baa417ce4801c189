"""Each trial's part of a machine: memory, threads, loader workers, and the variables that say so; pure.

The parts stay as they are for a trial's life: the number of threads is part of its result, to the bit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from raytrainer.pack.plan import Placement

# Of the host's memory, for the system and the driver.
HOST_RESERVE = 0.1
# What a process takes on a card before the first tensor, and what stays free there.
CUDA_CONTEXT_GIB = 0.5
CUDA_RESERVE_GIB = 0.5
# What the batches on their way take of /dev/shm, for each loader worker; Docker gives a container 64 MiB.
SHM_PER_LOADER_WORKER_GIB = 0.0625
# The first torch whose allocator reads the fraction from its environment; an older one refuses the word.
_FRACTION_SINCE = (2, 10)
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)
# Of a launcher around this one: a trial is none of its ranks.
_NOT_PASSED_ON = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_\w+|RAY_JOB_ID|RAY_RAYLET_PID|RAY_LD_PRELOAD_ON_WORKERS)$"
)


@dataclass(frozen=True)
class Share:
    """loader_workers: how many a trial's loader should start at most; cuda_fraction: None without a GPU or
    without a torch that reads it; rss_cap_gib: of the host's memory, for all processes of the trial."""

    loader_workers: int
    rss_cap_gib: float
    cuda_fraction: float | None = None


def host_budget_gib(total_gib: float) -> float:
    """What all trials of a machine may take together."""
    return total_gib * (1 - HOST_RESERVE)


def card_budget_gib(total_gib: float, slots: int) -> float:
    """What the tensors of `slots` trials may take of a GPU together."""
    return max(0.0, total_gib - slots * CUDA_CONTEXT_GIB - CUDA_RESERVE_GIB)


def loader_workers(threads: int) -> int:
    """Loader workers of a trial with so many cores: they and the trial itself share them."""
    return max(1, threads - 1)


def share_of(
    placement: Placement, *, card_total_gib: float | None, host_share_gib: float, torch_version: str | None
) -> Share:
    """card_total_gib: the whole card's memory, None for a CPU, where the placement's cap is the host's."""
    workers = loader_workers(placement.threads)
    if card_total_gib is None:
        return Share(workers, placement.memory_gib)
    fraction = min(1.0, placement.memory_gib / card_total_gib)
    return Share(workers, host_share_gib, fraction if reads_fraction(torch_version) else None)


def reads_fraction(torch_version: str | None) -> bool:
    """Whether that torch's allocator takes a process's part of a card from its environment."""
    match = re.match(r"(\d+)\.(\d+)", torch_version or "")
    return match is not None and (int(match[1]), int(match[2])) >= _FRACTION_SINCE


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what a launcher, or Ray, has set for the process itself."""
    return {name: value for name, value in environment.items() if not _NOT_PASSED_ON.match(name)}


def trial_environment(
    environment: Mapping[str, str],
    placement: Placement,
    share: Share,
    own: Mapping[str, str],
    trial_dir: str,
) -> dict[str, str]:
    """A trial's variables. environment: the driver's; own: what the trials' `env` says, which comes last."""
    names = passed_on(environment)
    names.update(dict.fromkeys(_THREAD_VARIABLES, str(placement.threads)))
    # Always: without it a process sees all cards.
    names["CUDA_VISIBLE_DEVICES"] = placement.device
    names["RAYTRAINER_TRIAL"] = str(placement.trial)
    names["RAYTRAINER_TRIAL_DIR"] = trial_dir
    names["RAYTRAINER_LOADER_WORKERS"] = str(share.loader_workers)
    names.setdefault("PYTHONUNBUFFERED", "1")
    if share.cuda_fraction is not None:
        before = names.get("PYTORCH_CUDA_ALLOC_CONF") or names.get("PYTORCH_ALLOC_CONF") or ""
        kept = [each for each in before.split(",") if each and "per_process_memory_fraction" not in each]
        setting = f"per_process_memory_fraction:{share.cuda_fraction:.4f}"
        names["PYTORCH_CUDA_ALLOC_CONF"] = ",".join([*kept, setting])
        names.pop("PYTORCH_ALLOC_CONF", None)
    names.update(own)
    return names


def usable_cores(cpu_max: str | None = None) -> int:
    """The cores that this process may use: its affinity, further limited by a cgroup's quota.

    cpu_max: the text of the cgroup's `cpu.max`, "max 100000" or "200000 100000".
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (cpu_max or "max").partition(" ")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period or 100_000)))


def shm_notice(free_gib: float | None, num_trials: int, workers: int, shm_gib: float | None) -> str | None:
    """A warning where /dev/shm is smaller than what the loaders of all trials at once will need.

    free_gib: None where there is none; shm_gib: a trial's need, None: estimated from its loader workers.
    """
    need_gib = num_trials * (workers * SHM_PER_LOADER_WORKER_GIB if shm_gib is None else shm_gib)
    if free_gib is None or need_gib <= free_gib:
        return None
    return (
        f"/dev/shm has {free_gib:.2f} GiB free, and the loaders of {num_trials} trials may need "
        f"{need_gib:.2f} GiB: pack fewer, use fewer loader workers, or enlarge it (docker run --shm-size)"
    )
