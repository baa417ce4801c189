"""The same with Lightning's Trainer, started by torchrun; no progress bar, checkpoints or model summary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.benchmarks.result import save_result
from tests.benchmarks.turns import join_turns
from tests.benchmarks.workload import Workload


class Pairs:
    """(images, labels) of the common loader, in the order of the trainer's present epoch."""

    def __init__(self, loader: Any, trainer: pl.Trainer):
        self._loader, self._trainer = loader, trainer

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Lightning may ask for more iterators than it uses; this begins with the first batch that it takes.
        self._loader.batch_sampler.set_epoch(self._trainer.current_epoch)
        for loaded in self._loader:
            yield loaded.batch


class Classifier(pl.LightningModule):
    def __init__(self, workload: Workload):
        super().__init__()
        self.workload, self.model, self.criterion = workload, workload.build_model(), nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_number: int) -> torch.Tensor:
        images, labels = batch
        loss = self.criterion(self.model(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.workload.build_optimizer(self.model)


class TakeTurns(pl.Callback):
    def __init__(self) -> None:
        self._turns = join_turns()

    def on_train_batch_start(self, *_: Any) -> None:
        self._turns.step()


def main() -> None:
    workload = Workload.from_environment()
    module = Classifier(workload)
    folder = os.environ["BENCH_FOLDER"]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workload.num_ranks,
        strategy="ddp",
        max_steps=workload.num_steps,
        max_epochs=-1,
        log_every_n_steps=workload.every_n_steps,
        logger=CSVLogger(folder),
        default_root_dir=folder,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[TakeTurns()],
    )
    trainer.fit(module, Pairs(workload.build_loader(int(os.environ["RANK"])), trainer))
    if trainer.is_global_zero:
        save_result(module.model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
