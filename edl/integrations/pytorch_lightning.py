"""``EDLStrategy`` for ``pytorch_lightning``: a ``Trainer`` continues from memory when the world changes."""

from __future__ import annotations

import warnings
from typing import Any

from edl.integrations.versions import TestedVersions

try:
    import pytorch_lightning
    from lightning_fabric.plugins.environments import ClusterEnvironment
    from pytorch_lightning.strategies import DDPStrategy

    from edl.integrations.lightning_strategy import ElasticStrategy, LauncherEnvironment
except ImportError as error:
    raise ImportError(
        f"edl.integrations.pytorch_lightning cannot be used here ({error}): pip install 'edl[lightning]'"
    ) from error

TESTED = (TestedVersions("pytorch-lightning", "2.6", "2.7"), pytorch_lightning.__version__)


class EDLEnvironment(LauncherEnvironment, ClusterEnvironment):  # type: ignore[misc]  # the package is not typed
    """Where Lightning finds ranks and sizes: in what edl's launcher says. ``EDLStrategy`` brings it."""


class EDLStrategy(ElasticStrategy, DDPStrategy):  # type: ignore[misc]
    """Makes a ``Trainer`` fault-tolerant and elastic: ``Trainer(strategy=EDLStrategy())``.

    ``global_batch``: samples of each step over all workers, in a world of any size. Without it: the job's
    ``--global-batch``, or else the trainer's own in the first world. ``copy_every``: copy the state only after every
    n-th step. ``save_every``: after every so many steps also write it to ``--checkpoint-dir``; 0: never. Other options
    are those of ``DDPStrategy``.

    Without edl's launcher it is an ordinary ``DDPStrategy``, and says so on stderr.
    """

    environment = EDLEnvironment

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        tested, installed = TESTED
        if self.active and (text := tested.warning(installed)):
            warnings.warn(text, stacklevel=2)
