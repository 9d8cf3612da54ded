"""What is said of an optimizer's size, against what its first step makes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edl.torch.first_size import missing_bytes  # noqa: E402
from edl.torch.state import State  # noqa: E402
from edl.wire import local  # noqa: E402
from tests.support.fake_agent import Worker, begin  # noqa: E402

pytestmark = pytest.mark.torch
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("Adadelta", {}), ("Adagrad", {}), ("Adam", {}), ("Adam", {"amsgrad": True}), ("AdamW", {}), ("Adamax", {}),
    ("ASGD", {}), ("NAdam", {}), ("RAdam", {}), ("RMSprop", {}), ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}), ("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9}),
]  # fmt: skip


def held(optimizer: Any) -> int:
    return sum(
        one.nbytes for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one) and one.dim()
    )


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_the_first_step_makes(name: str, settings: dict[str, Any], dtype: Any) -> None:
    parameters = [torch.nn.Parameter(torch.ones(30, 40, dtype=dtype)), torch.nn.Parameter(torch.ones(7, dtype=dtype))]
    frozen = torch.nn.Parameter(torch.ones(1000), requires_grad=False)
    optimizer = getattr(torch.optim, name)([*parameters, frozen], **settings)
    before, expected = held(optimizer), missing_bytes(optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert held(optimizer) - before == expected
    assert missing_bytes(optimizer) == 0


def test_optimizers_of_others_are_not_guessed() -> None:
    namesake = type("Adam", (torch.optim.Adam,), {})
    assert missing_bytes(namesake([torch.nn.Parameter(torch.ones(9))])) == 0


def test_the_first_commit_takes_the_buffer_that_was_requested_before_the_first_step() -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    state = State(model=model, optimizer=optimizer)
    worker = Worker()
    try:
        begin(worker, state)
        model(torch.ones(300)).sum().backward()
        optimizer.step()
        state.commit()
        worker.settle()
        asked = [one for one in worker.agent.said if isinstance(one, local.Want)]
        sizes = [one.size for one in worker.agent.said if isinstance(one, local.Committed)]
        assert len(asked) == 1 and len(sizes) == 1
        assert asked[0].size > 3 * 300 * 300 * 4
    finally:
        worker.close()
