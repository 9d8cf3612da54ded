"""What the counters of devices mean."""

from __future__ import annotations

import dataclasses

import pytest

from edl.health.readings import DeviceReadings, faults, remarks

NOTHING = DeviceReadings(0, "GPU-1")
WELL = DeviceReadings(
    0, "GPU-1", ecc_uncorrected=0, rows_remapped=0, row_remap_pending=0, row_remap_failed=0,
    pages_pending=0, pages_retired=0, throttle=0x1 | 0x4, nvlink_errors=0, nvlinks_down=0,
)  # fmt: skip


@pytest.mark.parametrize("one", [NOTHING, WELL])
def test_a_healthy_device_or_one_without_counters(one: DeviceReadings) -> None:
    assert (faults(one), remarks(one)) == ("", "")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lost": True}, "it has fallen off the bus"),
        ({"row_remap_failed": 1}, "no spare row is left"),
        ({"row_remap_pending": 1}, "reset the device"),
        ({"pages_pending": 1}, "waits to be retired"),
        ({"pages_retired": 60}, "60 memory pages are retired"),
        ({"nvlinks_down": 2}, "2 NVLinks are down"),
    ],
)
def test_faults(change: dict[str, int], text: str) -> None:
    one = dataclasses.replace(WELL, **change)  # type: ignore[arg-type]
    assert text in faults(one)
    assert remarks(one) == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ecc_uncorrected": 3}, "3 uncorrected memory errors"),
        ({"rows_remapped": 1}, "1 memory rows replaced"),
        ({"pages_retired": 59}, "59 memory pages retired"),
        ({"throttle": 0x40}, "too hot"),
        ({"throttle": 0x80}, "power"),
        ({"throttle": 0x8}, "reduced by the hardware"),
        ({"nvlink_errors": 7}, "7 NVLink errors"),
    ],
)
def test_remarks(change: dict[str, int], text: str) -> None:
    one = dataclasses.replace(WELL, **change)  # type: ignore[arg-type]
    assert text in remarks(one)
    assert faults(one) == ""


def test_several_of_them() -> None:
    one = dataclasses.replace(WELL, row_remap_failed=1, nvlinks_down=1)
    assert faults(one).count(";") == 1
