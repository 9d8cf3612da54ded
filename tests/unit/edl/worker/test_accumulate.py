"""``accumulate`` on one worker, and what it says when it is used wrongly. On several: tests/process."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.arithmetic.adascale import AdaScale
from edl.errors import StateError
from edl.worker import accumulate as core
from edl.worker.steps import Share
from tests.step_tools import Given, uneven

WIDTH = 4


class Torch:
    """A small torch model."""

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch
        self.edl: Any = importlib.import_module("edl.torch")
        torch.manual_seed(3)
        self.model: Any = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)
        ).double()

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = (self.torch.from_numpy(part) for part in batch)
        return ((model(x) - y) ** 2).mean()

    def gradients(self, model: Any = None) -> Any:
        return np.concatenate([one.grad.numpy().reshape(-1) for one in (model or self.model).parameters()])

    def clear(self) -> None:
        self.model.zero_grad()

    def clone(self) -> Any:
        return copy.deepcopy(self.model)


class Paddle:
    """A small Paddle model."""

    def __init__(self) -> None:
        import paddle

        self.paddle: Any = paddle
        self.edl: Any = importlib.import_module("edl.paddle")
        paddle.seed(3)
        self.model = self.build()

    def build(self) -> Any:
        nn: Any = self.paddle.nn
        before = self.paddle.get_default_dtype()
        self.paddle.set_default_dtype("float64")
        try:
            return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))
        finally:
            self.paddle.set_default_dtype(before)

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = (self.paddle.to_tensor(part) for part in batch)
        return ((model(x) - y) ** 2).mean()

    def gradients(self, model: Any = None) -> Any:
        return np.concatenate([one.grad.numpy().reshape(-1) for one in (model or self.model).parameters()])

    def clear(self) -> None:
        for one in self.model.parameters():
            one.clear_gradient(False)

    def clone(self) -> Any:
        twin = self.build()
        twin.set_state_dict(self.model.state_dict())
        return twin


@pytest.fixture(
    params=[pytest.param("torch", marks=pytest.mark.torch), pytest.param("paddle", marks=pytest.mark.paddle)]
)
def kit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip(request.param)
    for name in ("EDL_SETTINGS", "EDL_AGENT", "EDL_LOGICAL_RANKS"):
        monkeypatch.delenv(name, raising=False)
    return Torch() if request.param == "torch" else Paddle()


def whole(kit: Any, samples: Any) -> Any:
    """The gradient of all samples at once."""
    model = kit.clone()
    kit.loss(model, samples).backward()
    return kit.gradients(model)


def test_the_gradient_is_that_of_all_samples(kit: Any) -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        every, samples = uneven(rng, 1, WIDTH)
        (step,) = [step for step in kit.edl.accumulate(Given(every), kit.model) if run(kit, step)]
        np.testing.assert_allclose(kit.gradients(), whole(kit, samples), rtol=1e-12, atol=1e-14)
        expected = float(kit.loss(kit.model, samples).detach())
        assert float(step.loss) == pytest.approx(expected, rel=1e-12)
        assert step.mean_loss() == pytest.approx(expected, rel=1e-12)
        kit.clear()


def run(kit: Any, step: Any) -> bool:
    for batch in step:
        step.backward(kit.loss(kit.model, batch))
    return True


def test_the_noise_is_that_of_the_micro_batches(kit: Any) -> None:
    rng = np.random.default_rng(1)
    sizes = [3, 1, 4]
    batches = [(rng.normal(size=(size, WIDTH)), rng.normal(size=(size, 1))) for size in sizes]
    items = [(batch, Share(size, 8, micro, 4)) for micro, (batch, size) in enumerate(zip(batches, sizes, strict=True))]
    items.append(((np.full((2, WIDTH), np.nan), np.zeros((2, 1))), Share(0, 8, 3, 4)))
    noise, expected = AdaScale(), AdaScale()
    for step in kit.edl.accumulate(Given([items, items]), kit.model, noise=noise):
        run(kit, step)
        kit.clear()
        parts = [whole(kit, batch) for batch in batches]
        mean = sum(size / 8 * part for size, part in zip(sizes, parts, strict=True))
        squares = sum(size / 8 * float(part @ part) for size, part in zip(sizes, parts, strict=True))
        expected.measured(3, 8, squares, float(np.dot(mean, mean)))
    assert noise.variance == pytest.approx(expected.variance, rel=1e-9)
    assert noise.square == pytest.approx(expected.square, rel=1e-9)
    assert noise.progress == 2.0


def two_of(micros: int) -> list[list[tuple[Any, Share]]]:
    rng = np.random.default_rng(2)
    return [
        [
            ((rng.normal(size=(2, WIDTH)), rng.normal(size=(2, 1))), Share(2, 2 * micros, m, micros))
            for m in range(micros)
        ]
        for _ in range(2)
    ]


def test_leaving_the_inner_loop_early_is_an_error(kit: Any) -> None:
    with pytest.raises(StateError, match="a step was left after 1 of its 3 micro-batches"):
        for step in kit.edl.accumulate(Given(two_of(3)), kit.model):
            for batch in step:
                step.backward(kit.loss(kit.model, batch))
                break


def test_a_forgotten_backward_is_an_error(kit: Any) -> None:
    with pytest.raises(StateError, match=r"no step.backward\(\) for micro-batch 0 of 3"):
        for step in kit.edl.accumulate(Given(two_of(3)), kit.model):
            for batch in step:
                kit.loss(kit.model, batch)


def test_a_forgotten_last_backward_is_an_error(kit: Any) -> None:
    with pytest.raises(StateError, match=r"no step.backward\(\) for micro-batch 0 of 1"):
        for step in kit.edl.accumulate(Given(two_of(1)), kit.model):
            for batch in step:
                kit.loss(kit.model, batch)


def test_two_backwards_for_one_micro_batch_are_an_error(kit: Any) -> None:
    with pytest.raises(StateError, match="once for each micro-batch"):
        for step in kit.edl.accumulate(Given(two_of(2)), kit.model):
            for batch in step:
                step.backward(kit.loss(kit.model, batch))
                step.backward(kit.loss(kit.model, batch))


def test_a_step_is_taken_once(kit: Any) -> None:
    with pytest.raises(StateError, match="only once"):
        for step in kit.edl.accumulate(Given(two_of(2)), kit.model):
            run(kit, step)
            list(step)


def test_a_step_that_is_not_iterated_over_is_an_error(kit: Any) -> None:
    with pytest.raises(StateError, match="after 0 of its 2"):
        for _ in kit.edl.accumulate(Given(two_of(2)), kit.model):
            pass


def test_an_optimizer_with_scaled_lr_does_not_use_half_a_gradient(kit: Any) -> None:
    """Before anything is lost: with others, each worker would go its own way."""
    if isinstance(kit, Torch):
        optimizer = kit.torch.optim.SGD(kit.model.parameters(), lr=0.1)
    else:
        optimizer = kit.paddle.optimizer.SGD(0.1, parameters=kit.model.parameters())
    kit.edl.scale_lr(optimizer)
    before = [one.detach().numpy().copy() for one in kit.model.parameters()]
    steps = kit.edl.accumulate(Given(two_of(2)), kit.model)
    with pytest.raises(StateError, match="incomplete"):
        for step in steps:
            for batch in step:
                step.backward(kit.loss(kit.model, batch))
                break
            optimizer.step()
    for one, values in zip(kit.model.parameters(), before, strict=True):
        np.testing.assert_array_equal(one.detach().numpy(), values)
    steps.close()
    optimizer.step()  # outside of any step it is the script's own business


def test_nothing_is_taken_from_the_loader_ahead_of_the_commit(kit: Any) -> None:
    loader = Given(two_of(3))
    for number, step in enumerate(kit.edl.accumulate(loader, kit.model)):
        run(kit, step)
        assert loader.handed_out == 3 * (number + 1)


def test_leaving_the_outer_loop_between_steps_is_fine(kit: Any) -> None:
    for step in kit.edl.accumulate(Given(two_of(3)), kit.model):
        run(kit, step)
        break
    core.check_finished()


def test_a_loader_that_ends_inside_a_step_is_found_out(kit: Any) -> None:
    with pytest.raises(StateError, match="ended after 2 of a step's 3"):
        for step in kit.edl.accumulate(Given([two_of(3)[0][:2]]), kit.model):
            run(kit, step)


def test_a_step_from_its_middle_is_found_out(kit: Any) -> None:
    with pytest.raises(StateError, match="micro-batch 1 of 3 where 0 of 3 was due"):
        for step in kit.edl.accumulate(Given([two_of(3)[0][1:]]), kit.model):
            run(kit, step)


@pytest.mark.torch
def test_a_stand_in_leaves_no_trace_in_buffers_and_gradients() -> None:
    torch = pytest.importorskip("torch")
    edl: Any = importlib.import_module("edl.torch")
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    seen = []
    for stand_ins in (0, 2):
        twin = copy.deepcopy(model)
        items = [(x, Share(4, 4, 0, 1 + stand_ins))]
        items += [(x * float("inf"), Share(0, 4, 1 + number, 1 + stand_ins)) for number in range(stand_ins)]
        for step in edl.accumulate(Given([items]), twin):
            for batch in step:
                step.backward(twin(batch).mean())
        seen.append([*(one.grad for one in twin.parameters()), *twin.buffers()])
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


@pytest.mark.torch
def test_each_stand_in_takes_part_in_the_backward_pass_and_adds_nothing_to_it() -> None:
    """Modules such as SyncBatchNorm exchange gradients between the workers inside of it."""
    torch = pytest.importorskip("torch")
    edl: Any = importlib.import_module("edl.torch")
    exchanged = []
    model = torch.nn.Linear(WIDTH, 1)
    items = [(torch.ones(2, WIDTH), Share(2 * (micro == 0), 2, micro, 3)) for micro in range(3)]
    for step in edl.accumulate(Given([items]), model):
        for batch in step:
            output = model(batch)
            output.register_hook(lambda gradient: exchanged.append(float(gradient.abs().sum())))
            step.backward(output.mean())
    assert exchanged == [1, 0, 0]


@pytest.fixture(autouse=True)
def _no_step_left() -> Iterator[None]:
    yield
    core._current = None
