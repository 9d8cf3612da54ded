"""``EDLStrategy`` for ``pytorch_lightning``: a ``Trainer`` continues from memory when the world changes."""

from __future__ import annotations

from edl.integrations.versions import TestedVersions

try:
    import pytorch_lightning
    from lightning_fabric.plugins.environments import ClusterEnvironment
    from pytorch_lightning.strategies import DDPStrategy

    from edl.integrations.lightning_strategy import classes
except ImportError as error:
    raise ImportError(
        f"edl.integrations.pytorch_lightning cannot be used here ({error}): pip install pytorch-lightning"
    ) from error

TESTED = TestedVersions("pytorch-lightning", "2.6", "2.7")
EDLEnvironment, EDLStrategy = classes(__name__, ClusterEnvironment, DDPStrategy, TESTED, pytorch_lightning.__version__)
