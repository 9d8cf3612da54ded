"""``scale_lr``: the step uses the scaled learning rate, all other code sees the script's own."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from edl.arithmetic.adascale import AdaScale
from edl.errors import StateError
from edl.wire.records import Settings
from edl.worker import hyper, lr
from edl.worker import session as sessions
from edl.worker.lr import LrFactor, found_noise, needed_noise


@pytest.fixture(autouse=True)
def prescribed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Settings]]:
    """The Master's settings; tests replace the one entry."""
    holder = [Settings()]
    monkeypatch.setattr(hyper, "current", lambda: holder[0])
    monkeypatch.setattr(hyper, "commits", lambda: 0)
    yield holder


def by(factor: float, **more: Any) -> Settings:
    return Settings(number=1, factor=factor, **more)


# --- what the factor is ----------------------------------------------------------------------------------------------


def test_without_settings_the_factor_is_1() -> None:
    assert LrFactor(None, None)() == 1.0


def test_a_ramp_is_followed(prescribed: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    prescribed[0] = by(3.0, lr="linear", ramp_from=1.0, ramp_begin=10, ramp_steps=4)
    found = []
    for commit in range(9, 16):
        monkeypatch.setattr(hyper, "commits", lambda commit=commit: commit)
        found.append(LrFactor(None, None)())
    assert found == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.0]


def test_a_users_rule_multiplies(prescribed: list[Settings]) -> None:
    prescribed[0] = by(0.5, lr="user", reference=64, size=256, scale=0.5)
    assert LrFactor(lambda reference, size: (size / reference) ** 0.25, None)() == pytest.approx(0.5 * 4**0.25)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), None, "2"])
def test_a_users_rule_returns_a_factor(prescribed: list[Settings], value: Any) -> None:
    prescribed[0] = by(1.0, lr="user", reference=64, size=256)
    with pytest.raises(StateError, match=r"rule\(64, 256\) returned"):
        LrFactor(lambda reference, size: value, None)()


def test_a_missing_rule_is_named(prescribed: list[Settings]) -> None:
    prescribed[0] = by(1.0, lr="user")
    with pytest.raises(StateError, match="--lr-rule=user: give the rule"):
        LrFactor(None, None)()


def test_a_rule_that_is_not_used_is_said_once(prescribed: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    prescribed[0] = by(2.0, lr="linear")
    factor = LrFactor(lambda reference, size: 9.0, None)
    assert factor() == factor() == 2.0
    assert capsys.readouterr().err.count("scale_lr(rule=…) is not used") == 1


def test_adascale_needs_its_measurements(prescribed: list[Settings]) -> None:
    prescribed[0] = by(0.5, lr="adascale", reference=1, size=4)
    with pytest.raises(StateError, match=r"State\(noise=edl.AdaScale\(\), …\)"):
        LrFactor(None, None)()
    noise = AdaScale()
    noise.measured(4, 64, 5.0, 2.0)
    noise.advance(64, lr.scale())
    assert 1.0 < noise.gain < 4.0
    assert LrFactor(None, noise)() == 0.5 * noise.gain


def test_the_measurements_are_found_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept:
        def __init__(self, **objects: Any) -> None:
            self._objects = objects

    class Open:
        state: Any = None

    session, noise = Open(), AdaScale()
    monkeypatch.setattr(sessions, "opened", lambda: session)
    assert found_noise() is None
    session.state = Kept(model=object(), noise=noise)
    assert found_noise() is noise and needed_noise(None) is noise
    other = AdaScale()
    assert found_noise(other) is other


# --- torch -----------------------------------------------------------------------------------------------------------

torch: Any = None
edl: Any = None


@pytest.fixture
def with_torch() -> Iterator[Any]:
    global torch, edl
    torch = pytest.importorskip("torch")
    edl = importlib.import_module("edl.torch")
    yield torch


def weight(value: float = 1.0) -> Any:
    parameter = torch.nn.Parameter(torch.tensor([value], dtype=torch.float64))
    parameter.grad = torch.ones(1, dtype=torch.float64)
    return parameter


@pytest.mark.torch
@pytest.mark.parametrize("times", [1, 3])
def test_torch_steps_with_the_scaled_rate(with_torch: Any, prescribed: list[Settings], times: int) -> None:
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(times):
        edl.scale_lr(optimizer)
    prescribed[0] = by(4.0)
    optimizer.step()
    assert parameter.item() == pytest.approx(1 - 0.4)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    prescribed[0] = by(1.0)
    optimizer.step()
    assert parameter.item() == pytest.approx(1 - 0.5)


@pytest.mark.torch
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1)),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=12),
        lambda optimizer: torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.95),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    ],
)
@pytest.mark.parametrize("first", ["scheduler", "hook"])
def test_torch_schedulers_see_the_scripts_own_rate(
    with_torch: Any, prescribed: list[Settings], scheduler: Any, first: str
) -> None:
    found: list[list[float]] = []
    for factor in (None, 5.0):
        parameter = weight()
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        prescribed[0] = by(factor) if factor else Settings()
        if factor and first == "hook":
            edl.scale_lr(optimizer)
        made = scheduler(optimizer)
        if factor and first == "scheduler":
            edl.scale_lr(optimizer)
        rates = []
        for _ in range(10):
            before = parameter.item()
            optimizer.step()
            rates.append((before - parameter.item()) / (factor or 1.0))
            made.step()
            rates.append(optimizer.param_groups[0]["lr"])
        found.append(rates)
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.torch
def test_torch_closures_see_the_scripts_own_rate(with_torch: Any, prescribed: list[Settings]) -> None:
    parameter = weight()
    optimizer = torch.optim.LBFGS([parameter], lr=0.5, max_iter=3)
    edl.scale_lr(optimizer)
    prescribed[0] = by(0.5)
    seen = []

    def closure() -> Any:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    for way in ("positional", "named"):
        optimizer.step(closure) if way == "positional" else optimizer.step(closure=closure)
    assert set(seen) == {0.5} and len(seen) > 2
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.torch
def test_torch_several_groups_and_a_rate_that_is_a_tensor(with_torch: Any, prescribed: list[Settings]) -> None:
    one, other = weight(), weight()
    rate = torch.tensor(0.2, dtype=torch.float64)
    optimizer = torch.optim.Adam([{"params": [one]}, {"params": [other], "lr": rate}], lr=0.1, foreach=False)
    edl.scale_lr(optimizer)
    prescribed[0] = by(3.0)
    optimizer.step()  # Adam's first step is the rate itself
    assert 1 - one.item() == pytest.approx(0.3, rel=1e-6)
    assert 1 - other.item() == pytest.approx(0.6, rel=1e-6)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[1]["lr"] is rate and rate.item() == 0.2


@pytest.mark.torch
def test_torch_a_tensor_that_is_the_rate_of_several_groups(with_torch: Any, prescribed: list[Settings]) -> None:
    one, other = weight(), weight()
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.SGD([{"params": [one]}, {"params": [other]}], lr=rate)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    edl.scale_lr(optimizer)
    prescribed[0] = by(3.0)
    for step in (1, 2):
        optimizer.step()
        assert 1 - one.item() == pytest.approx(0.3 * step) and 1 - other.item() == pytest.approx(0.3 * step)
        assert optimizer.param_groups[1]["lr"].item() == 0.1


@pytest.mark.torch
def test_torch_a_step_that_fails_leaves_the_rate(with_torch: Any, prescribed: list[Settings]) -> None:
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    edl.scale_lr(optimizer)
    prescribed[0] = by(2.0)
    good = optimizer.state_dict()

    def closure() -> Any:
        raise ValueError("of the script's own")

    with pytest.raises(ValueError, match="own"):
        optimizer.step(closure)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    # What was restored meanwhile is not overwritten.
    with pytest.raises(ValueError, match="own"):
        optimizer.step(closure)
    good["param_groups"][0]["lr"] = 0.7
    optimizer.load_state_dict(good)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert 1 - parameter.item() == pytest.approx(1.4)


@pytest.mark.torch
def test_torch_a_gradient_scaler_steps_with_the_scaled_rate(with_torch: Any, prescribed: list[Settings]) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    edl.scale_lr(optimizer)
    prescribed[0] = by(2.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == pytest.approx(0.8)


@pytest.mark.torch
def test_torch_goes_by_the_environment_where_there_is_nothing_else(
    with_torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain script that is restarted at each change."""
    monkeypatch.undo()
    for name in ("EDL_AGENT", "EDL_WORKER_PID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EDL_SETTINGS", "3")
    monkeypatch.setenv("EDL_LR_FACTOR", "2.5")
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    edl.scale_lr(optimizer)
    optimizer.step()
    assert 1 - parameter.item() == pytest.approx(0.25)


# --- Paddle ----------------------------------------------------------------------------------------------------------

paddle: Any = None


@pytest.fixture
def with_paddle() -> Iterator[Any]:
    global paddle, edl
    paddle = pytest.importorskip("paddle")
    edl = importlib.import_module("edl.paddle")
    yield paddle


def paddle_weight() -> Any:
    made = paddle.create_parameter([1], "float32", default_initializer=paddle.nn.initializer.Constant(1.0))
    made.sum().backward()
    return made


@pytest.mark.paddle
@pytest.mark.parametrize("times", [1, 3])
def test_paddle_steps_with_the_scaled_rate(with_paddle: Any, prescribed: list[Settings], times: int) -> None:
    parameter = paddle_weight()
    optimizer = paddle.optimizer.SGD(0.1, parameters=[parameter])
    for _ in range(times):
        edl.scale_lr(optimizer)
    for factor, expected in ((1.0, 0.9), (4.0, 0.5), (1.0, 0.4)):
        prescribed[0] = by(factor)
        optimizer.step()
        assert parameter.item() == pytest.approx(expected, rel=1e-5)
        assert optimizer.get_lr() == 0.1


@pytest.mark.paddle
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda: paddle.optimizer.lr.ExponentialDecay(0.1, 0.9),
        lambda: paddle.optimizer.lr.MultiplicativeDecay(0.1, lambda epoch: 0.95),
        lambda: paddle.optimizer.lr.CosineAnnealingDecay(0.1, 8),
        lambda: paddle.optimizer.lr.LinearWarmup(paddle.optimizer.lr.StepDecay(0.1, 3), 4, 0.01, 0.1),
    ],
)
def test_paddle_schedulers_see_the_scripts_own_rate(
    with_paddle: Any, prescribed: list[Settings], scheduler: Any
) -> None:
    found: list[list[float]] = []
    for factor in (None, 5.0):
        parameter = paddle_weight()
        made = scheduler()
        optimizer = paddle.optimizer.SGD(made, parameters=[parameter])
        prescribed[0] = by(factor) if factor else Settings()
        if factor:
            edl.scale_lr(optimizer)
        rates = []
        for _ in range(10):
            before = parameter.item()
            optimizer.step()
            rates.append((before - parameter.item()) / (factor or 1.0))
            made.step()
            rates += [made.last_lr, optimizer.get_lr()]
            state = made.state_dict()
            rates.append(json.loads(json.dumps(state["last_lr"])))
        found.append(rates)
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


@pytest.mark.paddle
def test_paddle_minimize_and_a_step_that_fails(
    with_paddle: Any, prescribed: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = paddle_weight()
    optimizer = paddle.optimizer.SGD(0.1, parameters=[parameter])
    edl.scale_lr(optimizer)
    prescribed[0] = by(2.0)
    optimizer.clear_grad()
    loss = parameter.sum()
    loss.backward()
    optimizer.minimize(loss)
    assert parameter.item() == pytest.approx(0.8, rel=1e-5)

    def fails(*arguments: Any, **named: Any) -> None:
        assert optimizer.get_lr() == pytest.approx(0.2)
        raise ValueError("of the optimizer's own")

    monkeypatch.setattr(optimizer, "_apply_optimize", fails)
    with pytest.raises(ValueError, match="own"):
        optimizer.step()
    assert optimizer.get_lr() == 0.1
