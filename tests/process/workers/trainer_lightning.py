"""Lightning's ``Trainer`` with ``EDLStrategy``: a small network with validation, a scheduler and checkpoints. Writes a
line for each step, the samples of each step, and the trained model's numbers at the end."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from edl.integrations.lightning import EDLStrategy


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4, help="samples of each worker at once")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--dropout", type=float, default=0.0)
    return parser.parse_args()


options = read_arguments()


class Rows(Dataset[torch.Tensor]):
    """Rows of numbers. Notes which of them were read."""

    def __init__(self) -> None:
        self.rows = torch.randn(options.samples, 8, generator=torch.Generator().manual_seed(3))
        self.read: list[int] = []

    def __len__(self) -> int:
        return int(options.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return self.rows[index]


class Sums(pl.LightningModule):  # type: ignore[misc]
    """Learns to add up its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(8, 1))
        self.train_rows = Rows()

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
        return DataLoader(Rows(), batch_size=10)

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
        step = trainer.global_step
        number = int(os.environ.get("EDL_ROUND", "1"))
        node = os.environ.get("EDL_NODE_ID", "none")
        line = {"t": time.monotonic(), "step": step, "rank": trainer.global_rank, "world": trainer.world_size,
                "round": number, "pid": os.getpid(), "node": node}  # fmt: skip
        place = f"{node}.{number}.{trainer.global_rank}.{os.getpid()}"
        with (options.folder / f"{place}.steps").open("a") as file:
            file.write(json.dumps(line) + "\n")
        with (options.folder / f"{place}.samples").open("a") as file:
            file.write(json.dumps([step, module.train_rows.read]) + "\n")
        module.train_rows.read = []
        if not (options.folder / "hurry").exists():
            time.sleep(options.pause)


def main() -> None:
    while (options.folder / "held").exists():  # a replacement that takes its time
        time.sleep(0.05)
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
    numbers = torch.cat([value.flatten() for value in module.state_dict().values()]).double()
    stopping = trainer.early_stopping_callback
    result = {"step": trainer.global_step, "sum": float(numbers.sum()), "norm": float(numbers.norm()),
              "rate": [config.scheduler.get_last_lr()[0] for config in trainer.lr_scheduler_configs],
              "waited": stopping.wait_count, "best": float(stopping.best_score), "epoch": trainer.current_epoch,
              "error": float(trainer.callback_metrics["error"])}  # fmt: skip
    (options.folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
