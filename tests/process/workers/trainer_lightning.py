"""Lightning's ``Trainer`` with ``EDLStrategy``: a small network with validation, a scheduler and checkpoints. Writes a
line for each step, the samples of each step, and the trained model's numbers at the end."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from edl.integrations.lightning import EDLStrategy
from tests.process.workers import trainer_script

options = trainer_script.parser().parse_args()


class Sums(pl.LightningModule):  # type: ignore[misc]
    """Learns to add up its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(8, 1))
        self.train_rows: Any = trainer_script.Rows(options.samples)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = ((self.layers(batch) - batch.sum(1, keepdim=True)) ** 2).mean()
        return loss

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("error", self.loss(batch), sync_dist=True)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(self.train_rows, batch_size=options.batch, shuffle=True)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        rows: Any = trainer_script.Rows(options.samples)
        return DataLoader(rows, batch_size=10)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, self.trainer.estimated_stepping_batches),
            "interval": "step"}}  # fmt: skip


class Log(pl.Callback):  # type: ignore[misc]
    """Writes a line for each step, in the form that the harness reads, and the step's samples."""

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        rows = module.train_rows
        trainer_script.log(options, trainer.global_step, trainer.global_rank, trainer.world_size, rows.read)
        rows.read = []


def main() -> None:
    trainer_script.wait_until_free(options.folder)
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    saving = pl.callbacks.ModelCheckpoint(options.folder / "out", every_n_train_steps=25)
    trainer = pl.Trainer(
        strategy=EDLStrategy(global_batch=options.global_batch),
        accelerator="cpu",
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        val_check_interval=5 * options.accumulate,
        log_every_n_steps=10,
        callbacks=[Log(), saving, pl.callbacks.EarlyStopping("error", patience=10**6)],
        logger=pl.loggers.CSVLogger(options.folder, version=0),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Sums()
    trainer.fit(module)
    stopping = trainer.early_stopping_callback
    trainer_script.write_result(
        options.folder,
        trainer.global_rank,
        trainer.global_step,
        module.state_dict(),
        rate=[config.scheduler.get_last_lr()[0] for config in trainer.lr_scheduler_configs],
        waited=stopping.wait_count,
        best=float(stopping.best_score),
        epoch=trainer.current_epoch,
        error=float(trainer.callback_metrics["error"]),
    )


if __name__ == "__main__":
    main()
