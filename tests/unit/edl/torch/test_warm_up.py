"""A new worker's first calls on its device. The calls run here on the CPU, with gloo in NCCL's place."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402

from edl.torch import framework as frameworks  # noqa: E402
from edl.torch import nccl, warm_calls  # noqa: E402
from edl.torch.framework import TorchFramework  # noqa: E402
from edl.torch.warm_calls import DeviceCalls  # noqa: E402
from edl.torch.warm_up import WarmUpStep, carry_out, device_of, plan  # noqa: E402

pytestmark = pytest.mark.torch
EVERYTHING = tuple(WarmUpStep)


class FakeCalls:
    """A device on which one call may fail."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.made: list[str] = []

    def _call(self, name: str) -> None:
        self.made.append(name)
        if name == self.fails:
            raise RuntimeError("CUDA error: out of memory")

    def open(self) -> None:
        self._call("open")

    def multiply(self) -> None:
        self._call("multiply")

    def reduce(self) -> None:
        self._call("reduce")


def never() -> bool:
    return False


# --- decisions -------------------------------------------------------------------------------------------------------


def test_nothing_is_done_without_a_device() -> None:
    assert plan(devices=0) == ()
    assert plan(devices=1) == plan(devices=8) == EVERYTHING


@pytest.mark.parametrize(("local_rank", "devices", "device"), [(0, 1, 0), (3, 8, 3), (3, 1, 0), (7, 8, 7)])
def test_the_device_is_the_one_that_the_worker_will_use(local_rank: int, devices: int, device: int) -> None:
    assert device_of(local_rank, devices) == device


def test_a_failure_is_returned_and_ends_it() -> None:
    calls = FakeCalls(fails="multiply")
    failed = carry_out(EVERYTHING, calls, never)
    assert failed == "multiplying two matrices failed: RuntimeError: CUDA error: out of memory"
    assert calls.made == ["open", "multiply"]


@pytest.mark.parametrize("wanted_after", range(4))
def test_a_worker_that_is_wanted_ends_with_the_step_that_it_is_in(wanted_after: int) -> None:
    calls = FakeCalls()
    assert carry_out(EVERYTHING, calls, lambda: len(calls.made) >= wanted_after) == ""
    assert calls.made == ["open", "multiply", "reduce"][:wanted_after]


# --- calls -----------------------------------------------------------------------------------------------------------


class Backends:
    """Makes gloo backends of one, and keeps a record of them."""

    def __init__(self) -> None:
        self.made = 0
        self.freed = threading.Event()

    def __call__(self) -> Any:
        self.made += 1
        freed = self.freed

        class Freed(dist.ProcessGroupGloo):
            def __del__(self) -> None:
                freed.set()

        return Freed(HashStore(), 0, 1, timeout=timedelta(seconds=60))


@contextlib.contextmanager
def default(dtype: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "mode",
    [contextlib.nullcontext, torch.no_grad, torch.inference_mode, lambda: default(torch.float16),
     lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["plain", "no_grad", "inference", "half", "meta", "autocast"],
)  # fmt: skip
def test_the_calls_leave_no_trace(mode: Callable[[], Any]) -> None:
    backends = Backends()
    with mode():
        numbers = torch.get_rng_state(), random.getstate()
        modes = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        failed = carry_out(EVERYTHING, DeviceCalls(torch.device("cpu"), backends), never)
        assert failed == ""
        assert torch.equal(torch.get_rng_state(), numbers[0])
        assert random.getstate() == numbers[1]
        assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == modes
    assert backends.made == 1
    assert backends.freed.wait(60), "its threads and descriptors are gone"
    assert not dist.is_initialized()


def test_a_backend_that_fails_is_freed_and_not_raised() -> None:
    freed = threading.Event()

    class Refusing:
        def allreduce(self, tensors: list[Any]) -> Any:
            raise RuntimeError("NCCL error: no socket interface found")

        def abort(self) -> None:
            freed.set()
            raise RuntimeError("it was not formed")

    failed = carry_out(EVERYTHING, DeviceCalls(torch.device("cpu"), Refusing), never)
    assert failed == "NCCL with itself failed: RuntimeError: NCCL error: no socket interface found"
    assert freed.wait(60)


def test_nccl_gets_its_settings_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads would otherwise stay for long."""
    order: list[Any] = []

    def backend(store: Any, rank: int, size: int, timeout: timedelta) -> object:
        order.append((rank, size))
        return object()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", backend, raising=False)
    monkeypatch.setattr(nccl, "set_up", lambda environment: order.append("settings"))
    warm_calls.nccl_of_one()
    assert order == ["settings", (0, 1)]


# --- the framework ---------------------------------------------------------------------------------------------------


def test_a_worker_on_the_cpu_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "_uses_nccl", lambda: False)
    for name in ("open", "multiply", "reduce"):
        monkeypatch.setattr(DeviceCalls, name, lambda self: pytest.fail("there is no device"))
    assert TorchFramework().warm_up(0, never) == ""


def test_a_worker_with_devices_uses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    def calls(device: Any) -> FakeCalls:
        used.append(device)
        return FakeCalls()

    monkeypatch.setattr(frameworks, "_uses_nccl", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(frameworks, "DeviceCalls", calls)
    assert TorchFramework().warm_up(2, never) == ""
    assert used == [torch.device("cuda", 2)]
