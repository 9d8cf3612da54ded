"""Lightning's ``Trainer`` with its own checkpoints and resume, as one writes it for torchrun."""

from __future__ import annotations

import os

from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.scripts.lightning_parts import args, fit

saving = ModelCheckpoint(args.workdir / "checkpoints", every_n_train_steps=args.checkpoint_every, save_last=True)
fit(
    "last", [saving], strategy="ddp", num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
)  # fmt: skip
