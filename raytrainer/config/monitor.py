"""Names of metrics that can be monitored, and which way is better."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from raytrainer.config.section import Broken
from raytrainer.config.suggest import nearest

Mode = Literal["max", "min"]


def default_mode(monitor: str | None) -> Mode | None:
    """`min` for a loss; for any other metric the config must say."""
    return "min" if monitor in ("eval/loss", "train/loss") else None


def broken_mode(monitor: str | None, mode: Mode | None) -> Iterator[Broken]:
    """A monitored metric, not a loss, for which nobody says whether larger is better."""
    if monitor is not None and mode is None:
        yield Broken(
            ("mode",),
            f"is needed: is a larger or a smaller {monitor} better?",
            "write mode: max, or mode: min",
        )


def broken_monitor(
    monitor: str | None, path: tuple[str | int, ...], metrics: list[str], has_eval: bool, has_task: bool
) -> Iterator[Broken]:
    """A monitor that no part of the run will ever give. A task may add metrics of its own, so it is "
    "believed."""
    if monitor is None:
        return
    known = [f"eval/{name}" for name in (*metrics, "loss")] + ["train/loss"]
    near = nearest(monitor, known) or next((k for k in known if k.endswith("/" + monitor)), known[0])
    if not re.fullmatch(r"eval/.+|train/loss", monitor):
        rule = "must be eval/<metric>, eval/loss or train/loss"
        yield Broken(path, rule, f"write {near}")
    elif monitor.startswith("eval/") and not has_eval:
        yield Broken(
            path, "needs evaluation data, and data.eval is not given", "add data.eval, or use train/loss"
        )
    elif monitor not in known and not has_task:
        yield Broken(
            path,
            f"no such metric: there are {', '.join(known)}",
            f"write {near}, or add {monitor.removeprefix('eval/')} to metrics",
        )
