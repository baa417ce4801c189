"""The training loop. It knows its rank and a run directory, and nothing of Ray.

Between two steps `_boundary` does whatever is due at that position (the end of an epoch, an evaluation, a
checkpoint); `_train_step` does one optimizer step. Position and decisions are the same on every rank.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from raytrainer import build, checkpoint, ledger_files, loggers
from raytrainer.config import add_importable
from raytrainer.data import EvalBatches, build_loader, mix_seed
from raytrainer.distributed import Process, broadcast_object, broadcast_tensors
from raytrainer.errors import NonFiniteLossError, RaytrainerError, ResumeError, StorageError, UsageError, warn
from raytrainer.evaluation import evaluate
from raytrainer.finished_step import FinishedStep
from raytrainer.heap import keep_freed_memory
from raytrainer.ledger import Ledger, NoLedger
from raytrainer.manifest import FOLDER, MODEL_FILE, TRAINING_FILE, folder_name, list_checkpoints
from raytrainer.numerics import kernels_as_configured, numerics_of, refuse_unlike_ranks
from raytrainer.policy import DuePolicy, improves
from raytrainer.result import Result
from raytrainer.resume import DATA_LENGTH, check_same_meaning, continued
from raytrainer.rundir import RunDirectory
from raytrainer.snapshots import SnapshotWriter
from raytrainer.state import TrainState
from raytrainer.step import GradientStep, MicrobatchStep, refuse_communicating_modules
from raytrainer.step_mark import StepMark, last_marked_step
from raytrainer.timing import StepTimer
from raytrainer.transfer import ahead_of_use
from raytrainer.tree_step import TreeStep
from raytrainer.voting import LOSS, VoteReader

if TYPE_CHECKING:
    from raytrainer.config import Config

_STEP_STREAM = 0x57E9  # keeps dropout's seeds apart from those of shuffling and augmentation
_EVALUATION_STREAM = 0xE7A1
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}

Observer = Callable[[dict[str, Any]], None]


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
        self._first_step_at: float | None = None
        self._mark: StepMark | None = None
        self._named: set[int] = set()  # samples left out that were told already
        self._snapshot_dir = snapshot_dir
        self._snapshots: SnapshotWriter | None = None

    def train(self) -> Result:
        """Trains to the end, or to a wish to stop; resumes from the run directory's newest checkpoint."""
        gpus = self.config.scaling.gpus_per_worker
        device = self.process.device(None if gpus == "auto" else gpus > 0)
        standalone = self._run_dir is None
        with (
            self.process.join(device),
            kernels_as_configured(self.config, device),
            self._directory() as self._run_dir,
            contextlib.ExitStack() as self._open,
        ):
            self._set_up(device)
            try:
                status = self._run()
                self._writer.close()
            except BaseException:
                # What was handed over is still written; the error on its way is the one to show.
                for writer in (self._writer, self._logger):
                    with contextlib.suppress(Exception):
                        writer.close()
                raise
            result = self._result(status)
            if status != "resized":  # the run goes on: who resizes it tells of it
                self._event(status, step=result.steps)
            self._logger.close()
            if standalone and self.process.is_first:
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
        self.data = build.build_data(config)
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
        self.gradients = self._gradient_step()
        self._votes = VoteReader(device, lag=0 if config.training.on_nan == "skip" else 2)
        self._loader = self._build_loader(self.data.train, self.sampler, "data.train")
        self._eval_loader: Any = None
        self._timer = StepTimer()
        self._due = DuePolicy.from_config(config)
        self._last_saved, self._last_save_at = self._place(), time.monotonic()
        self._open_sinks()
        self._microbatches: Iterator[Any] | None = None

    def _gradient_step(self) -> MicrobatchStep:
        config, state = self.config, self.state
        common = {
            "autocast": self._autocast,
            "scale": state.scaler.scale if state.scaler is not None else lambda loss: loss,
            "seed": self._seed,
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

    def _build_loader(self, dataset: Any, sampler: Any, where: str) -> Any:
        config = self.config
        loader = build_loader(
            dataset,
            sampler,
            config.data.loader,
            collate_fn=self.data.collate_fn,
            seed=config.seed,
            on_bad_sample=config.data.on_bad_sample,
            device_type=self.device.type,
            where=where,
        )
        self._open.callback(loader.close)
        return loader

    def _open_sinks(self) -> None:
        config, run_dir = self.config, self._run_dir
        if not self.process.is_first:
            self._logger: Any = loggers.NoLogger()
            self._writer: Any = checkpoint.NoWriter()
            return
        loggers.forget_after(run_dir, self.state.progress.step)
        checkpoint.delete_orphans(run_dir)
        ledger_files.delete_after(run_dir.storage, self.state.progress.step)
        sinks: list[loggers.Sink] = [loggers.ObserverSink(self._observer)]
        if "jsonl" in config.logging.sinks:
            sinks.append(loggers.JsonlSink(run_dir))
        if "tensorboard" in config.logging.sinks:
            sinks.append(loggers.TensorBoardSink(run_dir, self.state.progress.step))
        self._logger = loggers.Logger(sinks)
        every = config.checkpoint.snapshot
        if self._snapshot_dir is not None and every != "off":
            steps = every["steps"] if isinstance(every, dict) else None
            self._snapshots = SnapshotWriter(self._snapshot_dir, run_dir, steps, self._tell_pace)
            self._open.callback(self._snapshots.close)
        self._writer = checkpoint.CheckpointWriter(
            run_dir,
            num_to_keep=config.checkpoint.num_to_keep,
            monitor=config.checkpoint.monitor,
            mode=config.checkpoint.mode,
            on_commit=lambda info: self._event("checkpointed", step=info.step, checkpoint=info.name),
        )

    def _resume(self) -> None:
        """Continues from the newest whole checkpoint; rank 0 says which, so that all take the same one."""
        storage = self._run_dir.storage
        info = None
        if self.process.is_first:
            latest = checkpoint.load_latest(storage)
            info = latest and latest[0]
        info = broadcast_object(info, self.process.world_size)
        if info is None:
            return
        check_same_meaning(self._run_dir.root, info.meaning, self._meaning)
        if not self.process.is_first:
            names = (MODEL_FILE, TRAINING_FILE)
            latest = (info, *checkpoint.load_files(storage, f"{FOLDER}/{info.name}", info, names))
        self.state.load(latest[1], latest[2])

    def _new_ledger(self) -> Ledger:
        events = self._run_dir.events() if self.process.is_first else []
        attempt = sum(event["event"] in ("started", "resumed") for event in events)
        attempt = broadcast_object(attempt, self.process.world_size)
        config, device = self.config, self.device
        return Ledger(self.process, device, attempt, config.num_microbatches, config.data.micro_batch_size)

    # The loop -----------------------------------------------------------------------------------------------

    def _run(self) -> str:
        progress = self.state.progress
        self._tell_beginning()
        stopping = False
        while True:
            if stopping:
                self._save()
                return "resized" if self._stop.requested == "resize" else "stopped"
            self._boundary()
            if progress.step >= self.total_steps or progress.stopped_early:
                self._settle_votes()
                self._save()
                return "finished"
            stopping = self._train_step()
            self._writer.check()
            self._logger.check()

    def _tell_beginning(self) -> None:
        progress = self.state.progress
        if not self.process.is_first:
            return
        storage = self._run_dir.storage
        marked = last_marked_step(storage)
        if progress.step == 0 and not marked:
            self._event("started", step=0, epoch=0)
        else:
            lost = None if marked is None else max(0, marked - progress.step)
            self._event("resumed", step=progress.step, epoch=progress.epoch, lost_steps=lost)
        self._mark = StepMark(storage)
        self._open.callback(self._mark.close)

    def _train_step(self) -> bool:
        """One optimizer step; returns whether all ranks agreed to stop after it."""
        progress, timer = self.state.progress, self._timer
        microbatches = self._ledger.watch(self._next_microbatches())
        plan = self.sampler.plan(progress.step_in_epoch, progress.epoch)
        wish = self._stop.requested is not None
        self.state.task.step = progress.step
        if len(self.state.optimizers) == 1:
            self.gradients.zero_grad()
            self.gradients.compute(plan, microbatches, progress.step, wish)
            self._ledger.exchange()
            self._finished.exchange(self.gradients.step_buffers)
            self._votes.push(progress.step + 1, self.gradients.votes_grad)
            stop, healthy = self._read_votes()
            with self._finished.finishing():
                if healthy:
                    self._update("")
                self._count_step(plan.num_samples, healthy)
        else:
            taken = list(_take(microbatches, len(plan.local)))
            self._ledger.exchange()
            stop, healthy = self._alternate(plan, taken, wish)
            self._finished.exchange(self.gradients.step_buffers)
            with self._finished.finishing():
                self._count_step(plan.num_samples, healthy)
        self._after_step()
        if self._snapshots is not None:
            with timer.outside():
                self._snapshots.take_if_due(progress.step, lambda: self._copy_finished_step(0))
        timer.step(plan.num_samples)
        if progress.step % self.config.logging.every_n_steps == 0:
            self._log_step()
        return stop

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
        state, optimizer = self.state, self.state.optimizers[name]
        clip_norm, scaler = self.config.training.gradient_clip_norm, state.scaler
        if clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._timer.gradient_norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        advanced = True
        if scaler is None:
            optimizer.step()
        else:
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            advanced = scaler.get_scale() >= scale
            state.progress.skipped_updates += not advanced
        schedule = state.schedules.get(name)
        if advanced and schedule is not None and schedule.interval == "step":
            schedule.scheduler.step()
        if state.ema is not None and name == list(state.optimizers)[-1]:
            state.ema.update_parameters(state.model)

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

    def _next_microbatches(self) -> Iterator[Any]:
        progress = self.state.progress
        if self._microbatches is None:
            self.sampler.set_position(progress.epoch, progress.step_in_epoch)
            loaded = self._naming_what_is_left_out(self._timer.timed(iter(self._loader)))
            self._microbatches = ahead_of_use(loaded, self.device)
            if self._first_step_at is None:
                self._microbatches = self._warm_up(self._microbatches)
        return self._microbatches

    def _naming_what_is_left_out(self, microbatches: Iterator[Any]) -> Iterator[Any]:
        """The same microbatches; each sample left out is named once, by the rank that met it."""
        if self.config.data.on_bad_sample != "skip":
            return microbatches
        return self._with_names(microbatches)

    def _with_names(self, microbatches: Iterator[Any]) -> Iterator[Any]:
        for loaded in microbatches:
            for sample in loaded.skipped:
                if sample.index not in self._named:
                    self._named.add(sample.index)
                    warn(f"{sample.name} is left out: {sample.reason}")
            yield loaded

    def _warm_up(self, microbatches: Iterator[Any]) -> Iterator[Any]:
        """Shows the first microbatch to the gradient step beforehand (see `GradientStep.warm_up`)."""
        if self.process.world_size <= 2 or len(self.state.optimizers) > 1:
            return microbatches
        first = next(microbatches, None)
        if first is None:  # this rank is idle in a short last step: it warms up on the first samples
            batches = EvalBatches(min(len(self.data.train), self.config.data.micro_batch_size), 10**9)
            first = next(
                iter(
                    ahead_of_use(
                        iter(self._build_loader(self.data.train, batches, "data.train")), self.device
                    )
                )
            )
            self.gradients.warm_up(first)
            return microbatches
        self.gradients.warm_up(first)
        return _chain(first, microbatches)

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
                self._advance_schedules("epoch")
                progress.epoch += 1
                progress.step_in_epoch = 0
                self._microbatches = None
            gained = values is not None and self._note_evaluation(values)
        minutes = (time.monotonic() - self._last_save_at) / 60
        if due.checkpoint or gained or self._due.minutes_are_over(minutes):
            self._save()

    def _advance_schedules(self, interval: str, value: float | None = None) -> None:
        for schedule in self.state.schedules.values():
            if schedule.interval == interval:
                with warnings.catch_warnings():
                    # True of this process alone, when the run was resumed right after an epoch's last step.
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                    schedule.scheduler.step(*(() if value is None else (value,)))

    def _evaluate(self) -> dict[str, float] | None:
        """What the evaluation gives; changes nothing that a checkpoint holds. None before the first step."""
        self._settle_votes()
        if self.state.progress.step == 0:
            return None
        with self._timer.outside():
            self.gradients.share_buffers()
            if self.state.ema is not None:
                broadcast_tensors(self.state.ema.buffers(), self.process.world_size)
            return self._evaluate_model()

    def _note_evaluation(self, values: dict[str, float]) -> bool:
        """Decides what follows from an evaluation; returns whether the monitored value is the best so far."""
        progress, config = self.state.progress, self.config
        metrics = {f"eval/{name}": value for name, value in values.items()}
        progress.metrics.update(metrics)
        progress.last_evaluation_step = progress.step
        self._logger.log(
            {"step": progress.step, "epoch": progress.epoch, "time_s": round(time.time(), 3), **metrics}
        )
        stopping = config.training.early_stopping
        if stopping is not None:
            value = self._monitored(stopping.monitor, "training.early_stopping.monitor")
            if improves(value, progress.stop_best, stopping.mode, stopping.min_delta):
                progress.stop_best, progress.evaluations_without_gain = value, 0
            else:
                progress.evaluations_without_gain += 1
            progress.stopped_early = progress.evaluations_without_gain >= stopping.patience
        monitor = config.checkpoint.monitor
        if monitor is None:
            self._advance_schedules("eval", values.get("loss"))
            return False
        value = self._monitored(monitor, "checkpoint.monitor")
        self._advance_schedules("eval", value)
        if not improves(value, progress.best_value, config.checkpoint.mode):
            return False
        progress.best_value, progress.best_step = value, progress.step
        return True

    def _evaluate_model(self) -> dict[str, float]:
        task, process = self.state.task, self.process
        if self._eval_loader is None:
            size = self.config.eval.batch_size or self.config.data.micro_batch_size
            batches = EvalBatches(len(self.data.eval), size, process.rank, process.world_size)
            self._eval_loader = self._build_loader(self.data.eval, batches, "data.eval")
        model = self.state.evaluated_model
        task.model, trained = model, task.model
        try:
            return evaluate(
                model,
                task,
                ahead_of_use(iter(self._eval_loader), self.device),
                self.metrics,
                process,
                self.device,
                self._autocast,
                seed=lambda microbatch: self._seed(0, microbatch, _EVALUATION_STREAM),
                bitwise=self.config.training.determinism == "bitwise",
            )
        finally:
            task.model = trained

    def _monitored(self, name: str, key: str) -> float:
        if name not in self.state.progress.metrics:
            known = ", ".join(sorted(self.state.progress.metrics)) or "none"
            raise ResumeError(f"{key} = {name}\n  the evaluation gives no such number; it gives: {known}")
        return float(self.state.progress.metrics[name])

    # What is kept -------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self._settle_votes()
        if self._place() == self._last_saved:
            return
        if self.process.is_first:
            with self._timer.outside():
                lines = self._ledger.lines_after(self._last_saved[0])
                self._writer.submit(self.state.snapshot(self._meaning, lines))
        self._ledger.saved(self.state.progress.step)
        self._last_saved, self._last_save_at = self._place(), time.monotonic()

    @property
    def finished_step(self) -> int | None:
        """The step whose whole state this rank holds, None if it holds none; may be asked in any thread."""
        finished = getattr(self, "_finished", None)
        return None if finished is None else finished.step

    def save_finished_step(self, committed_step: int) -> int | None:
        """Saves the state as of the last finished step, when other ranks are lost; returns that step.

        May be called in any thread, while this rank hangs or after it failed. committed_step: of the newest
        checkpoint there is. None where the state is not whole. Raises StorageError.
        """
        snapshot = self._copy_finished_step(committed_step)
        if snapshot is None or snapshot.step <= committed_step:
            return None
        if self.process.is_first:
            # Its own writer, which may be busy with the checkpoint before, or closed where training failed.
            self._writer.close_with(snapshot)
            return snapshot.step
        ledger_files.delete_after(self._run_dir.storage, committed_step)
        info = checkpoint.save(self._run_dir, snapshot)
        world_size, rank = self.process.world_size, self.process.rank
        self._observer(
            self._run_dir.event(
                "checkpointed", world_size=world_size, step=info.step, checkpoint=info.name, rank=rank
            )
        )
        return info.step

    def _copy_finished_step(self, committed_step: int) -> checkpoint.Snapshot | None:
        """The state as of the last finished step, with the ledger's lines since `committed_step`."""
        snapshot = self._finished.snapshot(
            lambda: self.state.snapshot(self._meaning, self._ledger.lines_after(committed_step))
        )
        if snapshot is None:
            return None
        for votes in self._votes.pending(snapshot.step):
            snapshot.training["progress"]["skipped_samples"] += votes.num_skipped
            if not math.isfinite(votes.loss):
                return None
        return snapshot

    def _tell_pace(self, every_s: float, cost_s: float) -> None:
        step = self.state.progress.step
        self._event("snapshots", step=step, every_s=round(every_s, 2), cost_s=round(cost_s, 4))

    def _place(self) -> tuple[int, int, int]:
        """Changes whenever there is something new to save: a step, the end of an epoch, an evaluation."""
        progress = self.state.progress
        return progress.step, progress.epoch, progress.last_evaluation_step

    def _log_step(self) -> None:
        progress = self.state.progress
        window = self._timer.window()
        loss = progress.loss_sum / max(1, progress.loss_steps)
        progress.loss_sum, progress.loss_steps = 0.0, 0
        progress.metrics["train/loss"] = loss = float(loss) if self.device.type == "cpu" else loss
        optimizer = next(iter(self.state.optimizers.values()))
        self._logger.log(
            {
                "step": progress.step,
                "epoch": progress.epoch,
                "time_s": round(time.time(), 3),
                "loss": loss,
                **window,
                "lr": optimizer.param_groups[0]["lr"],
                "world_size": self.process.world_size,
                "total_steps": self.total_steps,
                **self.gradients.last_metrics,
            }
        )

    def _event(self, event: str, **details: Any) -> None:
        if self.process.is_first:
            self._observer(self._run_dir.event(event, world_size=self.process.world_size, **details))

    def _after_step(self) -> None:
        if self._mark is not None:
            self._mark.set(self.state.progress.step)
        if self._first_step_at is None:
            self._first_step_at = time.time()

    def _result(self, status: str) -> Result:
        progress = self.state.progress
        weights, state = self.state.fingerprints()
        monitor = self.config.checkpoint.monitor
        best = None
        if monitor is not None and progress.best_step is not None:
            name = folder_name(progress.best_step)
            best = {
                "step": progress.best_step,
                "metric": monitor,
                "value": progress.best_value,
                "checkpoint": name,
            }
        return Result(
            status=status,
            steps=progress.step,
            epochs=progress.epoch,
            samples_seen=progress.samples_seen,
            skipped_samples=progress.skipped_samples,
            skipped_updates=progress.skipped_updates,
            **(self._run_dir.history() if self.process.is_first else {}),
            metrics={name: float(value) for name, value in progress.metrics.items()},
            best=best,
            weights_sha256=weights,
            state_sha256=state,
            wall_s=round(time.time() - self._started_at, 3),
            time_to_first_step_s=self._first_step_at and round(self._first_step_at - self._started_at, 3),
            target=self.config.training.target,
            checkpoint=f"{FOLDER}/{folder_name(progress.step)}" if progress.step else None,
            run_dir=self._run_dir.root,
        )

    # Randomness and precision -------------------------------------------------------------------------------

    def _seed(self, step: int, microbatch: int, stream: int = _STEP_STREAM) -> None:
        """Dropout and whatever else a training step draws depend on (seed, step, microbatch) alone."""
        seed = mix_seed(stream, self.config.seed, step, microbatch)
        random.seed(seed)
        # NumPy takes more than 32 bits only as an array, which is several times slower to seed with.
        np.random.seed(seed & 0xFFFF_FFFF)
        # torch.manual_seed would queue the seed, with a stack trace, for GPUs that this process never starts.
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = _AUTOCAST.get(self.config.training.precision)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


def _take(items: Iterator[Any], number: int) -> Iterator[Any]:
    for _ in range(number):
        yield next(items)


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest
