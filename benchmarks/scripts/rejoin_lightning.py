"""``train_lightning.py`` with ``EDLStrategy``: its state outlives each world."""

from __future__ import annotations

from benchmarks.scripts.lightning_parts import fit
from benchmarks.scripts.trainer_parts import BATCH
from edl.integrations.lightning import EDLStrategy

fit(None, [], strategy=EDLStrategy(global_batch=2 * BATCH))
