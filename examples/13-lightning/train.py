"""Lightning's Trainer, elastically: a small network learns to add up its input. Nothing is downloaded."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from edl.integrations.lightning import EDLStrategy


class Sums(L.LightningModule):  # type: ignore[misc]  # the package is not typed
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        loss: torch.Tensor = ((self.layers(rows) - rows.sum(1, keepdim=True)) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    L.seed_everything(0)
    loader = DataLoader(TensorDataset(torch.randn(4096, 16)), batch_size=8, shuffle=True)
    trainer = L.Trainer(
        strategy=EDLStrategy(global_batch=32), accelerator="cpu", max_epochs=10, default_root_dir="runs/lightning"
    )
    trainer.fit(Sums(), loader)


if __name__ == "__main__":
    main()
