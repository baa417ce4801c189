"""Whether a config continues what a run directory holds; from the manifests alone, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raytrainer.config import difference
from raytrainer.errors import ConfigError, ResumeError
from raytrainer.manifest import list_checkpoints

if TYPE_CHECKING:
    from raytrainer.config import Config
    from raytrainer.result import Result
    from raytrainer.rundir import RunDirectory

DATA_LENGTH = "data.train.length"
_NUMERICS = "numerics."  # what only a rank knows of: see `raytrainer.numerics`
_MICRO_BATCH_SIZE = "data.micro_batch_size"


def finished_result(config: Config, run_dir: RunDirectory) -> Result | None:
    """The earlier result when the run has already come as far as `config` says."""
    last = run_dir.last_result
    if last is None or last.status != "finished" or last.target != config.training.target:
        return None
    return last


def continued(config: Config, run_dir: RunDirectory) -> Config:
    """`config` as it continues the run directory: with the microbatch that the run began with, if left open.

    Raises ResumeError, with the difference, when the newest checkpoint means something else.
    """
    infos = list_checkpoints(run_dir.storage)
    if not infos:
        return config
    before = infos[-1].meaning
    known_to_ranks = {
        key: value for key, value in before.items() if key == DATA_LENGTH or key.startswith(_NUMERICS)
    }
    now = {**config.meaning(), **known_to_ranks}
    begun_with = before.get(_MICRO_BATCH_SIZE)
    keeps = config.micro_batch_size_is_default and begun_with not in (None, config.data.micro_batch_size)
    check_same_meaning(run_dir.root, before, {**now, _MICRO_BATCH_SIZE: begun_with} if keeps else now)
    if keeps:
        try:
            config = config.with_overrides(f"{_MICRO_BATCH_SIZE}={begun_with}")
        except ConfigError as error:
            raise ResumeError(
                f"{run_dir.root} was begun with {_MICRO_BATCH_SIZE}: {begun_with}, which is kept\n"
                f"  {error.problems[0].rule}"
            ) from error
    return config


def check_same_meaning(root: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises ResumeError when a checkpoint made under `before` is not what `now` goes on with."""
    changed = difference(before, now)
    if changed and all(line.startswith(_NUMERICS) for line in changed):
        lines = "\n".join(f"  {line}" for line in changed)
        raise ResumeError(
            f"{root} was begun with training.determinism: bitwise, on a node that computes other bits:\n"
            f"{lines}\n"
            "  go on with it on such a node, with as many threads a kernel (training.intra_op_threads);\n"
            "  or give this run another name (name=...), or start over with --fresh, which keeps the old one"
        )
    if changed:
        lines = "\n".join(f"  {line}" for line in changed)
        raise ResumeError(
            f"{root} was begun with another config:\n{lines}\n"
            "  give this run another name (name=...), or start over with --fresh, which keeps the old one"
        )
