"""`launch`: run a script that was written for torchrun."""

from __future__ import annotations

from typing import Annotated

import typer


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
