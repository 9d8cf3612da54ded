"""Whether modules train and parameters are frozen, from one world to the next."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from edl.wire import local
from edl.worker.state import BaseState
from tests.support.fake_agent import Barriers
from tests.unit.edl.worker.test_loop import Trainer, agree, seat_all, underway


def test_models_are_set_up_as_at_first_in_each_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the process was interrupted in an evaluation."""
    one, layer = Trainer(Barriers()), SimpleNamespace(training=True)
    monkeypatch.setattr(BaseState, "_modes", lambda state: iter([("model", layer, "training")]))
    seen: dict[int, bool] = {}

    def evaluate(_: int) -> None:
        seen.setdefault(one.framework.groups[-1].seat.round, layer.training)
        layer.training = False

    one.before_step = evaluate
    with contextlib.closing(one.worker):
        one.start()
        one.until(local.Enter)
        seat_all([one], 1)
        underway([one], 1)
        target = agree([one], 1, hold=4)
        one.steps = target + 5
        seat_all([one], 2, restore=(1, target))
        underway([one], 2)
        one.worker.join()
    assert seen == {1: True, 2: True}
