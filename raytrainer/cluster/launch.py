"""`raytrainer launch`: a script of the user's own in every rank, on Ray or in processes of this machine.

Runs in the process that the user started, which imports no torch.
"""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrainer.cluster import script_rank
from raytrainer.cluster.outcome import Outcome, RankFailure, is_retryable, to_error
from raytrainer.cluster.script_environment import num_threads
from raytrainer.cluster.script_file import find_script
from raytrainer.cluster.script_hub import ConsoleOutput, ScriptHub
from raytrainer.cluster.script_rank import ENTRY, exit_code_of
from raytrainer.cluster.signals import StopSignal, stop_on_signals
from raytrainer.console import Console
from raytrainer.errors import RaytrainerError, ResumeError, ScriptError
from raytrainer.result import Result
from raytrainer.rundir import RunDirectory

if TYPE_CHECKING:
    from raytrainer.config import Config

Observer = Callable[[dict[str, Any]], None]

# Imported by each worker while the others start; torch is the script's own business.
PRELOAD = ["raytrainer.cluster.ray_link", "raytrainer.cluster.script_rank"]
# What the user is told of, on standard error: standard output is the script's.
_SAID = ("worker_failed", "waiting", "shipping")


def launch(
    config: Config,
    *,
    local: bool = False,
    fresh: bool = False,
    verbose: bool = False,
    observer: Observer | None = None,
    any_name: bool = False,
) -> Result:
    """Runs the config's script in every rank.

    local: processes on this machine, without Ray. fresh: with the old run directory moved aside. observer:
    gets events as they come. any_name: where another live run has this name, take the next free one, as in
    train-2. Returns the result of scripts that all ended well or were stopped, with their exit code. Raises
    ScriptError with a failed script's own exit code, UsageError for what cannot be launched.
    """
    find_script(config.script, os.getcwd(), config.source_path)
    with _open(config, fresh, any_name) as run_dir:
        run_dir.write_description(config)
        return _Launch(config, run_dir, observer, local, verbose).run()


def _open(config: Config, fresh: bool, any_name: bool) -> RunDirectory:
    number = 1
    while True:
        try:
            return RunDirectory.open(config, fresh=fresh)
        except ResumeError:
            if not any_name:
                raise
            number += 1
            stem = config.name.removesuffix(f"-{number - 1}") if number > 2 else config.name
            config = config.with_overrides(f"name={stem}-{number}")


class _Launch:
    """One launch, with all its starts."""

    def __init__(
        self, config: Config, run_dir: RunDirectory, observer: Observer | None, local: bool, verbose: bool
    ):
        self._config, self._run_dir, self._observer = config, run_dir, observer
        self._local, self._verbose = local, verbose
        self._console = Console(stream=sys.stderr, interactive=False)
        self._stop = StopSignal()
        self._started_at = time.time()
        self._restarts: list[RankFailure] = []
        self._world_sizes: list[int] = []
        remote = run_dir.storage.is_remote
        self._log_dir = (
            Path(tempfile.mkdtemp(prefix="raytrainer-logs-"))
            if remote
            else Path(run_dir.storage.path("logs"))
        )

    def run(self) -> Result:
        _move_aside(self._log_dir)
        console = ConsoleOutput()
        hub = ScriptHub(
            local=self._local, log_dir=self._log_dir, stop=self._stop, console=console, say=self._console.say
        )
        with stop_on_signals(self._stop):
            try:
                with hub:
                    plan = script_plan(self._config, hub, self._run_dir, console, self._local)
                    outcome = self._start_until_over(plan)
            except RaytrainerError as error:
                self._keep(Outcome("failed", error.exit_code), str(error))
                raise
            finally:
                self._upload_logs()
        if outcome.failure is not None:
            error = self._error_of(outcome.failure)
            self._keep(outcome, str(error))
            raise error
        if outcome.status == "stopped":
            outcome = Outcome("stopped", self._exit_code_when_stopped(hub), outcome.result)
        return self._keep(outcome, None)

    def _start_until_over(self, plan: dict[str, Any]) -> Outcome:
        """Starts the group, and again after a failure, as often as the config allows."""
        max_failures = self._config.failure.max_failures
        if self._config.script.min_workers is None:
            outcome = self._start(plan, max_failures)
            self._restarts += outcome.restarts
            return outcome
        while True:
            # The size is found anew for each start, which a backend keeps within a call.
            outcome = self._start({**plan, "first_attempt": len(self._restarts)}, 0)
            over = outcome.failure is None or not is_retryable(outcome.failure) or self._stop.requested
            if over or 0 <= max_failures <= len(self._restarts):
                return outcome
            self._restarts.append(outcome.failure)
            self._on_record(
                {
                    "event": "worker_failed",
                    "rank": outcome.failure.rank,
                    "kind": outcome.failure.kind,
                    "message": outcome.failure.summary,
                    "num_failures": len(self._restarts),
                    "max_failures": max_failures,
                }
            )

    def _start(self, plan: dict[str, Any], max_failures: int) -> Outcome:
        payload = {"entry": ENTRY, "import_paths": [], "script": plan, "preload": PRELOAD}
        given = {
            "on_record": self._on_record,
            "stop": self._stop,
            "max_failures": max_failures,
            # What a script saves is its own business: every new start counts.
            "committed_step": lambda: None,
        }
        if self._local:
            from raytrainer.cluster.local import run_local

            return run_local(payload, self._config.scaling.max_workers, log_dir=None, **given)
        from raytrainer.cluster.ray_run import run_on_ray

        return run_on_ray(
            payload,
            self._config.scaling,
            self._config.ray,
            storage_path=self._config.storage_path,
            name=self._config.name,
            verbose=self._verbose,
            min_workers=self._config.script.min_workers,
            **given,
        )

    def _on_record(self, record: dict[str, Any]) -> None:
        details = {key: value for key, value in record.items() if key not in ("event", "time_s")}
        if record["event"] == "started":
            self._world_sizes.append(record["world_size"])
        record = self._run_dir.event(record["event"], **details)
        if record["event"] in _SAID:
            self._console.record(record)
        if self._observer is not None:
            self._observer(record)

    def _exit_code_when_stopped(self, hub: ScriptHub) -> int:
        """The scripts' own: one that saves and ends well when it is told to stop has done so."""
        if self._stop.immediate or hub.killed or not hub.codes:
            return self._stop.exit_code
        return next((exit_code_of(code) for _, code in sorted(hub.codes.items()) if code), 0)

    def _error_of(self, failure: RankFailure) -> RaytrainerError:
        error = to_error(failure)
        if not isinstance(error, ScriptError):
            return error
        log = self._log_dir / f"rank_{failure.rank}.log"
        text = f"{error}\n  all of its output is in {os.path.relpath(log)}" if log.exists() else str(error)
        return ScriptError(text, error.exit_code)

    def _upload_logs(self) -> None:
        if self._run_dir.storage.is_remote:
            for path in self._log_dir.glob("rank_*.log"):
                self._run_dir.storage.write(f"logs/{path.name}", path.read_bytes())

    def _keep(self, outcome: Outcome, error: str | None) -> Result:
        result = Result(
            status=outcome.status,
            exit_code=outcome.exit_code,
            world_sizes=[size for size, _ in itertools.groupby(self._world_sizes)],
            restarts=len(self._restarts),
            wall_s=round(time.time() - self._started_at, 3),
            error=error,
            run_dir=self._run_dir.root,
        )
        self._run_dir.event(outcome.status, exit_code=outcome.exit_code)
        self._run_dir.write_result(result)
        return result


def script_plan(
    config: Config, hub: ScriptHub, run_dir: RunDirectory, console: ConsoleOutput, local: bool
) -> dict[str, Any]:
    """What every rank is told, in plain values; read by `script_rank` and `script_environment`."""
    script, scaling = config.script, config.scaling
    here = os.getcwd()
    return {
        "path": find_script(script, here, config.source_path),
        "args": [str(each) for each in script.args],
        "module": script.module,
        "env": {name: None if value is None else str(value) for name, value in script.env.items()},
        "local_rank_arg": script.local_rank_arg,
        "process_args": script.process_args,
        "rank_env": script.rank_env,
        "master_port": script.master_port,
        "tee": script.tee,
        "separate_streams": console.is_separate,
        "working_dir": os.path.abspath(script.working_dir) if script.working_dir else None,
        "cwd": here,
        "local": local,
        "python_path": [
            os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
        ],
        "num_threads": num_threads(
            os.environ, cpus_per_worker=scaling.cpus_per_worker, num_workers=scaling.max_workers
        ),
        "max_restarts": max(0, config.failure.max_failures),
        "end_grace_s": script_rank.END_GRACE_S,
        "stop_grace_s": script_rank.STOP_GRACE_S,
        "run_id": f"{config.name}-{secrets.token_hex(4)}",
        "first_attempt": 0,
        "run_dir": None if run_dir.storage.is_remote else os.path.abspath(run_dir.root),
        "run_token": run_dir.token,
        "token": hub.token,
        "hosts": hub.hosts,
        "control_port": hub.control_port,
        "output_port": hub.output_port,
    }


def _move_aside(log_dir: Path) -> None:
    """The logs of an earlier launch of the same name stay, beside those of this one."""
    if log_dir.is_dir() and any(log_dir.iterdir()):
        log_dir.rename(log_dir.with_name(f"logs.old-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"))
    log_dir.mkdir(parents=True, exist_ok=True)
