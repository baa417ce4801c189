"""`eval`, `predict`, `export`, `runs` and `audit`: what comes after training."""

from __future__ import annotations

from typing import Annotated

import typer

from raytrainer.commands.options import CheckpointOption, JsonOption, RunDirArgument


def evaluate(
    run_dir: RunDirArgument,
    config_and_overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|KEY=VALUE",
            help="A YAML file in place of the run's own config; values in place of the config's.",
        ),
    ] = None,
    checkpoint: CheckpointOption = "best",
    as_json: JsonOption = False,
) -> None:
    """Evaluate a checkpoint, in this process.

    The data is the evaluation data of the run's own config, or of CONFIG.
    """
    from raytrainer.reports import evaluation_report

    typer.echo(evaluation_report(run_dir, config_and_overrides or [], checkpoint, as_json))


def predict(
    run_dir: RunDirArgument,
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Image files.")],
    checkpoint: CheckpointOption = "best",
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Classes to show for each file.")] = 3,
    as_json: JsonOption = False,
) -> int:
    """Predict the classes of image files.

    The images are prepared as the evaluation data is, without augmentation.
    """
    from raytrainer.reports import print_predictions

    return print_predictions(run_dir, files, checkpoint, top_k, as_json)


def export(
    run_dir: RunDirArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write to.")],
    checkpoint: CheckpointOption = "best",
    format: Annotated[
        str, typer.Option("--format", metavar="safetensors|torch-export|both", help="What to write.")
    ] = "both",
) -> None:
    """Write the model to OUT, to be loaded without raytrainer."""
    from raytrainer.reports import export_report

    typer.echo(export_report(run_dir, out, checkpoint, format))


def runs(
    storage_path: Annotated[
        str, typer.Argument(metavar="STORAGE_PATH", help="Where the run directories are.")
    ] = "runs",
    as_json: JsonOption = False,
) -> None:
    """List the runs under STORAGE_PATH, the latest active first."""
    from raytrainer import runs as listing
    from raytrainer.table import as_table

    found = listing.list_runs(storage_path)
    if as_json:
        typer.echo(listing.as_json(found))
    elif not found:
        typer.echo(f"no runs under {storage_path}")
    else:
        typer.echo(as_table(["NAME", "STATUS", "STEPS", "BEST", "TIME", "AGE"], listing.as_rows(found)))


def audit(run_dir: RunDirArgument) -> int:
    """Check from RUN_DIR's ledger that each finished epoch saw each sample exactly once."""
    from raytrainer.audit import audit_run

    found = audit_run(run_dir)
    typer.echo(str(found))
    return 0 if found.exact else 1
