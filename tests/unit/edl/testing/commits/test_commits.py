"""Committed states are consistent: with an asynchronous backend, at any instruction, in both frameworks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from edl.testing.commits.__main__ import report
from edl.testing.commits.agent import DirectLink, Stuck
from edl.testing.commits.device import AsynchronousGroup
from edl.testing.commits.models import FrameworkModel, PlainFramework, PlainModel, step
from edl.testing.commits.pool import results
from edl.testing.commits.schedule import STEPS, Played, Player, Wrong, play
from edl.worker.framework import Framework
from edl.worker.link import Link
from edl.worker.session import Session
from edl.worker.state import BaseState

Kind = tuple[Callable[[], FrameworkModel], Callable[[], Framework]]


class TorchTrainee:
    """A module with momentum, by torch's own optimizer."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(3)
        self.torch: Any = torch
        self.model = torch.nn.Linear(3, 2, dtype=torch.float64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        # The host makes an optimizer's tensors at its first step, also where the device fills them later.
        self.apply([torch.zeros_like(one) for one in self.model.parameters()])

    def gradient(self, step: int, rank: int) -> Any:
        return [self.torch.full_like(one, (step + 1) / (rank + 3)) for one in self.model.parameters()]

    def combine(self, gradients: Sequence[Any]) -> Any:
        return [sum(parts) / len(gradients) for parts in zip(*gradients, strict=True)]

    def apply(self, gradient: Any) -> None:
        for parameter, part in zip(self.model.parameters(), gradient, strict=True):
            parameter.grad = part
        self.optimizer.step()

    def content(self) -> bytes:
        momenta = [self.optimizer.state[one].get("momentum_buffer") for one in self.model.parameters()]
        tensors = [*self.model.parameters(), *(one for one in momenta if one is not None)]
        return b"".join(one.detach().numpy().tobytes() for one in tensors)

    def state(self, framework: Framework, **values: Any) -> BaseState:
        from edl.torch.state import State as TorchState

        made = TorchState(model=self.model, optimizer=self.optimizer, **values)
        made._framework = framework
        return made


class PaddleTrainee:
    """A Paddle training run."""

    def __init__(self) -> None:
        import paddle

        self.paddle: Any = paddle
        self.model = self.paddle.nn.Linear(3, 2)
        with self.paddle.no_grad():
            for one in self.model.parameters():
                one.set_value(self.paddle.full(one.shape, 0.5))
        self.optimizer = self.paddle.optimizer.Momentum(0.1, 0.9, parameters=self.model.parameters())
        self.apply([self.paddle.zeros_like(one) for one in self.model.parameters()])

    def gradient(self, step: int, rank: int) -> Any:
        return [self.paddle.full(one.shape, (step + 1) / (rank + 3)) for one in self.model.parameters()]

    def combine(self, gradients: Sequence[Any]) -> Any:
        return [sum(parts) / len(gradients) for parts in zip(*gradients, strict=True)]

    def apply(self, gradient: Any) -> None:
        for parameter, part in zip(self.model.parameters(), gradient, strict=True):
            parameter.grad = part
        self.optimizer.step()

    def content(self) -> bytes:
        kept = self.optimizer.state_dict()
        momenta = [kept[name] for name in sorted(kept) if "velocity" in name]
        return b"".join(one.numpy().tobytes() for one in (*self.model.parameters(), *momenta))

    def state(self, framework: Framework, **values: Any) -> BaseState:
        from edl.paddle.state import State as PaddleState

        made = PaddleState(model=self.model, optimizer=self.optimizer, **values)
        made._framework = framework
        return made


def plain() -> Kind:
    return PlainModel, PlainFramework


def torch() -> Kind:
    pytest.importorskip("torch")
    from edl.torch.framework import TorchFramework

    return TorchTrainee, TorchFramework


def paddle() -> Kind:
    if importlib.util.find_spec("paddle") is None:
        pytest.skip("paddle is not installed")
    from edl.paddle.framework import PaddleFramework

    return PaddleTrainee, cast(Any, PaddleFramework)


KINDS = [
    pytest.param(plain, 300, id="plain"),
    pytest.param(torch, 40, id="torch", marks=pytest.mark.torch),
    pytest.param(paddle, 40, id="paddle", marks=pytest.mark.paddle),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "runs"), KINDS)
def test_no_fault_at_any_instruction_lets_a_wrong_number_through(kind: Callable[[], Kind], runs: int) -> None:
    player = Player(*kind())
    moments = sum(player.play(seed) for seed in range(runs))
    assert moments > runs * 100


@pytest.mark.parametrize(("kind", "runs"), KINDS)
def test_without_the_check_a_wrong_number_is_found(
    kind: Callable[[], Kind], runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Link, "_spoilt", lambda self, number: "")
    player = Player(*kind())
    with pytest.raises(Wrong):
        for seed in range(runs):
            player.play(seed)


def announced_without_looking(self: Link, number: int, messages: Sequence[Any]) -> None:
    with self._changed:
        for message in messages:
            stream = self._streams[message.stream]
            stream.ready, stream.due = None, stream.due + 1
            self.send(message)


def test_without_the_look_before_the_announcement_a_wrong_commit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other checks alone are not enough."""
    monkeypatch.setattr(Link, "announce", announced_without_looking)
    assert "holds wrong numbers" in play(range(2000), checked=True).wrong


def aborted_at_once(self: Any, group: AsynchronousGroup) -> None:
    group.abort()


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        pytest.param(AsynchronousGroup, "disconnect", AsynchronousGroup.abort, id="when a script fails"),
        pytest.param(DirectLink, "_disconnect", aborted_at_once, id="when one worker knows that the round is over"),
    ],
)
def test_an_abort_before_all_workers_know_is_found(
    owner: type, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the collectives of the others, which look like whole ones."""
    monkeypatch.setattr(owner, name, other)
    wrong = play(range(1000), checked=True).wrong
    assert "kind='error'" in wrong


def test_a_check_of_the_result_before_the_device_is_done_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "finish", lambda self: None)
    assert "train returned a wrong result" in play(range(1000), checked=True).wrong


@pytest.mark.parametrize(("kind", "runs"), KINDS)
def test_steps_are_told_apart(kind: Callable[[], Kind], runs: int) -> None:
    make, _ = kind()
    model = make()
    seen = {model.content()}
    for number in range(STEPS):
        step(model, number, 2)
        seen.add(model.content())
    assert len(seen) == STEPS + 1


# --- many of them ----------------------------------------------------------------------------------------------------


def test_a_long_run_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def parts() -> Iterator[Played]:
        for _ in range(6):
            yield Played(4, 100)
            said.append(capsys.readouterr().out)  # before the next part is played

    assert report(parts(), line_every=10)
    lines = "".join(said).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["12", "20"]
    assert capsys.readouterr().out == "24 schedules, 600 instructions with a fault between them; no wrong number\n"


def test_the_first_finding_ends_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    def parts() -> Iterator[Played]:
        yield Played(4, 100)
        yield Played(2, 100, "seed 5: a wrong number")
        raise AssertionError("played on")

    assert not report(parts())
    assert capsys.readouterr().out == "wrong after 6 schedules: seed 5: a wrong number\n"


def test_a_worker_that_waits_for_ever_is_found_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(self: Player, seed: int) -> int:
        if seed == 7:
            raise Stuck("nothing more will happen")
        return 10

    monkeypatch.setattr(Player, "play", stuck)
    assert play(range(5, 20), checked=True) == Played(3, 20, "seed 7: Stuck: nothing more will happen")


@pytest.mark.slow
def test_several_processes_come_to_the_same() -> None:
    assert list(results(range(250), 2, checked=True)) == list(results(range(250), 1, checked=True))
