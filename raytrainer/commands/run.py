"""`run`: train what a config describes."""

from __future__ import annotations

from typing import Annotated

import typer

from raytrainer.commands.options import ConfigArgument, OverridesArgument


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
