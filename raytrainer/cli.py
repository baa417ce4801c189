"""The commands of `raytrainer`. Heavy imports are inside them, so that `--help` and `validate` load neither
torch nor ray.
"""

from __future__ import annotations

import os
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
    typer.Argument(metavar="KEY=VALUE", help="Values in place of the file's: optimizer.lr=3e-4"),
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
    resume_from: Annotated[
        str | None,
        typer.Option(
            "--resume-from",
            metavar="RUN_DIR|CHECKPOINT",
            help="Begin a new run where this one's checkpoint stands: weights, optimizer and position.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for nodes to join while the Ray cluster is too small.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Ray's own messages too.")] = False,
) -> int:
    """Train what CONFIG describes; the same command again resumes."""
    from raytrainer.config import add_importable, load_config

    loaded = load_config(config, [*(overrides or ()), *(["ray.wait=true"] if wait else [])])
    add_importable(loaded)
    from raytrainer.cluster.run import run as run_on_cluster

    return run_on_cluster(
        loaded, local=local, fresh=fresh, resume_from=resume_from, verbose=verbose
    ).exit_code


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script; with -m a module's name.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments.")
    ] = None,
    num_workers: Annotated[
        str, typer.Option("-n", "--num-workers", metavar="N|MIN:MAX", help="How many processes.")
    ] = "1",
    module: Annotated[bool, typer.Option("-m", "--module", help="Run SCRIPT as python -m does.")] = False,
    local: Annotated[
        bool, typer.Option("--local", help="No Ray: the ranks are processes on this machine.")
    ] = False,
    cpus_per_worker: Annotated[
        float, typer.Option("--cpus-per-worker", metavar="C", min=0, help="CPU cores that each reserves.")
    ] = 1.0,
    gpus_per_worker: Annotated[
        str, typer.Option("--gpus-per-worker", metavar="auto|G", help="GPUs that each reserves.")
    ] = "auto",
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="R", min=0, help="New starts after a failure.")
    ] = 0,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="K=V|K", help="A variable for the script; K alone: as it is here."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the run directory; the script's by default.")
    ] = None,
    storage_path: Annotated[
        str, typer.Option("--storage-path", metavar="FOLDER", help="Where run directories are.")
    ] = "runs",
    working_dir: Annotated[
        str | None,
        typer.Option("--working-dir", metavar="FOLDER", help="The folder to run in, on all nodes."),
    ] = None,
    tee: Annotated[
        str, typer.Option("--tee", metavar="rank0|all", help="Whose output is shown; all: with [rank=N].")
    ] = "rank0",
    local_rank_arg: Annotated[
        str,
        typer.Option(
            "--local-rank-arg",
            metavar="none|--local-rank|--local_rank",
            help="Also give the local rank as an argument.",
        ),
    ] = "none",
    process_args: Annotated[
        bool, typer.Option("--process-args", help="Also give --process_index I --process_num N.")
    ] = False,
    no_rank_env: Annotated[
        bool, typer.Option("--no-rank-env", help="One worker that must not look distributed.")
    ] = False,
    master_port: Annotated[
        int | None, typer.Option("--master-port", metavar="PORT", help="MASTER_PORT; a free one by default.")
    ] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="The Ray cluster; RAY_ADDRESS or one of its own.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="PATTERN", help="What does not go along to other machines."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Ray's own messages too.")] = False,
) -> int:
    """Run SCRIPT, written for torchrun, in N processes, on Ray. Options come before SCRIPT."""
    from raytrainer.launch_options import config_of_options

    config = config_of_options(
        script,
        args or [],
        name=name,
        num_workers=num_workers,
        cpus_per_worker=cpus_per_worker,
        gpus_per_worker=gpus_per_worker,
        max_restarts=max_restarts,
        env=env or [],
        storage_path=storage_path,
        address=address,
        exclude=exclude or [],
        module=module,
        working_dir=working_dir,
        tee=tee,
        local_rank_arg=local_rank_arg,
        process_args=process_args,
        rank_env=not no_rank_env,
        master_port=master_port,
    )
    from raytrainer.cluster.launch import launch as launch_script

    return launch_script(config, local=local, verbose=verbose, any_name=name is None).exit_code


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
    if deep and loaded.script is not None:
        from raytrainer.cluster.script_file import find_script

        find_script(loaded.script, os.getcwd(), loaded.source_path)
    elif deep:
        add_importable(loaded)
        from raytrainer.preflight import deep_report

        typer.echo(deep_report(loaded))


@app.command()
def schema() -> None:
    """Print the config's JSON Schema, for editors."""
    import json

    from raytrainer.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


RunDirArgument = Annotated[
    str, typer.Argument(metavar="RUN_DIR", help="<storage_path>/<name>, as in runs/mnist.")
]
CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", metavar="best|last|step_XXXXXXXX", help="Which checkpoint to take.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("eval")
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


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def audit(run_dir: RunDirArgument) -> int:
    """Check from RUN_DIR's ledger that each finished epoch saw each sample exactly once."""
    from raytrainer.audit import audit_run

    found = audit_run(run_dir)
    typer.echo(str(found))
    return 0 if found.exact else 1


@app.command()
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The folder to create, and the run's name.")],
) -> None:
    """Create a project folder: a config, a model and its data, a test."""
    from raytrainer.new_project import create_project

    for path in create_project(name):
        typer.echo(f"created {path}")
    typer.echo(f"next: cd {name} && raytrainer run config.yaml")
