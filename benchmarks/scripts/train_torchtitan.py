"""torchtitan's ``Trainer`` with its own checkpoints and resume, as ``torchtitan.train`` runs it under torchrun."""

from __future__ import annotations

from benchmarks.scripts.torchtitan_parts import configured

trainer = configured(checkpoints=True).build()
try:
    trainer.train()
finally:
    trainer.close()
