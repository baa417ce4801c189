"""The command line of `raytrainer`: the commands are in `raytrainer.commands`, a module for each group.

Their heavy imports are inside them, so that `--help` and `validate` load neither torch nor ray.
"""

from __future__ import annotations

from typing import Annotated

import typer

import raytrainer
from raytrainer.commands import configs, finished, launch, pack, run

app = typer.Typer(
    name="raytrainer",
    help="Trains PyTorch models on Ray from one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


# In the order in which --help lists them.
app.command()(run.run)
app.command(context_settings={"allow_interspersed_args": False})(launch.launch)
app.command()(pack.pack)
app.command()(configs.validate)
app.command()(configs.schema)
app.command("eval")(finished.evaluate)
app.command()(finished.predict)
app.command()(finished.export)
app.command()(finished.runs)
app.command()(finished.audit)
app.command()(configs.init)
