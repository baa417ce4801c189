"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values in place of the file's: optimizer.lr=3e-4"),
]
RunDirArgument = Annotated[
    str, typer.Argument(metavar="RUN_DIR", help="<storage_path>/<name>, as in runs/mnist.")
]
CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", metavar="best|last|step_XXXXXXXX", help="Which checkpoint to take.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
