"""``accumulate`` on one worker, and what it says when it is used wrongly. On several: tests/process."""

from __future__ import annotations

import copy
import importlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.arithmetic.adascale import AdaScale
from edl.errors import StateError
from edl.wire.records import Settings
from edl.worker import accumulate as core
from edl.worker import hyper, lr
from edl.worker import session as sessions
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


class Published:
    """AdaScale as in its paper, from whole gradients: an implementation of its own to compare with.

    Keeps the moving averages of Appendix B for one part of the batch, and the gain r = (σ² + μ²) / (σ²/S + μ²).
    """

    def __init__(self) -> None:
        self.variance = self.square = self.weight = 0.0

    def gain(self, parts: list[Any], size: int, reference: int, scale: float) -> float:
        """After a step with the gradients of equal ``parts`` of ``size`` samples each; S is ``scale``."""
        count = len(parts)
        mean = sum(parts) / count
        variance = sum(float(np.dot(part - mean, part - mean)) for part in parts) / (count - 1)
        keep = max(1 - count / 1000, 0.0)
        self.variance = keep * self.variance + (1 - keep) * variance * size  # of a sample's gradient
        self.square = keep * self.square + (1 - keep) * (float(np.dot(mean, mean)) - variance / count)
        self.weight = keep * self.weight + (1 - keep)
        sigma2, mu2 = max(self.variance, 0.0) / self.weight / reference, max(self.square, 0.0) / self.weight
        return (sigma2 + mu2) / (sigma2 / scale + mu2)


def equal_parts(rng: np.random.Generator, micros: int, size: int, full: int) -> list[tuple[Any, Share]]:
    """A step of equal micro-batches with so much noise that the gain depends on the size."""
    return [
        ((rng.normal(size=(size, WIDTH)), 0.5 + rng.normal(size=(size, 1))),
         Share(size, micros * size, micro, micros, full=full))
        for micro in range(micros)
    ]  # fmt: skip


def prescribe(monkeypatch: pytest.MonkeyPatch, reference: int, size: int) -> None:
    settings = Settings(number=1, lr="adascale", reference=reference, size=size)
    monkeypatch.setattr(hyper, "current", lambda: settings)


def test_a_short_last_step_counts_as_what_it_is_in_adascale(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the reference of 4 samples; the last step has 12, the next one fewer than the reference."""
    prescribe(monkeypatch, reference=1, size=4)
    rng = np.random.default_rng(4)
    sizes = [(4, 4), (4, 4), (3, 4), (2, 1)]
    steps = [equal_parts(rng, micros, size, 16) for micros, size in sizes]
    noise, published, progress = AdaScale(), Published(), 0.0
    for number, step in enumerate(kit.edl.accumulate(Given(steps), kit.model, noise=noise)):
        run(kit, step)
        kit.clear()
        micros, size = sizes[number]
        parts = [whole(kit, batch) for batch, _ in steps[number]]
        expected = published.gain(parts, size, 4, max(micros * size / 4, 1.0))
        assert noise.gain == pytest.approx(expected, rel=1e-9)
        progress += expected
    assert noise.gain == 1.0 and noise.progress == pytest.approx(progress)
    assert 1.0 < progress / len(sizes) < 4.0


def test_a_step_of_a_small_world_that_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the reference is no less than half of the reference's own last step."""
    prescribe(monkeypatch, reference=4, size=2)
    assert [lr.scale(samples, 16) for samples in (16, 8, 1)] == [0.5, 0.5, 0.5]
    prescribe(monkeypatch, reference=2, size=4)
    assert [lr.scale(samples, 16) for samples in (16, 12, 8, 1)] == [2.0, 1.5, 1.0, 1.0]
    assert lr.scale(8, 0) == lr.scale() == 2.0, "steps that vary"


def new_scaler(kit: Any) -> Any:
    if isinstance(kit, Torch):
        return kit.torch.amp.GradScaler("cpu")
    made = kit.paddle.amp.GradScaler(enable=False, use_dynamic_loss_scaling=False)
    made._enable = True  # on a CPU it would stay disabled
    made._incr_ratio = made._decr_ratio = made._incr_count = made._decr_count = 0
    made._incr_every_n_steps = made._decr_every_n_nan_or_inf = 0
    return made


@pytest.mark.parametrize("where", ["argument", "state"])
def test_a_gradient_scaler_changes_neither_the_noise_nor_the_loss(
    kit: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Its scale changes from step to step. A step whose gradients overflow is skipped, and no progress."""
    prescribe(monkeypatch, reference=1, size=4)
    rng = np.random.default_rng(5)
    steps = [equal_parts(rng, 4, 4, 16) for _ in range(4)]
    scales = [2.0**16, 2.0**17, 2.0**3, 2.0**4]
    seen = []
    for scaled in (False, True):
        noise = AdaScale()
        scaler: Any = new_scaler(kit) if scaled else None
        keep(monkeypatch, scaler=scaler, noise=noise)
        named = {"noise": noise, "scaler": scaler} if where == "argument" else {}
        losses, gains, before = [], [], noise.state_dict()
        for number, step in enumerate(kit.edl.accumulate(Given(steps), kit.model, **named)):
            if scaled:
                set_scale(kit, scaler, scales[number])
            overflows = number == 2
            for batch in step:
                loss = kit.loss(kit.model, batch) * (float("inf") if overflows and scaled else 1.0)
                step.backward(scaler.scale(loss) if scaled else loss)
            kit.clear()
            if not overflows:
                losses += [float(step.loss), step.mean_loss()]
                gains.append(noise.gain)
            elif not scaled:  # what the other one does not see
                noise.load_state_dict(before)
            before = noise.state_dict()
        seen.append([*losses, *gains, *noise.state_dict().values()])
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


def keep(monkeypatch: pytest.MonkeyPatch, **objects: Any) -> None:
    """A session whose state has these objects."""
    state = types.SimpleNamespace(_objects={name: one for name, one in objects.items() if one is not None})
    monkeypatch.setattr(sessions, "opened", lambda: types.SimpleNamespace(state=state, seat=None))


def set_scale(kit: Any, scaler: Any, scale: float) -> None:
    if isinstance(kit, Paddle):
        scaler._scale = kit.paddle.to_tensor([scale], dtype="float64")
        return
    scaler.scale(kit.torch.zeros(1))  # it has its scale from the first loss on
    scaler._scale.fill_(scale)


@pytest.mark.torch
def test_several_gradient_scalers_have_to_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    edl: Any = importlib.import_module("edl.torch")
    one, other = (torch.amp.GradScaler("cpu") for _ in range(2))
    keep(monkeypatch, other=other, one=one, off=torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(StateError, match=r"several gradient scalers \(one, other\): .*accumulate\(…, scaler=…\)"):
        next(edl.accumulate(Given(two_of(1)), torch.nn.Linear(WIDTH, 1)))
    next(edl.accumulate(Given(two_of(1)), torch.nn.Linear(WIDTH, 1), scaler=one))


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
