"""``train_torchtitan.py`` with ``train``: its state outlives each world."""

from __future__ import annotations

from benchmarks.scripts.torchtitan_parts import configured
from edl.integrations.torchtitan import train

train(configured(checkpoints=False))
