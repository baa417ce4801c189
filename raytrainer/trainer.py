"""The training loop. It knows its rank and a run directory, and nothing of Ray.

Between two steps `_boundary` does whatever is due at that position (the end of an epoch, an evaluation, a
checkpoint); `_train_step` does one optimizer step. Position and decisions are the same on every rank. Its
parts: `training_input` brings the microbatches, `step` and `tree_step` make one gradient of them, `updates`
applies it, `evaluator` judges the model, `records` keeps what is to be kept.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from raytrainer import build, checkpoint
from raytrainer.config import add_importable
from raytrainer.distributed import Process, broadcast_object
from raytrainer.errors import NonFiniteLossError, RaytrainerError, StorageError, UsageError, warn
from raytrainer.evaluator import Evaluator
from raytrainer.finished_step import FinishedStep
from raytrainer.heap import keep_freed_memory
from raytrainer.ledger import Ledger, NoLedger
from raytrainer.manifest import FOLDER, MODEL_FILE, TRAINING_FILE, list_checkpoints
from raytrainer.numerics import kernels_as_configured, numerics_of, refuse_unlike_ranks
from raytrainer.policy import DuePolicy
from raytrainer.randomness import StepRandomness
from raytrainer.records import Observer, Records
from raytrainer.result import Result
from raytrainer.resume import DATA_LENGTH, check_same_meaning, continued
from raytrainer.rundir import RunDirectory
from raytrainer.state import TrainState
from raytrainer.step import GradientStep, MicrobatchStep, refuse_communicating_modules
from raytrainer.timing import StepTimer
from raytrainer.training_input import TrainingInput
from raytrainer.tree_step import TreeStep
from raytrainer.updates import advance_schedules, update
from raytrainer.voting import LOSS, VoteReader

if TYPE_CHECKING:
    from raytrainer.config import Config

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


class StopWish(Protocol):
    """Where the loop looks for a wish to stop: None, or a word such as "SIGINT" or "resize"."""

    @property
    def requested(self) -> str | None: ...


class _NeverStop:
    requested = None


class Trainer:
    """Trains what a config describes, as one rank of a job.

    config: may hold objects in place of targets. process: this rank; read from torchrun's environment
    variables by default, a job of one without them. observer: gets rank 0's metric records and events. stop:
    looked at once a step; the step is finished and saved first. run_dir: opened from the config by default.
    started_at: Unix time at which the user's command started, for `time_to_first_step_s`. snapshot_dir: a
    folder in memory that outlives this process, for snapshots; none are taken without it.
    """

    def __init__(
        self,
        config: Config,
        *,
        process: Process | None = None,
        observer: Observer | None = None,
        stop: StopWish | None = None,
        run_dir: RunDirectory | None = None,
        started_at: float | None = None,
        snapshot_dir: str | None = None,
    ):
        if config.script is not None:
            raise UsageError("a config with a script has nothing to train: use raytrainer.run, or launch")
        self.config = config
        self.process = process or Process.from_environment()
        self._observer = observer or (lambda record: None)
        self._stop: StopWish = stop or _NeverStop()
        self._run_dir = run_dir
        self._started_at = started_at or time.time()
        self._snapshot_dir = snapshot_dir
        self._is_standalone = run_dir is None
        self._finished: FinishedStep | None = None
        self._records: Records | None = None

    def train(self) -> Result:
        """Trains to the end, or to a wish to stop; resumes from the run directory's newest checkpoint."""
        with self.opened():
            return self.conclude(self._run())

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, everything that training needs is there, as the newest checkpoint left it."""
        gpus = self.config.scaling.gpus_per_worker
        device = self.process.device(None if gpus == "auto" else gpus > 0)
        self._is_standalone = self._run_dir is None
        with (
            self.process.join(device),
            kernels_as_configured(self.config, device),
            self._directory() as self._run_dir,
            contextlib.ExitStack() as self._open,
        ):
            self._set_up(device)
            yield

    def conclude(self, status: str) -> Result:
        """Waits until all that the run leaves is written, and gives its result."""
        self._records.finish_checkpoints()
        result = self._records.result(status)
        if status != "resized":  # the run goes on: who resizes it tells of it
            self._records.event(status, step=result.steps)
        self._records.finish_logs()
        if self._is_standalone and self.process.is_first:
            self._run_dir.write_result(result)
        return result

    # Setting up ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _directory(self) -> Iterator[RunDirectory]:
        if self._run_dir is not None:
            yield self._run_dir
            return
        add_importable(self.config)
        opened = RunDirectory.open(self.config) if self.process.is_first else None
        with opened or contextlib.nullcontext():
            address = broadcast_object(opened and (opened.root, opened.token), self.process.world_size)
            run_dir = opened or RunDirectory(*address)
            self.config = continued(self.config, run_dir)
            if opened is not None:
                opened.write_description(self.config)
            try:
                yield run_dir
            except Exception as error:
                if opened is not None:
                    self._keep_failure(opened, error)
                raise

    def _keep_failure(self, run_dir: RunDirectory, error: Exception) -> None:
        """Writes the result of a failed run; where that fails too, the error on its way is the one
        to show."""
        exit_code = getattr(error, "exit_code", 1)
        with contextlib.suppress(StorageError):
            infos = list_checkpoints(run_dir.storage)
            known = {"steps": infos[-1].step, "epochs": infos[-1].epoch} if infos else {}
            text = str(error) if isinstance(error, RaytrainerError) else f"{type(error).__name__}: {error}"
            run_dir.write_result(
                Result("failed", exit_code, error=text, target=self.config.training.target, **known)
            )

    def _set_up(self, device: torch.device) -> None:
        config, process = self.config, self.process
        self.device = device
        if device.type == "cpu":
            keep_freed_memory()
        self.data = self._build_data()
        self.sampler = build.build_sampler(config, self.data, process.rank, process.world_size)
        self.steps_per_epoch = self.sampler.steps_per_epoch
        self.total_steps = config.training.total_steps(self.steps_per_epoch)
        model = build.build_model(config, device)
        task = build.build_task(config, model, device)
        num_microbatches = config.num_microbatches
        always_even = config.data.drop_last and num_microbatches % process.world_size == 0
        refuse_communicating_modules(model, always_even or process.world_size == 1)
        optimizers = build.build_optimizers(config, model, task)
        schedules = build.build_schedules(config, optimizers, self.total_steps)
        scaler = torch.amp.GradScaler(device.type) if config.training.precision == "fp16-mixed" else None
        ema = config.training.ema
        self.state = TrainState(model, task, optimizers, schedules, scaler, ema and ema.decay)
        self.metrics = build.build_metrics(config, device) if self.data.eval is not None else {}
        numerics = numerics_of(config, device)
        refuse_unlike_ranks(numerics, process)
        self._meaning = {**config.meaning(), DATA_LENGTH: len(self.data.train), **numerics}
        self._resume()
        self._finished = FinishedStep(self.state, process, device)
        self._ledger = self._new_ledger() if config.logging.ledger else NoLedger()
        if config.training.compile:
            model.compile(**config.training.compile_options)
        model.train()
        self._randomness = StepRandomness(config.seed, device)
        self.gradients = self._gradient_step()
        self._open.callback(self.gradients.close)
        self._votes = VoteReader(device, lag=0 if config.training.on_nan == "skip" else 2)
        self._timer = StepTimer()
        self._due = DuePolicy.from_config(config)
        warm_up = self.gradients.warm_up if process.world_size > 2 and len(optimizers) == 1 else None
        self._input = TrainingInput(config, self.data, self.sampler, device, self._timer, warm_up)
        self._open.callback(self._input.close)
        self._evaluator = Evaluator(
            config, self.data, self.state, self.metrics, process, device, self._randomness, self._autocast
        )
        self._open.callback(self._evaluator.close)
        self._records = Records(
            config,
            self._run_dir,
            process,
            self.state,
            self._finished,
            self._ledger,
            self._votes,
            self._meaning,
            observer=self._observer,
            started_at=self._started_at,
            total_steps=self.total_steps,
            snapshot_dir=self._snapshot_dir,
        )
        self._open.callback(self._records.close)

    def _build_data(self) -> build.Data:
        return build.build_data(self.config)

    def _gradient_step(self) -> MicrobatchStep:
        config, state = self.config, self.state
        common = {
            "autocast": self._autocast,
            "scale": state.scaler.scale if state.scaler is not None else lambda loss: loss,
            "seed": self._randomness.for_training,
            "may_lose_samples": config.data.on_bad_sample == "skip",
        }
        if config.training.determinism == "bitwise":
            return TreeStep(state.model, state.task, self.process, self.device, **common)
        return GradientStep(
            state.model,
            state.task,
            self.process,
            self.device,
            find_unused_parameters=config.training.find_unused_parameters,
            always_explicit=len(state.optimizers) > 1,
            **common,
        )

    def _resume(self) -> None:
        """Continues from the newest whole checkpoint; rank 0 says which, so that all take the same one."""
        storage = self._run_dir.storage
        info = None
        if self.process.is_first:
            latest = self._run_dir.while_there(lambda: checkpoint.load_latest(storage))
            info = latest and latest[0]
        info = broadcast_object(info, self.process.world_size)
        if info is None:
            return
        check_same_meaning(self._run_dir.root, info.meaning, self._meaning)
        if not self.process.is_first:
            names, folder = (MODEL_FILE, TRAINING_FILE), f"{FOLDER}/{info.name}"
            load = self._run_dir.while_there
            latest = (info, *load(lambda: checkpoint.load_files(storage, folder, info, names)))
        self.state.load(latest[1], latest[2])

    def _new_ledger(self) -> Ledger:
        events = self._run_dir.events() if self.process.is_first else []
        attempt = sum(event["event"] in ("started", "resumed") for event in events)
        attempt = broadcast_object(attempt, self.process.world_size)
        config, device = self.config, self.device
        return Ledger(self.process, device, attempt, config.num_microbatches, config.data.micro_batch_size)

    # The loop -----------------------------------------------------------------------------------------------

    def _run(self) -> str:
        self._records.begin()
        stopping = False
        while (status := self.between_steps(stopping)) is None:
            stopping = self._train_step()
        return status

    def between_steps(self, stopping: bool) -> str | None:
        """What is due after the last finished step; how the run has ended, None when another step is due.

        stopping: as the step returned.
        """
        progress = self.state.progress
        if stopping:
            self._save()
            return "resized" if self._stop.requested == "resize" else "stopped"
        self._boundary()
        if progress.step >= self.total_steps or progress.stopped_early:
            self._settle_votes()
            self._save()
            return "finished"
        return None

    def _train_step(self) -> bool:
        """One optimizer step; returns whether all ranks agreed to stop after it."""
        plan, microbatches = self._begin_step()
        step, wish = self.state.progress.step, self._stop.requested is not None
        if len(self.state.optimizers) == 1:
            self.gradients.zero_grad()
            self.gradients.compute(plan, microbatches, step, wish)
            stop = self._apply(plan)
        else:
            taken = list(_take(microbatches, len(plan.local)))
            self._ledger.exchange()
            stop, healthy = self._alternate(plan, taken, wish)
            self._finished.exchange(self.gradients.step_buffers)
            with self._finished.finishing():
                self._count_step(plan.num_samples, healthy)
        self._end_step(plan)
        return stop

    def _begin_step(self) -> tuple[Any, Iterator[Any]]:
        """The step's plan, and the microbatches from here on."""
        progress = self.state.progress
        microbatches = self._ledger.watch(self._input.microbatches(progress))
        plan = self.sampler.plan(progress.step_in_epoch, progress.epoch)
        self.state.task.step = progress.step
        return plan, microbatches

    def _apply(self, plan: Any) -> bool:
        """With the gradient there: the update, unless the loss was not finite. Whether to stop after it."""
        self._ledger.exchange()
        self._finished.exchange(self.gradients.step_buffers)
        self._votes.push(self.state.progress.step + 1, self.gradients.votes_grad)
        stop, healthy = self._read_votes()
        with self._finished.finishing():
            if healthy:
                self._update("")
            self._count_step(plan.num_samples, healthy)
        return stop

    def _end_step(self, plan: Any) -> None:
        self._records.step_finished()
        if self._records.takes_snapshots:
            with self._timer.outside():
                self._records.snapshot_if_due()
        self._timer.step(plan.num_samples)
        if self.state.progress.step % self.config.logging.every_n_steps == 0:
            self._records.log_step(self._timer.window(), self.gradients.last_metrics)
        self._records.check()

    def _count_step(self, num_samples: int, healthy: bool) -> None:
        progress = self.state.progress
        progress.step += 1
        progress.step_in_epoch += 1
        progress.samples_seen += num_samples
        progress.skipped_updates += not healthy
        progress.loss_sum = progress.loss_sum + self.gradients.votes_grad[LOSS]
        progress.loss_steps += 1
        self._ledger.finish(progress.step, progress.epoch)

    def _alternate(self, plan: Any, microbatches: list[Any], wish: bool) -> tuple[bool, bool]:
        """A step of several optimizers: each in its turn, over the same microbatches."""
        stop, all_healthy = False, True
        for name, optimizer in self.state.optimizers.items():
            self.gradients.zero_grad()
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.gradients.compute(plan, iter(microbatches), self.state.progress.step, wish, name, parameters)
            self._votes.push(self.state.progress.step + 1, self.gradients.votes_grad)
            wanted, healthy = self._read_votes()
            stop, all_healthy = stop or wanted, all_healthy and healthy
            self._finished.tear()
            if healthy:
                self._update(name)
        return stop, all_healthy

    def _update(self, name: str) -> None:
        norm = update(self.state, name, self.config.training.gradient_clip_norm)
        if norm is not None:
            self._timer.gradient_norm = norm

    def _read_votes(self, *, all_of_them: bool = False) -> tuple[bool, bool]:
        """(a rank wishes to stop, the loss is finite), for the steps whose votes are in."""
        stop, healthy = False, True
        for votes in self._votes.read(all_of_them=all_of_them):
            stop = stop or votes.stop
            self.state.progress.skipped_samples += votes.num_skipped
            if math.isfinite(votes.loss):
                continue
            healthy = False
            if self.config.training.on_nan == "stop":
                raise NonFiniteLossError(
                    f"the loss of step {votes.step} is {votes.loss}\n"
                    "  lower optimizer.lr or set training.gradient_clip_norm; "
                    "training.on_nan: skip leaves such steps out"
                )
            warn(f"the loss of step {votes.step} is {votes.loss}: its update is left out")
        return stop, healthy

    def _settle_votes(self) -> None:
        """Before anything is kept: no step may be waiting to turn out as not a number."""
        self._read_votes(all_of_them=True)

    def _boundary(self) -> None:
        """Does what is due after the last finished step: schedule, evaluation, checkpoint."""
        progress = self.state.progress
        epoch_ends = progress.step_in_epoch == self.steps_per_epoch
        last = progress.step >= self.total_steps
        due = self._due.at(progress.step, progress.epoch + 1 if epoch_ends else None, last)
        values = None
        if due.evaluate and self.data.eval is not None and progress.last_evaluation_step != progress.step:
            values = self._evaluate()
        # Only now, when no other rank is waited for any more: what a rank that outlives its peers holds is
        # either all of this or none of it.
        with self._finished.finishing():
            if epoch_ends:
                advance_schedules(self.state, "epoch")
                progress.epoch += 1
                progress.step_in_epoch = 0
                self._input.end_epoch()
            gained = False
            if values is not None:
                self._records.log_evaluation(values)
                gained = self._evaluator.take_in(values)
        if due.checkpoint or gained or self._due.minutes_are_over(self._records.minutes_since_save):
            self._save()

    def _evaluate(self) -> dict[str, float] | None:
        """What the evaluation gives; changes nothing that a checkpoint holds. None before the first step."""
        self._settle_votes()
        if self.state.progress.step == 0:
            return None
        with self._timer.outside():
            self.gradients.share_buffers()
            return self._evaluator.evaluate()

    # What is kept -------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self._settle_votes()
        if self._records.unsaved:
            with self._timer.outside():
                self._records.save()

    @property
    def finished_step(self) -> int | None:
        """The step whose whole state this rank holds, None if it holds none; may be asked in any thread."""
        return None if self._finished is None else self._finished.step

    def save_finished_step(self, committed_step: int) -> int | None:
        """Saves the state as of the last finished step, when other ranks are lost; returns that step.

        May be called in any thread, while this rank hangs or after it failed. committed_step: of the newest
        checkpoint there is. None where the state is not whole. Raises StorageError.
        """
        return None if self._records is None else self._records.save_finished_step(committed_step)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = _AUTOCAST.get(self.config.training.precision)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


def _take(items: Iterator[Any], number: int) -> Iterator[Any]:
    for _ in range(number):
        yield next(items)
