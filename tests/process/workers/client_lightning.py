"""PyTorch Lightning's Trainer with DistributedDataParallel on the CPU, as one writes it for torchrun."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):  # type: ignore[misc]  # not known to mypy
    """Learns to add up its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (inputs,) = batch
        loss: torch.Tensor = ((self.layer(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=2,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    model = Line()
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
    seen = {
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "rank": trainer.global_rank,
        "world": trainer.world_size,
        "steps": trainer.global_step,
        "weights": model.layer.weight.flatten().tolist(),
    }
    (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
