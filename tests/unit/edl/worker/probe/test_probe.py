"""A node's own part of a probe: devices, counters, and the user's own probes."""

from __future__ import annotations

from typing import Any

import pytest

from edl.types import NodeId
from edl.wire.health import CheckHealth, HealthChecked, SlotFinding
from edl.wire.health_records import ProbeOrder
from edl.worker.probe import nvml
from edl.worker.probe.main import own_part
from edl.worker.probe.plugins import run_plugins
from edl.worker.probe.product import WrongProduct


class Device:
    """A device that takes so long, or fails."""

    kind = "card"

    def __init__(self, slot: int, takes_s: float = 1.0, error: Exception | None = None) -> None:
        self.slot = slot
        self._takes_s = takes_s
        self._error = error

    def product_s(self, size: int) -> float:
        if self._error is not None:
            raise self._error
        return self._takes_s


def checked(*devices: Device, slots: int = 2, probes: tuple[str, ...] = ()) -> HealthChecked:
    order = CheckHealth(7, 1, 0, (), 64, 10.0, "test")
    return own_part(ProbeOrder(order, NodeId("a"), slots, "s", probes), lambda _: devices)


@pytest.fixture(autouse=True)
def without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "readings", lambda visible, slots: ())


def test_sound_devices() -> None:
    assert checked(Device(0, 1.0), Device(1, 2.0)) == HealthChecked(7, 1, "card", 2.0)


def test_one_defective_device_of_several_costs_its_slot() -> None:
    found = checked(Device(0), Device(1, error=WrongProduct("wrong numbers")))
    assert (found.error, found.slots, found.product_s) == ("", (SlotFinding(1, "card: wrong numbers"),), 1.0)


def test_a_device_that_several_slots_share_costs_the_node() -> None:
    found = checked(Device(-1, error=RuntimeError("CUDA error: unknown error")))
    assert (found.error, found.slots) == ("card: CUDA error: unknown error", ())


def test_so_do_all_devices() -> None:
    found = checked(Device(0, error=WrongProduct("x")), Device(1, error=WrongProduct("y")))
    assert (found.error, found.slots) == ("card: x; card: y", ())


def fine() -> None:
    """A probe that finds nothing."""


def broken() -> str:
    return "no space"


def of_a_slot() -> dict[int, str]:
    return {1: "too hot", 0: ""}


def failing() -> str:
    raise OSError("no such disk")


HERE = __name__


@pytest.mark.parametrize(
    ("name", "error", "slots"),
    [
        ("fine", "", ()),
        ("broken", f"{HERE}:broken: no space", ()),
        ("of_a_slot", "", (SlotFinding(1, f"{HERE}:of_a_slot: too hot"),)),
        ("failing", f"{HERE}:failing: OSError: no such disk", ()),
        ("absent", f"{HERE}:absent: AttributeError: module {HERE!r} has no attribute 'absent'", ()),
        ("HERE", f"{HERE}:HERE: TypeError: {HERE}:HERE is no function", ()),
    ],
)
def test_the_users_own_probes(name: str, error: str, slots: tuple[SlotFinding, ...]) -> None:
    assert run_plugins([f"{HERE}:{name}"]) == (error, slots)


def test_they_are_part_of_the_check() -> None:
    assert checked(Device(0), probes=(f"{HERE}:broken",)).error == f"{HERE}:broken: no space"


def test_a_module_that_is_not_there_names_itself() -> None:
    assert "No module named 'nowhere'" in run_plugins(["nowhere:probe"])[0]


# --- counters --------------------------------------------------------------------------------------------------------


class NvmlError(Exception):
    value = 3


class FakeNvml:
    """Two cards: a new one with remapped rows, and one that does not answer."""

    NVMLError = NvmlError
    NVML_ERROR_GPU_IS_LOST = 15

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1:
            lost = NvmlError()
            lost.value = 15
            raise lost
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return (5, 2, 1, 0)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)
        return 4

    def nvmlDeviceGetRetiredPages(self, handle: int, cause: int) -> list[int]:
        raise NvmlError

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x40

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link > 3:
            raise NvmlError
        return int(link != 2)

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: int, link: int, kind: int) -> int:
        return 1


@pytest.mark.parametrize("visible", [[], ["0", "1"]])
def test_counters_are_read_as_far_as_a_card_has_them(visible: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    first, second = nvml.readings(visible, 2, FakeNvml())
    assert (first.slot, first.uuid, first.rows_remapped, first.row_remap_pending, first.row_remap_failed) == (
        0, "GPU-0", 2, 1, 0,
    )  # fmt: skip
    assert (first.ecc_uncorrected, first.throttle, first.pages_retired, first.pages_pending) == (4, 0x40, -1, -1)
    assert (first.nvlink_errors, first.nvlinks_down) == (16, 1)
    assert (second.slot, second.lost) == (1, True)


def test_a_defective_card_costs_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    real: Any = nvml.readings
    monkeypatch.setattr(nvml, "readings", lambda visible, slots: real(["0"], 2, FakeNvml()))
    found = checked(Device(0), Device(1), slots=2)
    assert "waits to be replaced" in found.error, "one card for two slots: both are concerned"
    monkeypatch.setattr(nvml, "readings", lambda visible, slots: real([], 2, FakeNvml()))
    found = checked(Device(0), Device(1), Device(2), slots=3)
    assert found.error == ""
    assert [(one.slot, "fallen off the bus" in one.error) for one in found.slots] == [(0, False), (1, True)]
