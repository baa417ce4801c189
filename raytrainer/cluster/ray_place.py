"""Each rank's environment on Ray: what torchrun would set, its cards, its share of the cores; pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """A rank and the process that Ray gave it. gpu_ids: the cards that Ray reserved for it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_ip: str
    pid: int
    port: int
    gpu_ids: tuple[str, ...] = ()
    node_id: str = ""

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """The fields of `worker.Place`."""
        return self.rank, self.world_size, self.local_rank, self.local_world_size, self.node_rank

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.node_ip}"


def rank_environments(places: Sequence[RankPlace], attempt: int) -> list[dict[str, str]]:
    """Variables for each rank, in rank order; rank 0's process serves the store at MASTER_ADDR."""
    num_nodes = len({place.node_ip for place in places})
    return [
        {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            "GROUP_RANK": str(place.node_rank),
            "GROUP_WORLD_SIZE": str(num_nodes),
            "MASTER_ADDR": places[0].node_ip,
            "MASTER_PORT": str(places[0].port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "CUDA_VISIBLE_DEVICES": ",".join(visible_gpus(place, places)),
        }
        for place in places
    ]


def visible_gpus(place: RankPlace, places: Sequence[RankPlace]) -> list[str]:
    """The cards that rank `place` sees; none where it asked for none.

    With one card a rank it sees all of its node's ranks, so that cuda:LOCAL_RANK is its own and ranks can
    reach each other's memory; otherwise its own alone.
    """
    if len(place.gpu_ids) != 1:
        return list(place.gpu_ids)
    local = sorted(
        (each for each in places if each.node_rank == place.node_rank), key=lambda each: each.local_rank
    )
    return [gpu for each in local for gpu in each.gpu_ids]


def thread_environment(
    environment: Mapping[str, str], *, cpus_per_worker: float, num_workers: int, machine_is_ours: bool
) -> dict[str, str]:
    """OMP_NUM_THREADS for the ranks: the driver's own, else what each reserved.

    On a Ray of the run's own, where nothing else runs, it is the share of the machine, as in the local
    backend.
    """
    if "OMP_NUM_THREADS" in environment:
        return {"OMP_NUM_THREADS": environment["OMP_NUM_THREADS"]}
    if not machine_is_ours:
        return {"OMP_NUM_THREADS": str(max(1, int(cpus_per_worker)))}
    from raytrainer.cluster.worker import usable_cores

    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // num_workers))}


def importable_paths(import_paths: Sequence[str]) -> list[str]:
    """Folders for the end of a worker's sys.path: raytrainer's own, then the user's."""
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [package_root, *import_paths]
