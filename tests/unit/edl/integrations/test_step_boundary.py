"""Where a trainer of others commits."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from edl.errors import StateError
from edl.integrations.step_boundary import StepBoundary, check_options
from edl.torch.random_state import RandomState

pytestmark = pytest.mark.torch


class Commits:
    """What a state is asked for."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def commit(self) -> None:
        self.made.append("commit")

    def save(self) -> None:
        self.made.append("save")


def test_the_first_boundary_of_a_world_commits_nothing_and_forgets_what_the_preparation_drew() -> None:
    boundary = StepBoundary(RandomState(), 0)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    boundary.enter(4)
    assert boundary.preparing
    torch.rand(100)
    assert boundary.first()
    assert torch.equal(torch.rand(3), expected)
    assert not boundary.preparing
    assert not boundary.first()
    assert not boundary.due(4)
    assert boundary.due(5)


def test_every_so_many_steps_it_also_saves() -> None:
    boundary, state = StepBoundary(RandomState(), 3), Commits()
    boundary.enter(0)
    boundary.first()
    target: Any = state
    for step in range(1, 7):
        assert boundary.due(step)
        boundary.commit(target, step)
    assert state.made == ["commit", "commit", "save"] * 2


@pytest.mark.parametrize(("save_every", "made"), [(0, "commit"), (3, "save")])
def test_the_last_step_is_saved_too(save_every: int, made: str) -> None:
    """After any number of them: a job that is started again repeats none."""
    boundary, state = StepBoundary(RandomState(), save_every), Commits()
    target: Any = state
    boundary.finish(target)
    assert state.made == [made]


def test_values_that_are_too_small_are_refused() -> None:
    check_options("EDLLoop", global_batch=0, copy_every=1, save_every=0)
    with pytest.raises(StateError, match=r"EDLLoop\(copy_every=0\): it must be at least 1"):
        check_options("EDLLoop", global_batch=0, copy_every=0, save_every=0)
