"""gloo's devices, which older versions of torch must not free by themselves."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
c10d = pytest.importorskip("torch.distributed.distributed_c10d")

from edl.torch import devices  # noqa: E402
from edl.torch.group import NotingStore, TorchGroup, forget_default_group  # noqa: E402
from edl.wire.local import Seat  # noqa: E402
from tests.torch_release import installed  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("version", "needed"),
    [("2.4.1+cu121", True), ("2.12.0", True), ("2.13.0+cpu", False), ("2.15.0", False), ("3.0.0a0+gitabc", False)],
)
def test_older_versions_need_it(version: str, needed: bool) -> None:
    assert devices.needed(version) is needed


class Gloo:
    """The result that torch's call would have."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def create_default_device(self) -> str:
        self.made.append("default")
        return "default"

    def create_device(self, interface: str) -> str:
        self.made.append(interface)
        return interface

    def _Options(self) -> Any:
        return SimpleNamespace()


@pytest.mark.parametrize(
    ("interfaces", "made"), [(None, ["default"]), ("", ["default"]), ("lo", ["lo"]), ("eth0,eth1", ["eth0", "eth1"])]
)
def test_the_interfaces_are_those_that_torch_would_take(interfaces: str | None, made: list[str]) -> None:
    gloo, environment = Gloo(), {} if interfaces is None else {"GLOO_SOCKET_IFNAME": interfaces}
    options = devices.options(gloo, timedelta(seconds=7), environment)
    assert options._devices == gloo.made == made
    assert (options._threads, options._timeout) == (2 * len(made), timedelta(seconds=7))


def test_torch_takes_them() -> None:
    options = devices.options(c10d.ProcessGroupGloo, timedelta(seconds=7), os.environ)
    alone = c10d.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1, options)
    total = torch.ones(2)
    alone.allreduce([total]).wait()
    assert total.tolist() == [1.0, 1.0]


@pytest.mark.skipif(
    installed() >= (2, 14), reason="torch from 2.14 on passes gloo what edl leaves alone, and needs no devices kept"
)
def test_a_group_that_cannot_be_formed_keeps_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(store: NotingStore, key: str, value: Any) -> None:
        raise OSError("nobody takes it")

    monkeypatch.setattr(devices, "needed", lambda version: True)
    monkeypatch.setattr(NotingStore, "set", fails)
    seat = Seat(
        round=1, rank=0, local_rank=0, world_size=1, local_world_size=1, node="n", nodes=1, position=0,
        endpoints=("h:1",), master="127.0.0.1:1", era=1, restore_era=0, restore_commit=0, shards=1, stored=False,
        checkpoint_dir="", token="",
    )  # fmt: skip
    group = TorchGroup(seat)
    try:
        with pytest.raises((OSError, RuntimeError), match="nobody takes it"):
            group.connect("gloo")
        assert [one for one in group._held if isinstance(one, c10d.ProcessGroupGloo._Options)]
    finally:
        forget_default_group()
        group.retire()
