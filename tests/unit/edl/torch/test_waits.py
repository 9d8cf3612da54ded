"""Where the training thread waits for other ranks or for data is counted as such.

The clock of these tests is a counter: each reading is one later than the last.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as funcol  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from edl.torch import backward_end, collectives, data_waits  # noqa: E402
from edl.torch.framework import TorchFramework  # noqa: E402
from edl.torch.group import TorchGroup  # noqa: E402
from edl.worker import session as sessions  # noqa: E402
from edl.worker.session import Session  # noqa: E402
from tests.unit.edl.torch.test_framework import alone  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(1)

    def now() -> tuple[float, float]:
        return float(next(ticks)), 0.0

    monkeypatch.setattr(collectives, "now", now)
    monkeypatch.setattr(backward_end, "now", now)


@pytest.fixture
def framework() -> Iterator[TorchFramework]:
    made = TorchFramework()
    yield made
    made.prepare(alone(9))


@pytest.fixture
def group(framework: TorchFramework) -> Iterator[TorchGroup]:
    made = framework.prepare(alone(1))
    framework.connect(made, made.seat)
    yield made
    made.abort()
    made.retire()


def waited(group: TorchGroup) -> float:
    found = group.waits()
    assert found is not None
    assert found.idle_s == found.waited_s  # this clock's thread uses no CPU
    return found.waited_s


def test_waiting_for_work(group: TorchGroup) -> None:
    assert waited(group) == 0
    dist.all_reduce(torch.ones(2))
    assert waited(group) == 1
    work: Any = dist.all_reduce(torch.ones(2), async_op=True)
    assert waited(group) == 1
    work.wait()
    assert waited(group) == 2


def test_waiting_for_a_functional_collective(group: TorchGroup) -> None:
    result = funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)  # type: ignore[arg-type]
    result + 1
    assert waited(group) == 1


def test_what_is_waited_for_at_a_boundary(group: TorchGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group.settle()
    assert waited(group) == 0
    dist.all_reduce(torch.ones(2), async_op=True)
    group.settle()
    assert waited(group) == 1


def test_other_threads_are_not_the_training(group: TorchGroup) -> None:
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2)))
    thread.start()
    thread.join()
    assert waited(group) == 0


def test_the_end_of_a_backward_pass(group: TorchGroup) -> None:
    """Between the last gradient and the return."""
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    before = waited(group)
    for number in (1, 2, 3):
        ddp(torch.ones(2, 4)).sum().backward()
        assert waited(group) - before == number


def test_it_is_after_all_gradients(group: TorchGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    ddp, order = DistributedDataParallel(model), list[str]()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: order.append("gradient"))

    def computed() -> tuple[float, float]:
        order.append("computed")
        return 1.0, 0.0

    monkeypatch.setattr(backward_end, "now", computed)
    monkeypatch.setattr(group.watch, "waited_since", lambda began: order.append("returned"))
    ddp(torch.ones(2, 4)).sum().backward()
    assert order == ["gradient"] * 6 + ["computed", "returned"]


def test_a_backward_pass_without_ddp_waits_for_nobody(group: TorchGroup) -> None:
    torch.nn.Linear(4, 1)(torch.ones(2, 4)).sum().backward()
    assert waited(group) == 0


def test_the_hook_ends_with_the_round(framework: TorchFramework, group: TorchGroup) -> None:
    model = torch.nn.Linear(4, 1)
    DistributedDataParallel(model)
    framework.prepare(alone(2))
    computed = backward_end.computed
    model(torch.ones(2, 4)).sum().backward()
    assert backward_end.computed is computed


def test_waiting_for_torchs_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    session, ticks = Session(None, {}), itertools.count(1)
    monkeypatch.setattr(sessions, "_current", session)
    monkeypatch.setattr(sessions, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    data_waits.observe()
    data_waits.observe()
    records: Any = [1, 2, 3, 4]
    loader = DataLoader(records, batch_size=2)
    assert len(list(loader)) == 2
    assert session.waiting_s == 0, "not in training"
    session.training = True
    assert len(list(loader)) == 2
    assert session.waiting_s == 3, "two batches, and the end"


def test_a_wait_inside_another_one_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session, ticks = Session(None, {}), itertools.count(1)
    monkeypatch.setattr(sessions, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    with session.fetching(), session.fetching():
        pass
    assert session.waiting_s == 3
