"""From a placed trial to all that its machine needs to start it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from raytrainer.cluster.pack_process import METRICS_FILE, TrialStart
from raytrainer.pack.machines import MachineFacts, PackSettings, share_on
from raytrainer.pack.plan import Node, Placement
from raytrainer.pack.share import Share, trial_environment
from raytrainer.pack.trials import RUN_NAME, TRIAL_DIR, Trial
from raytrainer.storage import Storage


def make_folder(storage: Storage, trial: Trial) -> None:
    """The trial's directory in `storage`, with the config that it runs."""
    storage.make_folder(trial.name)
    if trial.config_yaml is not None:
        # Each trial's run directory is its own.
        text = trial.config_yaml.replace(TRIAL_DIR, storage.path(trial.name))
        storage.write(f"{trial.name}/config.yaml", text.encode())


def trial_start(
    trial: Trial,
    placement: Placement,
    nodes: list[Node],
    machines: Mapping[str, MachineFacts],
    settings: PackSettings,
    storage: Storage,
) -> tuple[TrialStart, Share]:
    """How the trial is started at its place, and its part of that machine."""
    share = share_on(placement, nodes, machines)
    trial_dir = os.path.abspath(storage.path(trial.name))
    environment = trial_environment(os.environ, placement, share, settings.env, trial_dir)
    if settings.python_path:
        paths = [*settings.python_path, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    run_dir = f"{trial_dir}/{RUN_NAME}" if trial.config_yaml is not None else trial_dir
    start = TrialStart(
        trial=trial.index,
        command=(*trial.argv(trial_dir), *_loader_override(trial, share)),
        environment=environment,
        directory=os.getcwd(),
        trial_dir=trial_dir,
        metrics_file=f"{run_dir}/{METRICS_FILE}",
        rss_cap_gib=share.rss_cap_gib,
        timeout_s=trial.timeout_s or settings.timeout_s,
        log_bytes=int(settings.log_mib * 2**20),
        mps=settings.mps and placement.device != "",
    )
    return start, share


def _loader_override(trial: Trial, share: Share) -> list[str]:
    """A config's loader has no more workers than the trial's part of the cores allows."""
    if trial.loader_workers is None or trial.loader_workers <= share.loader_workers:
        return []
    return [f"data.loader.num_workers={share.loader_workers}"]
