"""`validate`, `schema` and `init`: a config before it runs."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from raytrainer.commands.options import ConfigArgument, OverridesArgument


def validate(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also import the targets, check their arguments and read the data's length."
        ),
    ] = False,
) -> None:
    """Check CONFIG and print it as it will run, defaults filled in."""
    from raytrainer.config import add_importable, load_config

    loaded = load_config(config, overrides or ())
    typer.echo(loaded.stored_yaml(), nl=False)
    if deep and loaded.script is not None:
        from raytrainer.cluster.script_file import find_script

        find_script(loaded.script, os.getcwd(), loaded.source_path)
    elif deep:
        add_importable(loaded)
        from raytrainer.preflight import deep_report

        typer.echo(deep_report(loaded))


def schema() -> None:
    """Print the config's JSON Schema, for editors."""
    import json

    from raytrainer.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The folder to create, and the run's name.")],
) -> None:
    """Create a project folder: a config, a model and its data, a test."""
    from raytrainer.new_project import create_project

    for path in create_project(name):
        typer.echo(f"created {path}")
    typer.echo(f"next: cd {name} && raytrainer run config.yaml")
