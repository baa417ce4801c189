"""Runs the ranks on a Ray cluster: connect or start one, place the workers, watch, stop, start again.

All of Ray is used on one thread of its own, so that the main thread stays free for signals and records.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raytrainer.cluster.outcome import Outcome, RankFailure, choose_cause, is_retryable, to_error
from raytrainer.cluster.signals import EXIT_CODES, StopSignal

PRELOAD = ["torch", "raytrainer.cluster.ray_link", "raytrainer.cluster.worker"]
# How often the driver looks for new records and for a request to stop.
POLL_S = 0.1
# After a stop at once: for Ray to end the workers.
ABORT_S = 10.0


def run_on_ray(
    payload: dict,
    scaling,
    ray_settings,
    *,
    on_record: Callable[[dict], None],
    stop: StopSignal,
    max_failures: int,
    storage_path: str | os.PathLike,
    name: str,
    verbose: bool,
    committed_step: Callable[[], int | None],
) -> Outcome:
    """Runs `scaling.num_workers` ranks until they finish, stop or fail for good; no process of theirs is left.

    payload: see `worker.run_rank`. scaling, ray_settings: the config's sections. on_record: called here with each
    record of rank 0 and with a "worker_failed" event for each new start. max_failures: new starts after a lost
    process, without a newly committed step in between; -1 for no limit. committed_step: the step a new start
    would resume at. Raises ClusterRequestError when the cluster can never give what `scaling` asks for.
    """
    run = _Run(payload, scaling, ray_settings, on_record, stop, max_failures, verbose, committed_step, name)
    return run.outcome()


class _Run:
    def __init__(
        self, payload, scaling, settings, on_record, stop, max_failures, verbose, committed_step, name
    ):
        self.payload = dict(payload)
        self.scaling = scaling
        self.settings = settings
        self.on_record = on_record
        self.stop = stop
        self.max_failures = max_failures
        self.verbose = verbose
        self.committed_step = committed_step
        self.name = name
        self.link = None
        self.restarts: list[RankFailure] = []
        self.num_failures = 0
        self.last_step = committed_step()
        self.cause: RankFailure | None = None
        self.result: dict | None = None
        self.error: BaseException | None = None
        self.aborted = False
        self.num_groups = 0
        self.ended = threading.Event()

    def outcome(self) -> Outcome:
        thread = threading.Thread(target=self._use_ray, name="raytrainer-ray", daemon=True)
        thread.start()
        stop_sent = False
        while not self.ended.wait(POLL_S):
            link = self.link
            if link is not None:
                link.poll()
        thread.join()
        if self.error is not None:
            raise self.error
        if self.cause is not None:
            return Outcome(
                "failed", to_error(self.cause).exit_code, failure=self.cause, restarts=tuple(self.restarts)
            )
        result = self.result or {}
        status = result.get("status", "finished")
        if status != "stopped":
            return Outcome(status, result.get("exit_code", 0), result, restarts=tuple(self.restarts))
        reason = self.stop.requested or result.get("stop_reason", "")
        return Outcome(
            status,
            EXIT_CODES.get(reason, result.get("exit_code", 0)),
            result,
            restarts=tuple(self.restarts),
        )

    def _use_ray(self) -> None:
        try:
            from raytrainer.cluster import ray_adapter
            from raytrainer.cluster.ray_link import DriverLink

            importer = threading.Thread(target=_import_ray_train)
            importer.start()
            session = ray_adapter.start({}, {}, self.verbose)
            try:
                importer.join()
                self.link = DriverLink(f"{self.name}-{uuid.uuid4().hex}", self.on_record)
                self._fit()
                self.link.close()
            finally:
                self.link = None
                session.close()
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()

    def _fit(self) -> None:
        from raytrainer.cluster import ray_train

        group = ray_train.RankGroupConfig(
            ([str(Path(__file__).parents[2]), *self.payload.get("import_paths", [])], {"OMP_NUM_THREADS": "1"}, PRELOAD),
            _environments,
            self._on_group,
            self._describe_loss,
            {},
        )
        scaling = ray_train.ScalingConfig(
            num_workers=self.scaling.num_workers,
            resources_per_worker={"CPU": self.scaling.cpus_per_worker},
        )
        with tempfile.TemporaryDirectory() as scratch_dir:
            trainer = ray_train.LeanTrainer(
                self.payload, group=group, scaling=scaling, scratch_dir=scratch_dir, decide=self._decide
            )
            try:
                self.result = trainer.fit().return_value
            except ray_train.TrainingFailedError:
                if self.cause is None:
                    raise

    def _on_group(self, descriptions):
        attempt = self.num_groups
        self.num_groups += 1
        self.link.start_attempt(attempt)
        return {"prefix": self.link.prefix, "attempt": attempt}

    def _describe_loss(self, rank, error):
        return RankFailure(rank, "lost", message=str(error))

    def _decide(self, failures) -> bool:
        if isinstance(failures, Exception):
            return False
        cause = choose_cause(failures)
        step = self.committed_step()
        self.num_failures = 1 if step != self.last_step else self.num_failures + 1
        self.last_step = step
        if not is_retryable(cause) or self.stop.requested or 0 <= self.max_failures < self.num_failures:
            self.cause = cause
            return False
        self.restarts.append(cause)
        return True


def _environments(places, descriptions):
    return [
        {
            "RANK": str(place[0]),
            "WORLD_SIZE": str(place[1]),
            "LOCAL_RANK": str(place[2]),
            "LOCAL_WORLD_SIZE": str(place[3]),
            "GROUP_RANK": str(place[4]),
            "MASTER_ADDR": descriptions[0]["node_ip"],
            "MASTER_PORT": str(descriptions[0]["port"]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for place in places
    ]


def _import_ray_train() -> None:
    from raytrainer.cluster import ray_train  # noqa: F401
