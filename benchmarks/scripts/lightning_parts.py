"""A module and a callback for Lightning's ``Trainer``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.scripts.trainer_parts import Log, arguments, loader, net

args = arguments()


class Module(pl.LightningModule):  # type: ignore[misc]  # the package is not typed
    """The same model as in the other scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class StepLog(pl.Callback):  # type: ignore[misc]
    """Writes the step log."""

    def __init__(self) -> None:
        self._log = Log(args)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._log.world(trainer.global_rank, trainer.world_size)

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self._log.step(trainer.global_step)


def fit(ckpt_path: str | None, callbacks: list[Any], **options: Any) -> None:
    """Train to the last step."""
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=args.steps, max_epochs=-1, callbacks=[StepLog(), *callbacks], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=bool(callbacks),
        default_root_dir=args.workdir, **options,
    )  # fmt: skip
    trainer.fit(Module(), loader(), ckpt_path=ckpt_path)
