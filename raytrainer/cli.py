"""The commands of `raytrainer`. Heavy imports are inside them, so that `--help` and `validate` load neither
torch nor ray.
"""

from __future__ import annotations

from typing import Annotated

import typer

import raytrainer

app = typer.Typer(
    name="raytrainer",
    help="Trains PyTorch models on Ray from one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values in place of the file's: optimizer.lr=3e-4"),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"raytrainer {raytrainer.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Trains PyTorch models on Ray from one YAML file."""


@app.command()
def run(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    local: Annotated[
        bool, typer.Option("--local", help="No Ray: the workers are processes on this machine.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, beside the old run directory, instead of resuming.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Ray's own messages too.")] = False,
) -> int:
    """Train what CONFIG describes; the same command again resumes."""
    from raytrainer.config import add_importable, load_config

    loaded = load_config(config, overrides or ())
    add_importable(loaded)
    from raytrainer.cluster.run import run as run_on_cluster

    return run_on_cluster(loaded, local=local, fresh=fresh, verbose=verbose).exit_code


@app.command()
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
    if deep:
        add_importable(loaded)
        from raytrainer.preflight import deep_report

        typer.echo(deep_report(loaded))


@app.command()
def schema() -> None:
    """Print the config's JSON Schema, for editors."""
    import json

    from raytrainer.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
