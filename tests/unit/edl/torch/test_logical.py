"""Gradients of logical ranks, as torch's optimizers get them, and their norms."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edl.torch.accumulation import TorchModel  # noqa: E402
from edl.torch.logical import LogicalModel  # noqa: E402

pytestmark = pytest.mark.torch


def trained(channels_last: bool, through: bool) -> Any:
    """The model after two steps of a fused optimizer, which expects that gradients lie in memory as parameters do."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(36, 1))
    if channels_last:
        model.to(memory_format=torch.channels_last)
    inputs = torch.randn(8, 3, 5, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    logical = LogicalModel(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if through:
            logical.give(*logical.take())
        optimizer.step()
    return [parameter.detach().contiguous() for parameter in model.parameters()]


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_have_the_memory_format_of_their_parameters(channels_last: bool) -> None:
    for found, wanted in zip(trained(channels_last, True), trained(channels_last, False), strict=True):
        assert torch.equal(found, wanted)


def test_the_square_of_a_complex_gradient_is_that_of_its_parts() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.tensor([3 + 4j]))
    model.weight.grad = torch.tensor([3 + 4j])
    assert TorchModel(model).square() == 25
    logical = LogicalModel(model)
    assert logical.squared(logical.take()[1]) == 25


def test_parameters_that_are_unfrozen_are_added_up_from_the_next_step_on() -> None:
    """Else each worker would train them on its own part of the batch."""
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.requires_grad_(False)
    logical = LogicalModel(model)
    logical.begin_step()
    assert logical.take() == (b"", [])
    model.weight.requires_grad_(True)
    model.weight.grad = torch.ones(1, 2)
    logical.begin_step()
    model(torch.ones(1, 2)).sum().backward()
    used, arrays = logical.take()
    assert (used, [one.tolist() for one in arrays], logical.sizes()) == (b"\1", [[1.0, 1.0]], [2])
    logical.give(used, [2 * one for one in arrays])
    assert model.weight.grad.tolist() == [[2.0, 2.0]]
