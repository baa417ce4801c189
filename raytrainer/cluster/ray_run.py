"""Runs the ranks on a Ray cluster: connect or start one, place the workers, watch, stop, start again.

All of Ray is used on one thread of its own, so that the caller's thread stays free for signals and records.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raytrainer.cluster.outcome import Outcome, RankFailure, to_error
from raytrainer.cluster.ray_failure import Retries, describe_loss, judge
from raytrainer.cluster.ray_place import RankPlace, importable_paths, thread_environment
from raytrainer.cluster.ray_request import (
    WorkerRequest,
    at_least,
    check_request,
    count_fitting,
    plan_request,
)
from raytrainer.cluster.ray_session import explain_missing, open_session
from raytrainer.cluster.signals import EXIT_CODES, RESIZE, StopSignal
from raytrainer.cluster.sizes import Bounds, Resizing
from raytrainer.elastic import starting_size

if TYPE_CHECKING:
    from raytrainer.cluster.ray_adapter import Session
    from raytrainer.cluster.ray_link import DriverLink
    from raytrainer.cluster.ray_train import RankGroupConfig

# Imported by each worker while the others start.
PRELOAD = ["torch", "raytrainer.cluster.ray_link", "raytrainer.cluster.worker", "raytrainer.trainer"]
# How often the driver fetches records and looks for a request to stop.
POLL_S = 0.1
# After a stop at once: for Ray to let go of its workers.
ABORT_S = 10.0


def run_on_ray(
    payload: dict,
    scaling: Any,
    ray_settings: Any,
    *,
    on_record: Callable[[dict], None],
    stop: StopSignal,
    max_failures: int,
    storage_path: str | os.PathLike,
    name: str,
    verbose: bool,
    committed_step: Callable[[], int | None],
    min_workers: int | None = None,
    recover: Callable[[], None] = lambda: None,
    num_microbatches: int | None = None,
) -> Outcome:
    """Runs `scaling.num_workers` ranks until they finish, stop or fail; no process of theirs is left.

    payload: see `worker.run_rank`. scaling, ray_settings: the config's sections `scaling` and `ray`.
    on_record: called in this thread or Ray's, one at a time, with each record of rank 0, with a
    "worker_failed" event for each new start and a "waiting" event when the cluster has no room yet.
    max_failures: new starts after a lost process without a newly committed step in between; -1 for no limit.
    storage_path: left out of what is shipped to other machines. committed_step: the step a new start would
    resume at. min_workers: a group of fewer workers than `scaling` says will do, down to this many, where the
    cluster has no room for more; it then keeps its size to its end. recover: called after each failure, to
    bring in what can be had besides. num_microbatches: of a step, for the decision whether more workers are
    worth a restart. Raises ClusterRequestError when the cluster can never give what `scaling` asks for,
    UsageError when there is no cluster to connect to.
    """
    run = _Run(
        payload=payload,
        scaling=scaling,
        settings=ray_settings,
        on_record=on_record,
        stop=stop,
        max_failures=max_failures,
        storage_path=os.fspath(storage_path),
        name=name,
        verbose=verbose,
        committed_step=committed_step,
        min_workers=min_workers,
        recover=recover,
        num_microbatches=num_microbatches or scaling.max_workers,
    )
    return run.outcome()


class _Run:
    """One call of `run_on_ray`: what its two threads share."""

    def __init__(
        self,
        *,
        payload: dict,
        scaling: Any,
        settings: Any,
        on_record: Callable[[dict], None],
        stop: StopSignal,
        max_failures: int,
        storage_path: str,
        name: str,
        verbose: bool,
        committed_step: Callable[[], int | None],
        min_workers: int | None,
        recover: Callable[[], None],
        num_microbatches: int,
    ):
        self._payload = payload
        self._scaling = scaling
        # A group of this size will do where there is no room for more.
        self._min_workers = scaling.min_workers if min_workers is None else min_workers
        # Without it, a group keeps the size with which it was started.
        self._may_resize = scaling.is_elastic and min_workers is None
        self._settings = settings
        self._on_record = on_record
        self._record_lock = threading.RLock()
        self._stop = stop
        self._max_failures = max_failures
        self._storage_path = storage_path
        self._prefix = f"{name}-{uuid.uuid4().hex}"
        self._verbose = verbose
        self._committed_step = committed_step
        self._recover = recover
        self._resizing = Resizing(Bounds(scaling.min_workers, scaling.max_workers, num_microbatches))
        self._session: Session | None = None
        self._request: WorkerRequest | None = None
        self._places: list[RankPlace] = []
        # A group has waited for its place: others use the cluster too.
        self._is_crowded = False
        # Of the attempt that was asked to resize, so that it is asked once.
        self._resized_attempt: int | None = None
        self._look_s = 0.0
        self._retries = Retries(committed_step())
        self._restarts: list[RankFailure] = []
        self._cause: RankFailure | None = None
        self._result: dict | None = None
        self._error: BaseException | None = None
        self._num_groups = 0
        self._stopped_at_once = False
        # Ray's own start is over.
        self._connected = False
        # The training has ended, and only Ray is left to be closed.
        self._over = False
        # Set by Ray's thread while there is something to talk to.
        self._link: DriverLink | None = None
        self._control: Any = None
        self._ended = threading.Event()

    # The caller's thread
    # -------------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """Starts Ray's thread, and passes on records and the request to stop until it ends."""
        # Ray's processes are told to end with the thread that starts them: it lasts as long as the run.
        thread = threading.Thread(target=self._use_ray, name="raytrainer-ray", daemon=True)
        thread.start()
        stop_sent, deadline, connected = False, None, False
        while not self._ended.wait(POLL_S):
            link, control = self._link, self._control
            if self._connected and not connected:
                connected = True
                restore_signal_handlers()
            if link is not None:
                link.poll()
                self._consider_size(link)
            if self._stop.requested and not self._stopped_at_once and not self._over:
                if self._stop.immediate or link is None or not link.training:
                    # Before the first step there is nothing to save.
                    self._stopped_at_once = True
                    deadline = time.monotonic() + ABORT_S
                elif not stop_sent:
                    link.request_stop(self._stop.requested)
                    stop_sent = True
            if self._stopped_at_once and control is not None and not control.aborted:
                control.abort()
            if deadline is not None and self._stop.immediate and time.monotonic() > deadline:
                # Ray does not answer. Its processes end with this one.
                return Outcome("stopped", self._stop.exit_code, restarts=tuple(self._restarts))
        thread.join()
        return self._conclude()

    def _consider_size(self, link: DriverLink) -> None:
        """Asks the group to stop for a resize when the cluster has changed and it is worth it."""
        if not self._may_resize or not link.training or self._stop.requested or self._over:
            return
        attempt, now_s = self._num_groups, time.monotonic()
        # Looked for three times as often as promised: what is left is for the group to stop and start.
        if attempt == self._resized_attempt or now_s - self._look_s < min(
            2.0, self._scaling.grow_within_s / 3
        ):
            return
        self._look_s = now_s
        current = len(self._places)
        leaving = self._session.leaving_node_ids
        staying = sum(place.node_id not in leaving for place in self._places)
        available = staying + count_fitting(self._request, self._session.free_nodes)
        resize = self._resizing.decide(current, available)
        if resize is not None:
            self._resized_attempt = attempt
            self._resizing.ended("a node is leaving" if resize.to < current else resize.why)
            link.request_stop(RESIZE)

    def _conclude(self) -> Outcome:
        restarts = tuple(self._restarts)
        if self._stopped_at_once:
            return Outcome("stopped", self._stop.exit_code, restarts=restarts)
        if self._error is not None:
            raise self._error
        if self._cause is not None:
            return Outcome("failed", to_error(self._cause).exit_code, failure=self._cause, restarts=restarts)
        result = self._result or {}
        status, exit_code = result.get("status", "finished"), result.get("exit_code", 0)
        if status == "stopped":
            # A rank may have been told by a signal of its own: the whole job's processes often get one.
            reason = self._stop.requested or result.get("stop_reason", "")
            exit_code = EXIT_CODES.get(reason, exit_code)
        return Outcome(status, exit_code, result, restarts=restarts)

    # Ray's thread
    # --------------------------------------------------------------------------------------------

    def _use_ray(self) -> None:
        try:
            # A second of imports, of which Ray's own start leaves a processor free.
            importing = threading.Thread(target=_import_ray_train, daemon=True)
            importing.start()
            session = open_session(
                self._settings,
                self._storage_path,
                self._verbose,
                lambda text: self._tell({"event": "shipping", "message": text}),
            )
            self._connected = True
            try:
                importing.join()
                if not self._stopped_at_once:
                    self._train(session)
            finally:
                self._over = True
                self._link = self._control = None
                session.close()
        except ImportError as error:
            self._error = explain_missing(error)
        except BaseException as error:  # raised again in the caller's thread
            self._error = error
        finally:
            self._ended.set()

    def _train(self, session: Session) -> None:
        from raytrainer.cluster.ray_link import DriverLink

        nodes = session.nodes
        request = plan_request(self._scaling, nodes)
        self._session, self._request = session, request
        if not (session.may_grow or self._settings.wait):
            check_request(self._fewest, nodes)
        if not session.is_this_machine:
            # A snapshot on another machine could not be taken back from here.
            self._payload = {**self._payload, "snapshot_dir": None}
        link = DriverLink(self._prefix, self._tell)
        try:
            self._fit(request, session, link)
        finally:
            link.close()

    def _fit(self, request: WorkerRequest, session: Session, link: DriverLink) -> None:
        from raytrainer.cluster import ray_train

        ray_train.set_verbose(self._verbose)
        self._control = control = ray_train.GroupControl()
        self._link = link
        group = ray_train.RankGroupConfig(
            actor_arguments={
                "import_paths": importable_paths(self._payload.get("import_paths", [])),
                "environment": thread_environment(
                    os.environ,
                    cpus_per_worker=request.resources.get("CPU", 1),
                    num_workers=request.num_workers,
                    machine_is_ours=session.started_here,
                ),
                "preload": self._payload.get("preload", PRELOAD),
                "directory": None if session.ships_files else os.getcwd(),
            },
            link_prefix=self._prefix,
            control=control,
            on_start=self._start_group,
            on_wait=self._on_wait,
            describe_loss=self._describe_loss,
            size=self._size,
            committed_step=self._committed_step,
        )
        while not self._run_group(group, request) and not self._stop.requested:
            pass

    def _run_group(self, group: RankGroupConfig, request: WorkerRequest) -> bool:
        """Runs groups until one ends for good; False when that was for a resize."""
        from raytrainer.cluster import ray_train

        with tempfile.TemporaryDirectory(prefix="raytrainer-") as scratch_dir:
            trainer = ray_train.LeanTrainer(
                self._payload, group=group, request=request, scratch_dir=scratch_dir, decide=self._decide
            )
            try:
                self._result = trainer.fit().return_value
            except ray_train.TrainingFailedError:
                if self._cause is None and not self._control.aborted:
                    raise
                return True
        return (self._result or {}).get("status") != "resized"

    @property
    def _fewest(self) -> WorkerRequest:
        """The request for as many workers as there have to be."""
        return at_least(self._request, self._min_workers)

    def _size(self) -> int:
        """How many ranks a new group has: all that there is room for; else the fewest, to wait for."""
        low, high = self._min_workers, self._request.num_workers
        if low == high:
            return high
        # The resources of a group that has just ended are not always free yet: at first all count as free.
        nodes = self._session.free_nodes if self._is_crowded else self._session.staying_nodes
        available = count_fitting(self._request, nodes)
        return starting_size(available, low, high) or low

    def _on_wait(self) -> None:
        self._is_crowded = True
        self._tell({"event": "waiting", "message": _describe_wait(self._fewest)})

    def _start_group(self, places: list[RankPlace]) -> int:
        attempt = self._num_groups
        self._num_groups += 1
        self._places = places
        self._is_crowded = False
        self._resizing.started(len(places))
        self._link.start_attempt(attempt)
        return attempt

    def _describe_loss(self, place: RankPlace, error: Exception) -> RankFailure:
        memory_gib = self._link.memory_gib(place.rank)
        return describe_loss(place.rank, str(error), str(place), memory_gib, time.time())

    def _decide(self, failures: list[RankFailure]) -> bool:
        if self._control.aborted:
            return False
        self._link.poll()
        self._recover()
        step = self._committed_step()
        verdict = judge(
            failures,
            self._retries,
            step=step,
            stopping=self._stop.requested is not None,
            max_failures=self._max_failures,
        )
        self._retries = verdict.retries
        if not verdict.retry:
            self._cause = verdict.cause
            return False
        self._restarts.append(verdict.cause)
        self._resizing.ended(f"worker {verdict.cause.rank} was lost")
        self._tell(
            {
                "event": "worker_failed",
                "rank": verdict.cause.rank,
                "message": verdict.cause.summary,
                "step": step,
                "num_failures": verdict.retries.num_failures,
                "max_failures": self._max_failures,
            }
        )
        return True

    def _tell(self, record: dict) -> None:
        with self._record_lock:
            resized = self._resizing.observe(record)
            if resized is not None:
                self._on_record(resized)
            self._on_record(record)


def restore_signal_handlers() -> None:
    """Puts Python's signal handlers back in front of the one that Ray installs when it connects.

    Ray's writes a stack trace for SIGTERM, and aborts the process if that has not ended 3 s later.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)


def _describe_wait(request: WorkerRequest) -> str:
    asked = ", ".join(f"{name}: {amount:g}" for name, amount in request.resources.items())
    return f"the cluster has no room yet for {request.num_workers} x {{{asked}}}"


def _import_ray_train() -> None:
    # What is missing is reported where it is needed.
    with contextlib.suppress(ImportError):
        from raytrainer.cluster import ray_train  # noqa: F401
