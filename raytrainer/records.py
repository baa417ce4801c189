"""What a training leaves behind while it runs: metric records, events, checkpoints, snapshots, its result.

Every rank has one of these; only rank 0's writes, but for `save_finished_step`, which any rank may be left
to do.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from raytrainer import checkpoint, ledger_files, loggers
from raytrainer.distributed import Process
from raytrainer.finished_step import FinishedStep
from raytrainer.ledger import Ledger, NoLedger
from raytrainer.manifest import FOLDER, folder_name
from raytrainer.result import Result
from raytrainer.rundir import RunDirectory
from raytrainer.snapshots import SnapshotWriter
from raytrainer.state import TrainState
from raytrainer.step_mark import StepMark, last_marked_step
from raytrainer.voting import VoteReader

if TYPE_CHECKING:
    from raytrainer.config import Config

Observer = Callable[[dict[str, Any]], None]


class Records:
    """meaning: what a checkpoint is compared with on resume; started_at: Unix time of the user's command;
    snapshot_dir: a folder in memory that outlives this process, None for no snapshots."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDirectory,
        process: Process,
        state: TrainState,
        finished: FinishedStep,
        ledger: Ledger | NoLedger,
        votes: VoteReader,
        meaning: dict[str, Any],
        *,
        observer: Observer,
        started_at: float,
        total_steps: int,
        snapshot_dir: str | None,
    ):
        self._config, self._run_dir, self._process = config, run_dir, process
        self._state, self._finished, self._ledger, self._votes = state, finished, ledger, votes
        self._meaning, self._observer = meaning, observer
        self._started_at, self._total_steps = started_at, total_steps
        self._first_step_at: float | None = None
        self._mark: StepMark | None = None
        self._snapshots: SnapshotWriter | None = None
        self._logger: Any = loggers.NoLogger()
        self._writer: Any = checkpoint.NoWriter()
        self._last_saved, self._last_save_at = self._place(), time.monotonic()
        if process.is_first:
            self._open(snapshot_dir)

    def _open(self, snapshot_dir: str | None) -> None:
        config, run_dir, step = self._config, self._run_dir, self._state.progress.step
        loggers.forget_after(run_dir, step)
        checkpoint.delete_orphans(run_dir)
        ledger_files.delete_after(run_dir.storage, step)
        sinks: list[loggers.Sink] = [loggers.ObserverSink(self._observer)]
        if "jsonl" in config.logging.sinks:
            sinks.append(loggers.JsonlSink(run_dir))
        if "tensorboard" in config.logging.sinks:
            sinks.append(loggers.TensorBoardSink(run_dir, step))
        self._logger = loggers.Logger(sinks)
        every = config.checkpoint.snapshot
        if snapshot_dir is not None and every != "off":
            steps = every["steps"] if isinstance(every, dict) else None
            self._snapshots = SnapshotWriter(snapshot_dir, run_dir, steps, self._tell_pace)
        self._writer = checkpoint.CheckpointWriter(
            run_dir,
            num_to_keep=config.checkpoint.num_to_keep,
            monitor=config.checkpoint.monitor,
            mode=config.checkpoint.mode,
            on_commit=lambda info: self.event("checkpointed", step=info.step, checkpoint=info.name),
        )

    def check(self) -> None:
        """Raises what went wrong in writing since the last call."""
        self._writer.check()
        self._logger.check()

    def finish_checkpoints(self) -> None:
        """Waits until every checkpoint handed over is whole. Raises StorageError."""
        self._writer.close()

    def finish_logs(self) -> None:
        """Waits until every record is written. Raises StorageError."""
        self._logger.close()

    def close(self) -> None:
        """Ends whatever is open; what was handed over is still written."""
        for writer in (self._writer, self._logger):
            # Its error was raised by `finish_checkpoints` or `finish_logs`, or there is another on its way.
            with contextlib.suppress(Exception):
                writer.close()
        for part in (self._snapshots, self._mark):
            if part is not None:
                part.close()

    # Told -------------------------------------------------------------------------------------------------

    def event(self, event: str, **details: Any) -> None:
        if self._process.is_first:
            self._observer(self._run_dir.event(event, world_size=self._process.world_size, **details))

    def begin(self) -> None:
        """Tells of the start, or from where it goes on, and marks each step from here."""
        progress = self._state.progress
        if not self._process.is_first:
            return
        storage = self._run_dir.storage
        marked = last_marked_step(storage)
        if progress.step == 0 and not marked:
            self.event("started", step=0, epoch=0)
        else:
            lost = None if marked is None else max(0, marked - progress.step)
            self.event("resumed", step=progress.step, epoch=progress.epoch, lost_steps=lost)
        self._mark = StepMark(storage)

    def step_finished(self) -> None:
        if self._mark is not None:
            self._mark.set(self._state.progress.step)
        if self._first_step_at is None:
            self._first_step_at = time.time()

    def log_step(self, window: dict[str, Any], more: dict[str, Any]) -> None:
        """window: of StepTimer; more: the numbers that the task gives in its training steps."""
        progress = self._state.progress
        loss = progress.loss_sum / max(1, progress.loss_steps)
        progress.loss_sum, progress.loss_steps = 0.0, 0
        # On a GPU a number is read later, by the logger's thread, so that the loop does not wait for it.
        on_device = isinstance(loss, torch.Tensor) and loss.device.type != "cpu"
        progress.metrics["train/loss"] = loss = loss if on_device else float(loss)
        optimizer = next(iter(self._state.optimizers.values()))
        self._log(
            {
                "loss": loss,
                **window,
                "lr": optimizer.param_groups[0]["lr"],
                "world_size": self._process.world_size,
                "total_steps": self._total_steps,
                **more,
            }
        )

    def log_evaluation(self, values: dict[str, float]) -> None:
        self._log({f"eval/{name}": value for name, value in values.items()})

    def _log(self, values: dict[str, Any]) -> None:
        progress = self._state.progress
        place = {"step": progress.step, "epoch": progress.epoch, "time_s": round(time.time(), 3)}
        self._logger.log({**place, **values})

    def _tell_pace(self, every_s: float, cost_s: float) -> None:
        step = self._state.progress.step
        self.event("snapshots", step=step, every_s=round(every_s, 2), cost_s=round(cost_s, 4))

    # Saved ------------------------------------------------------------------------------------------------

    @property
    def minutes_since_save(self) -> float:
        return (time.monotonic() - self._last_save_at) / 60

    @property
    def unsaved(self) -> bool:
        """Whether there is something that the last checkpoint does not have."""
        return self._place() != self._last_saved

    def save(self) -> None:
        """Hands a copy of the state to the checkpoint writer."""
        if self._process.is_first:
            lines = self._ledger.lines_after(self._last_saved[0])
            self._writer.submit(self._state.snapshot(self._meaning, lines))
        self._ledger.saved(self._state.progress.step)
        self._last_saved, self._last_save_at = self._place(), time.monotonic()

    def _place(self) -> tuple[int, int, int]:
        """Changes whenever there is something new to save: a step, the end of an epoch, an evaluation."""
        progress = self._state.progress
        return progress.step, progress.epoch, progress.last_evaluation_step

    @property
    def takes_snapshots(self) -> bool:
        return self._snapshots is not None

    def snapshot_if_due(self) -> None:
        if self._snapshots is not None:
            self._snapshots.take_if_due(self._state.progress.step, lambda: self._copy_finished_step(0))

    def save_finished_step(self, committed_step: int) -> int | None:
        """As `Trainer.save_finished_step`."""
        snapshot = self._copy_finished_step(committed_step)
        if snapshot is None or snapshot.step <= committed_step:
            return None
        if self._process.is_first:
            # Its own writer, which may be busy with the checkpoint before, or closed where training failed.
            self._writer.close_with(snapshot)
            return snapshot.step
        ledger_files.delete_after(self._run_dir.storage, committed_step)
        info = checkpoint.save(self._run_dir, snapshot)
        world_size, rank = self._process.world_size, self._process.rank
        self._observer(
            self._run_dir.event(
                "checkpointed", world_size=world_size, step=info.step, checkpoint=info.name, rank=rank
            )
        )
        return info.step

    def _copy_finished_step(self, committed_step: int) -> checkpoint.Snapshot | None:
        """The state as of the last finished step, with the ledger's lines since `committed_step`."""
        snapshot = self._finished.snapshot(
            lambda: self._state.snapshot(self._meaning, self._ledger.lines_after(committed_step))
        )
        if snapshot is None:
            return None
        for votes in self._votes.pending(snapshot.step):
            snapshot.training["progress"]["skipped_samples"] += votes.num_skipped
            if not math.isfinite(votes.loss):
                return None
        return snapshot

    # In the end -------------------------------------------------------------------------------------------

    def result(self, status: str) -> Result:
        progress = self._state.progress
        weights, state = self._state.fingerprints()
        first_step_s = self._first_step_at and round(self._first_step_at - self._started_at, 3)
        return Result(
            status=status,
            steps=progress.step,
            epochs=progress.epoch,
            samples_seen=progress.samples_seen,
            skipped_samples=progress.skipped_samples,
            skipped_updates=progress.skipped_updates,
            **(self._run_dir.history() if self._process.is_first else {}),
            metrics={name: float(value) for name, value in progress.metrics.items()},
            best=self._best(),
            weights_sha256=weights,
            state_sha256=state,
            wall_s=round(time.time() - self._started_at, 3),
            time_to_first_step_s=first_step_s,
            target=self._config.training.target,
            checkpoint=f"{FOLDER}/{folder_name(progress.step)}" if progress.step else None,
            run_dir=self._run_dir.root,
        )

    def _best(self) -> dict[str, Any] | None:
        progress, monitor = self._state.progress, self._config.checkpoint.monitor
        if monitor is None or progress.best_step is None:
            return None
        name = folder_name(progress.best_step)
        return {
            "step": progress.best_step,
            "metric": monitor,
            "value": progress.best_value,
            "checkpoint": name,
        }
