"""What a rank's loss on Ray means, and whether to start the group again; pure, knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrainer.cluster.outcome import RankFailure, choose_cause, is_retryable

_OUT_OF_MEMORY = ("running low on memory", "memory usage threshold", "OOM killer", "memory monitor")


@dataclass(frozen=True)
class Retries:
    """num_failures: in a row, with no newly committed step in between; step: the last committed one."""

    step: int | None = None
    num_failures: int = 0


@dataclass(frozen=True)
class Verdict:
    """cause: what the other failures follow from; retry: start again; retries: the count from now on."""

    cause: RankFailure
    retry: bool
    retries: Retries


def judge(
    failures: Sequence[RankFailure], retries: Retries, *, step: int | None, stopping: bool, max_failures: int
) -> Verdict:
    """Whether a group that ended with `failures` is started again.

    step: the step that a new start would resume at; stopping: somebody asked for a stop; max_failures:
    allowed in a row without progress, -1 for no limit. Only a lost process, node or connection is worth it.
    """
    cause = choose_cause(failures)
    count = 1 if step != retries.step else retries.num_failures + 1
    allowed = max_failures < 0 or count <= max_failures
    return Verdict(cause, is_retryable(cause) and allowed and not stopping, Retries(step, count))


def describe_loss(
    rank: int, ray_message: str, where: str, memory_gib: float | None, time_s: float
) -> RankFailure:
    """The failure of a rank whose process Ray found dead.

    ray_message: of Ray's error; where: "pid 7 on 10.0.0.2"; memory_gib: the rank's peak resident size;
    time_s: now.
    """
    size = f" at a resident size of {memory_gib:.1f} GiB" if memory_gib is not None else ""
    if "node has died" in ray_message or "NODE_DIED" in ray_message:
        message = f"its node died ({where})"
    elif "unexpectedly exits with a connection error" in ray_message:
        message = (
            f"its process ({where}) died without a word{size}: killed by SIGKILL (-9: probably the host ran"
            " out of memory, or someone ran kill -9), or a fault in native code; its log file may say more"
        )
    elif any(sign in ray_message for sign in _OUT_OF_MEMORY):
        message = f"Ray killed its process ({where}){size}: the node was running out of memory"
    else:
        message = f"its process ({where}) was lost{size}: {_first_line(ray_message)}"
    return RankFailure(rank, "lost", message=message, rss_gib=memory_gib, time=time_s)


def describe_failed_start(ray_message: str, time_s: float) -> RankFailure:
    """The failure of a group whose processes did not all start."""
    return RankFailure(
        0, "lost", message=f"a worker process did not start: {_first_line(ray_message)}", time=time_s
    )


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Ray puts a heading and the actor's identity before the reason.
    told = [
        line for line in lines if not line.startswith(("class_name:", "actor_id:", "pid:", "name", "ip:"))
    ]
    return told[1] if len(told) > 1 else (told or ["no reason given"])[0]
