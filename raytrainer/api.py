"""`raytrainer.run`, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

from raytrainer.config import Config, add_importable, load_config
from raytrainer.result import Result


def run(
    config: Config | str | PathLike[str] | dict[str, Any],
    *,
    overrides: Iterable[str] = (),
    local: bool = False,
    fresh: bool = False,
    resume_from: str | PathLike[str] | None = None,
    verbose: bool = False,
    observer: Callable[[dict[str, Any]], None] | None = None,
    **objects: Any,
) -> Result:
    """Trains on Ray, or with `local` as processes on this machine; the same as the command `raytrainer run`.

    config: a YAML file, nested dicts, or a Config. overrides: "optimizer.lr=3e-4" and such. objects: Python
    objects in place of targets, by section: `model=MyNet`, `task=MyTask()`, `train=dataset`, `eval=dataset`.
    resume_from: as `--resume-from`.
    observer: called with rank 0's metric records and events. Raises RaytrainerError when the run fails.
    """
    from raytrainer.cluster.run import run as run_config

    by_path = {
        {"train": "data.train", "eval": "data.eval"}.get(name, name): value for name, value in objects.items()
    }
    if isinstance(config, Config):
        if by_path or overrides:
            config = Config.from_mapping(config.payload()["mapping"], overrides, objects=by_path)
    elif isinstance(config, dict):
        config = Config.from_mapping(config, overrides, objects=by_path)
    else:
        config = load_config(config, overrides, objects=by_path)
    add_importable(config)
    return run_config(
        config,
        local=local,
        fresh=fresh,
        resume_from=None if resume_from is None else str(resume_from),
        verbose=verbose,
        observer=observer,
    )
