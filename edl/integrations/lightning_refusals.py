"""What Lightning's ``Trainer`` can do, but not through changes of the world."""

from __future__ import annotations

import inspect
from typing import Any

from edl.errors import StateError

_CALLBACKS = {
    "GradientAccumulationScheduler": "use Trainer(accumulate_grad_batches=...)",
    "BatchSizeFinder": "give the train loader its batch size",
    "LearningRateFinder": "give the optimizer its learning rate",
    "StochasticWeightAveraging": "it forgets its average when it continues inside of an epoch; use WeightAveraging",
}
"""Callbacks by name of class, and what to do instead."""


def refuse(trainer: Any, module: Any) -> None:
    """Raise ``StateError`` for a trainer whose state or steps edl cannot keep."""
    reasons = {
        "manual optimization: only the module knows which batches make a step; use automatic optimization":
        not module.automatic_optimization,
        "training_step(dataloader_iter), which reads as many batches as it likes: take batch and batch_idx":
        "dataloader_iter" in inspect.signature(module.training_step).parameters,
        "use_distributed_sampler=False: leave it at True, and edl divides the order of your sampler":
        not trainer._accelerator_connector.use_distributed_sampler,
        f"overfit_batches={trainer.overfit_batches}: use limit_train_batches": trainer.overfit_batches > 0,
        f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}: use 0 or 1":
        trainer.reload_dataloaders_every_n_epochs > 1,
        "a model that is averaged after many steps: use edl.LocalSGD in a loop of your own":
        trainer.strategy._model_averaging_period is not None,
    }  # fmt: skip
    found = [reason for reason, applies in reasons.items() if applies]
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS:
                found.append(f"{kind.__name__}: {_CALLBACKS[kind.__name__]}")
    if found:
        raise StateError(f"EDLStrategy cannot continue a Trainer with {'; '.join(found)}")


def refuse_schedulers(trainer: Any) -> None:
    """Raise ``StateError`` for schedulers that count batches."""
    for config in trainer.strategy.lr_scheduler_configs:
        if config.interval == "step" and config.frequency != 1:
            raise StateError(
                f"a scheduler has interval='step' and frequency={config.frequency}, which Lightning counts in batches, "
                "and a step has another number of them in another world: use frequency=1 and a scheduler that changes "
                "the rate less often"
            )


def in_steps(name: str, batches: int, accumulation: int) -> int:
    """A number of batches as steps of ``accumulation`` batches. Raises ``StateError`` when it ends inside a step."""
    if batches % accumulation:
        raise StateError(
            f"{name}={batches} ends inside a step of accumulate_grad_batches={accumulation} batches: choose a multiple"
        )
    return batches // accumulation
