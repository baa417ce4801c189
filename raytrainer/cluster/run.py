"""`raytrainer run`: takes the run directory, has the ranks train on Ray or as local processes, keeps the
result.

Runs in the process that the user started, which imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raytrainer.adopt import Source, checked_source, start_from
from raytrainer.cluster.outcome import Outcome, to_error
from raytrainer.cluster.signals import EXIT_CODES, StopSignal, stop_on_signals
from raytrainer.config import importable
from raytrainer.console import Console
from raytrainer.errors import RaytrainerError, UsageError
from raytrainer.manifest import FOLDER, list_checkpoints
from raytrainer.result import Result
from raytrainer.resume import continued, finished_result
from raytrainer.rundir import RunDirectory
from raytrainer.snapshots import recover, snapshot_folder
from raytrainer.step_mark import last_marked_step

if TYPE_CHECKING:
    from raytrainer.cluster.sizes import SizeSource
    from raytrainer.config import Config

Observer = Callable[[dict[str, Any]], None]


def run(
    config: Config,
    *,
    local: bool = False,
    fresh: bool = False,
    resume_from: str | None = None,
    verbose: bool = False,
    observer: Observer | None = None,
    started_at: float | None = None,
    sizes: SizeSource | None = None,
) -> Result:
    """Trains what `config` describes, or goes on where an earlier run of the same name stopped.

    local: `scaling.num_workers` processes on this machine, without Ray. fresh: start over, with the old run
    directory moved aside. resume_from: a run directory or a checkpoint that a new run goes on from. observer:
    gets rank 0's records as they come. started_at: Unix time at which the command began. sizes: with local,
    how many workers there is room for, within scaling.num_workers; by default its max. A config with a
    `script` launches that instead. Returns the result of a run that finished or was stopped; raises what made
    it fail.
    """
    started_at = started_at or time.time()
    if config.script is not None:
        from raytrainer.cluster.launch import launch

        if resume_from is not None:
            raise UsageError(
                f"--resume-from {resume_from}\n"
                "  a script resumes by itself, from what it has saved\n"
                "  leave --resume-from out, and give the script an argument for it (script.args)"
            )
        return launch(config, local=local, fresh=fresh, verbose=verbose, observer=observer)
    source = None if resume_from is None else checked_source(resume_from, config)
    with RunDirectory.open(config, fresh=fresh) as run_dir:
        console = Console(enabled="console" in config.logging.sinks)
        try:
            if source is not None:
                console.say(_begin_from(source, run_dir))
            config = continued(config, run_dir)
            done = finished_result(config, run_dir)
            if done is not None:
                console.say(
                    f"{run_dir.root} is finished: step {done.steps}, {_in_words(done.metrics)}. "
                    "To train on, raise training.max_epochs; to start over, use --fresh."
                )
                return done
            recovered = _recover_or_forget(run_dir, fresh)
            if recovered is not None:
                console.say(
                    f"a snapshot of step {recovered} was left in this machine's memory: going on from it"
                )
                config = continued(config, run_dir)
            run_dir.write_description(config)
            return _Run(config, run_dir, console, observer, started_at, sizes).run(local, verbose)
        finally:
            console.close()


class _Run:
    """One attempt at a run, from its start to its result."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDirectory,
        console: Console,
        observer: Observer | None,
        started_at: float,
        sizes: SizeSource | None,
    ):
        self._config, self._run_dir, self._console = config, run_dir, console
        self._observer, self._started_at, self._sizes = observer, started_at, sizes
        self._stop = StopSignal()

    def run(self, local: bool, verbose: bool) -> Result:
        with (
            stop_on_signals(self._stop),
            self._stop.listening(self._acknowledge),
            contextlib.ExitStack() as at_end,
        ):
            at_end.callback(shutil.rmtree, snapshot_folder(self._run_dir.root), ignore_errors=True)
            try:
                outcome = self._on_this_machine() if local else self._on_ray(verbose)
            except RaytrainerError as error:
                self._keep(Outcome("failed", error.exit_code), str(error))
                raise
            if outcome.status != "finished":
                self._recover()
        error = to_error(outcome.failure) if outcome.failure is not None else None
        result = self._keep(outcome, str(error) if error else None)
        if error is not None:
            raise error
        self._console.say(_last_words(result, self._committed_step(), in_order=outcome.result is not None))
        return result

    def _acknowledge(self) -> None:
        """Runs in the signal handler, where Python's own streams must not be used."""
        if self._stop.requested not in EXIT_CODES:
            return  # a resize, say
        after_step = b"stopping after this step; once more stops at once\n"
        now = b"stopping now\n" if self._stop.immediate else after_step
        with contextlib.suppress(OSError):  # a closed terminal
            os.write(2, now)

    def _on_this_machine(self) -> Outcome:
        import psutil

        from raytrainer.cluster.local import check_local_request, run_local
        from raytrainer.cluster.sizes import Bounds, Slots
        from raytrainer.cluster.worker import usable_cores

        num_workers = self._config.scaling.max_workers
        notice = check_local_request(num_workers, usable_cores(), psutil.virtual_memory().total / 2**30)
        if notice:
            self._console.say(notice)
        storage = self._run_dir.storage
        log_dir = tempfile.mkdtemp(prefix="raytrainer-logs-") if storage.is_remote else storage.path("logs")
        scaling = self._config.scaling
        return run_local(
            self._payload(),
            scaling.max_workers,
            on_record=self._on_record,
            stop=self._stop,
            max_failures=self._config.failure.max_failures,
            log_dir=log_dir,
            committed_step=self._committed_step,
            recover=self._recover,
            sizes=self._sizes or Slots(scaling.max_workers),
            bounds=Bounds(scaling.min_workers, scaling.max_workers, self._config.num_microbatches),
        )

    def _on_ray(self, verbose: bool) -> Outcome:
        from raytrainer.cluster.ray_run import run_on_ray

        storage = self._run_dir.storage
        payload = self._payload()
        payload["log_dir"] = None if storage.is_remote else storage.path("logs")
        return run_on_ray(
            payload,
            self._config.scaling,
            self._config.ray,
            on_record=self._on_record,
            stop=self._stop,
            max_failures=self._config.failure.max_failures,
            storage_path=self._config.storage_path,
            name=self._config.name,
            verbose=verbose,
            committed_step=self._committed_step,
            recover=self._recover,
            num_microbatches=self._config.num_microbatches,
        )

    def _payload(self) -> dict[str, Any]:
        """What a rank needs. Values from the environment travel by name, and only where a rank lacks them."""
        names = self._config.env_names()
        return {
            "config": self._config.payload(),
            "run_dir": (self._run_dir.root, self._run_dir.token),
            "import_paths": importable(self._config),
            "env": {name: os.environ[name] for name in sorted(names) if name in os.environ},
            "started_at": self._started_at,
            "snapshot_dir": snapshot_folder(self._run_dir.root),
        }

    def _recover(self) -> None:
        """Where all ranks were lost, their last snapshot is better than the newest checkpoint."""
        recover(snapshot_folder(self._run_dir.root), self._run_dir)

    def _committed_step(self) -> int | None:
        infos = self._run_dir.while_there(lambda: list_checkpoints(self._run_dir.storage))
        return infos[-1].step if infos else None

    def _on_record(self, record: dict[str, Any]) -> None:
        if "event" in record and "time_s" not in record:  # from the backend; rank 0 writes its own
            details = {key: value for key, value in record.items() if key != "event"}
            record = self._run_dir.event(record["event"], **details)
        self._console.record(record)
        if self._observer is not None:
            self._observer(record)

    def _keep(self, outcome: Outcome, error: str | None) -> Result:
        """Writes and returns result.json; a failed attempt keeps what is known from the last commit."""
        infos = list_checkpoints(self._run_dir.storage)
        known: dict[str, Any] = dict(outcome.result or {})
        if not known:
            known = self._run_dir.history()
            known["steps"] = last_marked_step(self._run_dir.storage) or 0
        if infos and not outcome.result:
            known.update(epochs=infos[-1].epoch, metrics=infos[-1].metrics)
            known["steps"] = max(known["steps"], infos[-1].step)
            known["checkpoint"] = f"{FOLDER}/{infos[-1].name}"
        known.update(
            status=outcome.status,
            exit_code=outcome.exit_code,
            restarts=len(outcome.restarts),
            wall_s=round(time.time() - self._started_at, 3),
            target=self._config.training.target,
            error=error,
            run_dir=self._run_dir.root,
        )
        result = Result.from_mapping(known)
        self._run_dir.write_result(result)
        return result


def _recover_or_forget(run_dir: RunDirectory, fresh: bool) -> int | None:
    """Takes in what a killed driver's ranks have left in memory, unless the run starts over."""
    folder = snapshot_folder(run_dir.root)
    try:
        return None if fresh else recover(folder, run_dir)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _begin_from(source: Source, run_dir: RunDirectory) -> str:
    info = start_from(source, run_dir)
    if info is None:
        return f"{run_dir.root} has checkpoints of its own and goes on from them, not from {source.address}"
    return f"a new run from {source.address}: step {info.step} (epoch {info.epoch})"


def _last_words(result: Result, committed_step: int | None, in_order: bool) -> str:
    """in_order: rank 0 returned, rather than being ended."""
    if result.status == "stopped":
        if not in_order:
            place = "from the start" if committed_step is None else f"from step {committed_step}"
            return f"stopped at once; the same command goes on {place}"
        return f"stopped at step {result.steps}, saved; the same command goes on from there"
    best = ""
    if result.best:
        best = f"; best {result.best['metric']} {result.best['value']:.4g} at step {result.best['step']}"
    left_out = f"; {result.skipped_samples} samples left out" if result.skipped_samples else ""
    left_out += f"; {result.skipped_updates} updates left out" if result.skipped_updates else ""
    return (
        f"finished: {result.steps} steps, {_in_words(result.metrics)}{best}{left_out}\n"
        f"  {result.run_dir} in {result.wall_s:.1f} s"
    )


def _in_words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()) or "no metrics"


def command_started_at() -> float:
    """Unix time at which this process was started."""
    import psutil

    return psutil.Process().create_time()
