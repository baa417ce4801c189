"""Ray Train's trainer with everything left out that a fixed group of our own ranks does not need.

`LeanTrainer` keeps Ray Train's controller, placement group and worker group, and runs the controller in the
driver's own process: no controller, synchronisation, preemption or clean-up actor is started, no worker
imports Ray Train, and no process but the workers imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Read by Ray Train when it is imported and when its controller starts, in this process alone.
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import ray
from ray.exceptions import RayError
from ray.train import BackendConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState, WorkerGroupStateBuilder
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytrainer.cluster import ray_worker
from raytrainer.cluster.outcome import RankFailure, choose_cause, is_retryable
from raytrainer.cluster.ray_failure import describe_failed_start
from raytrainer.cluster.ray_place import RankPlace, rank_environments
from raytrainer.cluster.ray_request import WorkerRequest
from raytrainer.cluster.ray_rescue import rescue

ray.cloudpickle.register_pickle_by_value(ray_worker)

# The cluster has no room for the group: say so after this long.
NOTICE_S = 3.0
# How long one look at the ranks may wait for something to happen.
WATCH_S = 1.0
# After the first failure the others get this long to end by themselves: the first may be the echo of a later
# one.
SETTLE_S = 3.0


class RankError(Exception):
    """A rank's failure on its way through Ray Train's controller."""

    def __init__(self, failure: RankFailure):
        super().__init__(failure.summary)
        self.failure = failure


class SizeChangedError(WorkerGroupStartupFailedError):
    """What there is room for has changed while a group waited for its place."""

    def __init__(self) -> None:
        super().__init__("there is room for another number of workers now")


class Aborted(Exception):
    """The run was told to stop at once while its group was starting."""


class GroupControl:
    """Ends the workers of the current group, and of any later one, from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actors: list = []
        self.aborted = False

    def take(self, actors: list) -> None:
        """Makes `actors` the current group."""
        with self._lock:
            self._actors = actors
        if self.aborted:
            self.abort()

    def check(self) -> None:
        """Raises Aborted after `abort`."""
        if self.aborted:
            raise Aborted

    def abort(self) -> None:
        """Kills the workers; the trainer then ends by itself."""
        self.aborted = True
        with self._lock:
            for actor in self._actors:
                ray.kill(actor)


@dataclass
class RankGroupConfig(BackendConfig):
    """What the worker group needs to know; Ray Train hands it through as the backend's config.

    actor_arguments: of RankActor; on_start: called with the ranks' places before they run, gives how often a
    group was started before; on_wait: called once when the cluster has no room yet; describe_loss: a rank's
    place and Ray's error -> its failure; size: how many ranks a new group is to have; committed_step: of the
    newest checkpoint.
    """

    actor_arguments: dict[str, Any]
    link_prefix: str
    control: GroupControl
    on_start: Callable[[list[RankPlace]], int]
    on_wait: Callable[[], None]
    describe_loss: Callable[[RankPlace, Exception], RankFailure]
    size: Callable[[], int]
    committed_step: Callable[[], int | None]


class RankGroupState(WorkerGroupState):
    """A worker group's state that has no synchronisation actor."""

    def shutdown(self) -> None:
        for worker in self.workers:
            ray.kill(worker.actor)
        self.placement_group_handle.shutdown()


class RankGroup(WorkerGroup):
    """A worker group of RankActors: one call runs a rank, and its answer or its death is the rank's end."""

    _worker_cls = ray_worker.RankActor

    @property
    def _config(self) -> RankGroupConfig:
        return self._train_run_context.backend_config

    def _start_impl(self, worker_group_state_builder: WorkerGroupStateBuilder) -> None:
        context = self._worker_group_context
        self._check_cluster_resources_and_raise_if_insufficient(
            context.resources_per_worker, context.num_workers
        )
        for callback in self._callbacks:
            callback.before_worker_group_start(context)
        group = self._create_placement_group(self._train_run_context.scaling_config, context)
        worker_group_state_builder.with_placement_group_handle(group)
        self._wait_for_place(group, context.num_workers)
        workers = self._create_workers(
            context.num_workers, group.placement_group, context.resources_per_worker
        )
        worker_group_state_builder.with_workers(workers)
        self._worker_group_state = RankGroupState(time.monotonic(), group, workers, None)
        for callback in self._callbacks:
            callback.after_worker_group_start(self)
        self._run_ranks(workers)
        for callback in self._callbacks:
            callback.after_worker_group_training_start(self)

    def _wait_for_place(self, group, num_workers: int) -> None:
        """Raises SizeChangedError once there is room for another number of workers."""
        notice_s = time.monotonic() + NOTICE_S
        while not group.wait(WATCH_S):
            self._config.control.check()
            if notice_s is not None and time.monotonic() >= notice_s:
                notice_s = None
                self._config.on_wait()
            if self._config.size() != num_workers:
                # A node has come, or is known by now to be gone.
                raise SizeChangedError

    def _create_workers(self, num_workers, placement_group, resources_per_worker, **kwargs) -> list[Worker]:
        options = bundle_to_remote_args(resources_per_worker)
        # A runtime_env of Ray Train's variables, as the base class sets it, would have Ray start new
        # processes instead of taking those that wait already.
        actor_class = ray.remote(max_restarts=0, max_task_retries=0, **options)(self._worker_cls)
        actors = [
            actor_class.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=placement_group, placement_group_bundle_index=index
                )
            ).remote(**self._config.actor_arguments)
            for index in range(num_workers)
        ]
        self._config.control.take(actors)
        try:
            descriptions = ray.get([actor.describe.remote() for actor in actors])
        except RayError as error:
            for actor in actors:
                ray.kill(actor)
            raise WorkerGroupStartupFailedError(str(error)) from error
        self._ports = [description.pop("port") for description in descriptions]
        self._rescue_ports = [description.pop("rescue_port") for description in descriptions]
        workers = [
            Worker(
                actor, ActorMetadata(**description), resources_per_worker, placement_group_bundle_index=index
            )
            for index, (actor, description) in enumerate(zip(actors, descriptions, strict=True))
        ]
        return self._assign_worker_ranks(workers)

    def _run_ranks(self, workers: list[Worker]) -> None:
        self._places = [self._place_of(worker) for worker in workers]
        self._rescue_addresses = {
            place.rank: (place.node_ip, self._rescue_ports[worker.placement_group_bundle_index])
            for place, worker in zip(self._places, workers, strict=True)
        }
        attempt = self._config.on_start(self._places)
        environments = rank_environments(self._places, attempt)
        link = {"prefix": self._config.link_prefix, "attempt": attempt}
        payload = self._worker_group_context.train_fn_ref._ref
        self._calls = [
            worker.actor.run.remote(payload, place.numbers, environment, link)
            for worker, place, environment in zip(workers, self._places, environments, strict=True)
        ]
        self._statuses: dict[int, WorkerStatus] = {}

    def _place_of(self, worker: Worker) -> RankPlace:
        where, metadata = worker.distributed_context, worker.metadata
        return RankPlace(
            where.world_rank,
            where.world_size,
            where.local_rank,
            where.local_world_size,
            where.node_rank,
            metadata.node_ip,
            metadata.pid,
            self._ports[worker.placement_group_bundle_index],
            tuple(str(gpu) for gpu in metadata.gpu_ids),
            metadata.node_id,
        )

    def _poll_workers_and_collect_errors(self, timeout: float | None) -> list[WorkerStatus]:
        self._watch(WATCH_S)
        if any(status.error for status in self._statuses.values()):
            deadline = time.monotonic() + SETTLE_S
            while len(self._statuses) < len(self._calls) and (left_s := deadline - time.monotonic()) > 0:
                self._watch(left_s)
            self._rescue()
        running = WorkerStatus(running=True)
        return [self._statuses.get(rank, running) for rank in range(len(self._calls))]

    def _rescue(self) -> None:
        """Has a rank that outlived a lost one save the last finished step, before the group goes."""
        failures = [status.error.failure for status in self._statuses.values() if status.error]
        if not is_retryable(choose_cause(failures)):
            return
        rescue(self._rescue_addresses, self._config.link_prefix, self._config.committed_step() or 0)

    def _watch(self, timeout_s: float) -> None:
        """Waits until one more rank has ended, and notes how."""
        pending = [call for rank, call in enumerate(self._calls) if rank not in self._statuses]
        if not pending:
            return
        done, _ = ray.wait(pending, num_returns=1, timeout=timeout_s)
        if not done:
            return
        done, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        for call in done:
            rank = self._calls.index(call)
            self._statuses[rank] = self._status(rank, call)

    def _status(self, rank: int, call) -> WorkerStatus:
        try:
            answer = ray.get(call)
        except RayError as error:
            self._rescue_addresses.pop(rank)
            failure = self._config.describe_loss(self._places[rank], error)
            return WorkerStatus(running=False, error=RankError(failure))
        if "failure" in answer:
            return WorkerStatus(running=False, error=RankError(RankFailure.from_dict(answer["failure"])))
        return WorkerStatus(running=False, return_value=answer["result"])


class LeanController(TrainController):
    """Ray Train's state machine, in this process: no actor, no polling interval."""

    worker_group_cls = RankGroup

    def __init__(self, **arguments):
        super().__init__(**arguments)
        # `RankGroup` waits for the ranks itself.
        self._health_check_interval_s = 0.0


class QuietPolicy(FixedScalingPolicy):
    """Takes each new group's size from `size`, and asks no autoscaling coordinator: the pending placement
    group is request enough."""

    def __init__(self, scaling_config: ScalingConfig, size: Callable[[], int]):
        super().__init__(scaling_config)
        self._size = size

    def make_decision_for_non_running_worker_group(self) -> ResizeDecision:
        return ResizeDecision(self._size(), self.scaling_config._resources_per_worker_not_none)

    def after_controller_start(self, train_run_context) -> None:
        """Starts no coordinator."""

    async def before_controller_shutdown(self) -> None:
        """Has no coordinator to tell."""

    def before_controller_abort(self) -> None:
        """Has no coordinator to tell."""

    def _maybe_send_resource_request(self) -> None:
        """Has no coordinator to ask."""


class DecidedFailurePolicy(FailurePolicy):
    """Asks `decide`, which is given the failures of the ranks, whether to start again."""

    def __init__(self, failure_config, decide: Callable[[list[RankFailure]], bool]):
        super().__init__(failure_config)
        self._decide = decide

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        if isinstance(training_failed_error, WorkerGroupError):
            failures = [error.failure for error in training_failed_error.worker_failures.values()]
        elif isinstance(training_failed_error, ControllerError) and isinstance(
            training_failed_error.controller_failure, WorkerGroupStartupFailedError
        ):
            if isinstance(training_failed_error.controller_failure, SizeChangedError):
                return FailureDecision.RETRY
            message = str(training_failed_error.controller_failure)
            failures = [describe_failed_start(message, time.time())]
        else:
            return FailureDecision.RAISE
        return FailureDecision.RETRY if self._decide(failures) else FailureDecision.RAISE


class LeanTrainer(DataParallelTrainer):
    """Ray Train's trainer for ranks of ours. payload: for every rank; decide: whether to start again."""

    def __init__(
        self,
        payload: dict,
        *,
        group: RankGroupConfig,
        request: WorkerRequest,
        scratch_dir: str,
        decide: Callable[[list[RankFailure]], bool],
    ):
        self._payload = payload
        self._decide = decide
        self._size = group.size
        super().__init__(
            _not_called,
            backend_config=group,
            scaling_config=ScalingConfig(
                num_workers=request.num_workers,
                use_gpu=request.num_gpus > 0,
                resources_per_worker=dict(request.resources),
                placement_strategy=request.strategy,
                label_selector=dict(request.labels) or None,
                accelerator_type=request.accelerator_type,
            ),
            # Nothing is reported through Ray Train; it insists on a folder for its own state.
            run_config=RunConfig(name="run", storage_path=scratch_dir),
        )

    def _get_train_func(self):
        return self._payload

    def _create_default_callbacks(self) -> list:
        return []

    def _initialize_and_run_controller(self, **arguments):
        arguments["scaling_policy"] = QuietPolicy(self.scaling_config, self._size)
        arguments["failure_policy"] = DecidedFailurePolicy(self.run_config.failure_config, self._decide)
        os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
        os.environ["RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING"] = "0"
        controller = LeanController(**arguments)
        asyncio.run(controller.run())
        return controller.get_result()


def set_verbose(verbose: bool) -> None:
    """Shows Ray Train's own messages, errors included, or none: raytrainer says itself what matters."""
    logging.getLogger("ray.train").setLevel(logging.INFO if verbose else logging.CRITICAL)


def _not_called() -> None:
    """Stands where Ray Train wants a training function."""
