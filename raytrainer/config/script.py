"""`script`: a script of the user's own, launched as torchrun would, in place of a model and data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from raytrainer.config.section import Broken, OptionalText, Section, Text


class ScriptSection(Section):
    """A script of your own that calls `init_process_group` itself, in place of a model and data."""

    path: Text = Field(
        description="The script, or with `module` the dotted name of a module; relative to the working "
        "directory, else to the YAML's folder.",
        examples=["train.py"],
    )
    args: list[Text] = Field([], description="Its arguments.", examples=[["--epochs", "3"]])
    module: bool = Field(False, description="Run it as `python -m` does.")
    env: dict[str, Text | None] = Field(
        {},
        description="Environment variables of the script; `${oc.env:NAME}` takes one from where the command "
        "runs without storing its value, null removes one.",
        examples=[{"NCCL_DEBUG": "INFO"}],
    )
    working_dir: OptionalText = Field(
        None,
        description="The folder to run in; null: where the command was given.",
        examples=["/shared/project"],
    )
    tee: Literal["rank0", "all"] = Field(
        "rank0",
        description="Whose output is shown: rank 0's as it is, or everybody's, each line with `[rank=N]`. "
        "Everybody's is in `logs/rank_N.log`.",
    )
    local_rank_arg: Literal["none", "--local-rank", "--local_rank"] = Field(
        "none",
        description="Also give the local rank as an argument, `--local_rank=N`, as older launchers do.",
    )
    process_args: bool = Field(
        False, description="Also give `--process_index I --process_num N` (the rank and the world size)."
    )
    rank_env: bool = Field(
        True,
        description="Set the variables of a distributed run. false, with one worker: the script must not "
        "look distributed.",
    )
    master_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="MASTER_PORT; null: a free one, kept for the run on rank 0's node.",
        examples=[29500],
    )
    min_workers: int | None = Field(
        None,
        ge=1,
        description="The script may start, and start again after a loss, with fewer than "
        "`scaling.num_workers` workers, down to this many; null: always with all.",
    )

    def broken_rules(self) -> Iterator[Broken]:
        if not self.path.strip():
            yield Broken(("path",), "must not be empty", "write path: train.py")
        for name in self.env:
            if not name or "=" in name or "\0" in name:
                yield Broken(("env", name), "is not the name of an environment variable")
