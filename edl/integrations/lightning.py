"""``EDLStrategy`` for ``lightning.pytorch``: a ``Trainer`` continues from memory when the world changes."""

from __future__ import annotations

from edl.integrations.versions import TestedVersions

try:
    import lightning
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from edl.integrations.lightning_strategy import classes
except ImportError as error:
    raise ImportError(
        f"edl.integrations.lightning cannot be used here ({error}): pip install 'edl[lightning]'"
    ) from error

TESTED = TestedVersions("lightning", "2.6", "2.7")
EDLEnvironment, EDLStrategy = classes(__name__, ClusterEnvironment, DDPStrategy, TESTED, lightning.__version__)
