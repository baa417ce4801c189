"""`pack`: several trials on each card."""

from __future__ import annotations

from typing import Annotated

import typer


def pack(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TRIALS.yaml [KEY=VALUE]... | -n N -- COMMAND...",
            help="A file of trials, or, after --, a command to start N times.",
        ),
    ] = None,
    num_trials: Annotated[
        int | None, typer.Option("-n", "--num-trials", metavar="N", help="How often to start COMMAND.")
    ] = None,
    per_gpu: Annotated[
        str | None, typer.Option("--per-gpu", metavar="K|auto", help="Trials on a card at once.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="No Ray: this machine's cards alone.")] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", metavar="S", help="Seconds after which a trial is hung.")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", metavar="GIB", help="A trial's memory cap.")
    ] = None,
    process_args: Annotated[
        bool, typer.Option("--process-args", help="Also give --process_index I --process_num N.")
    ] = False,
    name: Annotated[str | None, typer.Option("--name", help="Name of the search's directory.")] = None,
    storage_path: Annotated[
        str | None, typer.Option("--storage-path", metavar="FOLDER", help="Where that directory is.")
    ] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="The Ray cluster; RAY_ADDRESS or one of its own.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="DIR", help="Run what has not finished there.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Ray's own messages too.")] = False,
) -> int:
    """Run several trials on each card, none of which can take another down."""
    from raytrainer.pack_options import Options, run_pack

    return run_pack(
        Options(
            tuple(what or ()),
            num_trials=num_trials,
            per_gpu=per_gpu,
            local=local,
            timeout_s=timeout_s,
            memory_gib=memory_gib,
            process_args=process_args,
            name=name,
            storage_path=storage_path,
            address=address,
            resume=resume,
            dry_run=dry_run,
            verbose=verbose,
        )
    )
