"""What the counters of a device mean for its health. Pure; ``edl.worker.probe.nvml`` reads them.

A counter that a device does not have is -1. Most counters are about the past: a reading is a fault only if NVIDIA's
guidelines ask for the device to be reset or replaced; all else is a remark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class DeviceReadings:
    """Counters of one NVIDIA device."""

    slot: int = -1
    uuid: str = ""
    lost: bool = False
    """The driver cannot reach the device: it has fallen off the bus."""
    ecc_uncorrected: int = UNKNOWN
    """Uncorrected memory errors since the driver was loaded."""
    rows_remapped: int = UNKNOWN
    """Memory rows that were replaced because of uncorrectable errors."""
    row_remap_pending: int = UNKNOWN
    """1: a row is to be replaced at the next reset."""
    row_remap_failed: int = UNKNOWN
    """1: a row could not be replaced, since no spare is left."""
    pages_pending: int = UNKNOWN
    """1: on older devices, a memory page is to be retired at the next reset."""
    pages_retired: int = UNKNOWN
    """Pages retired because of double-bit errors."""
    throttle: int = 0
    """Reasons for a reduced clock, as NVML's bits."""
    nvlink_errors: int = UNKNOWN
    """Replays, recoveries and CRC errors of all NVLinks."""
    nvlinks_down: int = UNKNOWN
    """NVLinks that exist and carry no data."""


MOST_RETIRED = 60
"""From this many retired pages on, NVIDIA replaces a device."""
HARDWARE_SLOWDOWN, HARDWARE_THERMAL, HARDWARE_BRAKE = 0x8, 0x40, 0x80
_THROTTLES = {
    HARDWARE_THERMAL: "it is too hot (hardware thermal slowdown)",
    HARDWARE_BRAKE: "its power supply brakes it (power brake slowdown)",
    HARDWARE_SLOWDOWN: "its clock is reduced by the hardware",
}
"""Reasons that a healthy device in a healthy host does not have; a limit on power or a clock set by a user is usual."""

Rule = Callable[[DeviceReadings], str]
_FAULTS: tuple[Rule, ...] = (
    lambda one: "it has fallen off the bus" if one.lost else "",
    lambda one: "a memory row could not be replaced: no spare row is left" if one.row_remap_failed > 0 else "",
    lambda one: "a memory row waits to be replaced: reset the device" if one.row_remap_pending > 0 else "",
    lambda one: "a memory page waits to be retired: reset the device" if one.pages_pending > 0 else "",
    lambda one: f"{one.pages_retired} memory pages are retired" if one.pages_retired >= MOST_RETIRED else "",
    lambda one: f"{one.nvlinks_down} NVLinks are down" if one.nvlinks_down > 0 else "",
)
_REMARKS: tuple[Rule, ...] = (
    lambda one: f"{one.ecc_uncorrected} uncorrected memory errors" if one.ecc_uncorrected > 0 else "",
    lambda one: f"{one.rows_remapped} memory rows replaced" if one.rows_remapped > 0 else "",
    lambda one: f"{one.pages_retired} memory pages retired" if 0 < one.pages_retired < MOST_RETIRED else "",
    lambda one: next((text for bit, text in _THROTTLES.items() if one.throttle & bit), ""),
    lambda one: f"{one.nvlink_errors} NVLink errors" if one.nvlink_errors > 0 else "",
)


def faults(one: DeviceReadings) -> str:
    """Why a device must not be used; empty: nothing speaks against it."""
    return _texts(_FAULTS, one)


def remarks(one: DeviceReadings) -> str:
    """What is worth knowing about a device that may be used; empty: nothing."""
    return _texts(_REMARKS, one)


def _texts(rules: tuple[Rule, ...], one: DeviceReadings) -> str:
    return "; ".join(text for rule in rules if (text := rule(one)))
