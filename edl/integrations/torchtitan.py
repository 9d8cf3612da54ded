"""torchtitan's ``Trainer`` continues from memory when the world changes, in processes that keep running.

``python -m edl.integrations.torchtitan`` takes the arguments of ``torchtitan.train``.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from edl.integrations.versions import TestedVersions

try:
    import torchtitan
    from torchtitan.config import ConfigManager
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import init_logger
except ImportError as error:
    raise ImportError(
        f"edl.integrations.torchtitan cannot be used here ({error}): pip install 'edl[torchtitan]'"
    ) from error

from edl.integrations.placeless import give_up_place, is_worker
from edl.integrations.step_boundary import check_options
from edl.integrations.titan_training import TitanTraining
from edl.worker.session import note

TESTED = (TestedVersions("torchtitan", "0.3", "0.4"), torchtitan.__version__)


def train(config: Any, *, copy_every: int = 1, save_every: int = 0) -> Any:
    """Build the trainer of a ``Trainer.Config`` in each world, and train to the end. Returns the last trainer, closed.

    ``copy_every``: copy the state only after every n-th step. ``save_every``: after every so many steps also write it
    to ``--checkpoint-dir``; 0: never. Checkpoints of torchtitan are written as usual, and one is loaded if edl has
    nothing in memory or in its directory.

    Without edl's launcher torchtitan trains alone, nothing is kept, and a note on stderr says so. Raises
    ``StateError`` for a configuration that cannot be continued.
    """
    check_options("train", global_batch=0, copy_every=copy_every, save_every=save_every)
    if not is_worker(os.environ):
        note("edl keeps nothing of this torchtitan job, because edl-run has not started this process")
        return _alone(config)
    tested, installed = TESTED
    tested.warn(installed)
    give_up_place(os.environ, "train(config)", grouped=torch.distributed.is_initialized())
    return TitanTraining(config, copy_every=copy_every, save_every=save_every).run()


def _alone(config: Any) -> Any:
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


def main() -> None:
    """``torchtitan.train`` with edl's recovery."""
    init_logger()
    config: Any = ConfigManager().parse_args()
    structured_logger.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    train(config)


if __name__ == "__main__":
    main()
