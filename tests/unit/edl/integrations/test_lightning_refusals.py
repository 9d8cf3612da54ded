"""What ``EDLStrategy`` refuses, without Lightning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edl.errors import StateError
from edl.integrations.lightning_refusals import in_steps, refuse, refuse_schedulers


class BatchSizeFinder:
    """As Lightning's."""


class StochasticWeightAveraging:
    """As Lightning's."""


class MyFinder(BatchSizeFinder):
    """A script's own."""


def trainer(**other: Any) -> Any:
    usual = {
        "_accelerator_connector": SimpleNamespace(use_distributed_sampler=True), "overfit_batches": 0,
        "reload_dataloaders_every_n_epochs": 0, "strategy": SimpleNamespace(_model_averaging_period=None),
        "callbacks": [],
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **other})


def module(automatic: bool = True, step: Any = lambda batch, index: None) -> Any:
    return SimpleNamespace(automatic_optimization=automatic, training_step=step)


def test_an_ordinary_trainer_is_accepted() -> None:
    refuse(trainer(reload_dataloaders_every_n_epochs=1), module())


@pytest.mark.parametrize(
    ("given", "trained", "text"),
    [
        ({}, module(automatic=False), "manual optimization: .* use automatic optimization"),
        ({}, module(step=lambda dataloader_iter: None), "dataloader_iter"),
        ({"overfit_batches": 0.5}, module(), "overfit_batches=0.5: use limit_train_batches"),
        ({"callbacks": [MyFinder()]}, module(), "BatchSizeFinder: give the train loader its batch size"),
        ({"callbacks": [StochasticWeightAveraging()]}, module(), "StochasticWeightAveraging: .* use WeightAveraging"),
        ({"strategy": SimpleNamespace(_model_averaging_period=4)}, module(), "averaged"),
    ],
)
def test_what_cannot_be_continued_is_refused(given: dict[str, Any], trained: Any, text: str) -> None:
    with pytest.raises(StateError, match=f"EDLStrategy cannot continue a Trainer with .*{text}"):
        refuse(trainer(**given), trained)


def test_a_scheduler_that_counts_batches_is_refused() -> None:
    def configured(interval: str, frequency: int) -> Any:
        config = SimpleNamespace(interval=interval, frequency=frequency)
        return SimpleNamespace(strategy=SimpleNamespace(lr_scheduler_configs=[config]))

    refuse_schedulers(configured("step", 1))
    refuse_schedulers(configured("epoch", 3))
    with pytest.raises(StateError, match="frequency=3, which Lightning counts in batches"):
        refuse_schedulers(configured("step", 3))


def test_batches_become_steps() -> None:
    assert in_steps("val_check_interval", 12, 4) == 3
    with pytest.raises(StateError, match="val_check_interval=10 ends inside a step"):
        in_steps("val_check_interval", 10, 4)
