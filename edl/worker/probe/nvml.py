"""Reads the counters of NVIDIA devices through NVML (the package ``nvidia-ml-py``), if both are there."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from edl.health.readings import UNKNOWN, DeviceReadings

MOST_LINKS = 18


def readings(visible: Sequence[str], slots: int, nvml: Any = None) -> tuple[DeviceReadings, ...]:
    """The counters of the devices in ``visible`` (indices or UUIDs, as in ``CUDA_VISIBLE_DEVICES``; empty: all). Empty
    without NVML. ``slots``: of the node; a device has a slot if there are as many devices. ``nvml``: the module, for
    tests."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver
        return ()
    try:
        names = list(visible) or [str(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(_of_device(nvml, name, index if len(names) == slots else -1) for index, name in enumerate(names))
    except nvml.NVMLError:
        return ()
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _of_device(nvml: Any, name: str, slot: int) -> DeviceReadings:
    try:
        handle = (
            nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
        )
        uuid = nvml.nvmlDeviceGetUUID(handle)
    except nvml.NVMLError as error:
        lost = getattr(error, "value", None) in (getattr(nvml, "NVML_ERROR_GPU_IS_LOST", 15),)
        return DeviceReadings(slot, name, lost=lost)

    def read(function: str, *arguments: Any) -> Any:
        """A counter, or None if this device or this NVML has none."""
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    def number(value: Any) -> int:
        return UNKNOWN if value is None else int(value)

    kind = getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1), getattr(nvml, "NVML_VOLATILE_ECC", 0)
    rows = read("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
    double = read("nvmlDeviceGetRetiredPages", getattr(nvml, "NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR", 1))
    throttle = read("nvmlDeviceGetCurrentClocksThrottleReasons")
    errors, down = _links(nvml, read)
    return DeviceReadings(
        slot,
        uuid.decode() if isinstance(uuid, bytes) else str(uuid),
        ecc_uncorrected=number(read("nvmlDeviceGetTotalEccErrors", *kind)),
        rows_remapped=number(rows[1] if rows is not None else None),
        row_remap_pending=number(rows[2] if rows is not None else None),
        row_remap_failed=number(rows[3] if rows is not None else None),
        pages_pending=number(read("nvmlDeviceGetRetiredPagesPendingStatus")),
        pages_retired=UNKNOWN if double is None else len(double),
        throttle=int(throttle or 0),
        nvlink_errors=errors,
        nvlinks_down=down,
    )


def _links(nvml: Any, read: Callable[..., Any]) -> tuple[int, int]:
    """Errors of all NVLinks, and the number of those that are down although others of the device are up."""
    states = [state for link in range(MOST_LINKS) if (state := read("nvmlDeviceGetNvLinkState", link)) is not None]
    if not any(states):
        return UNKNOWN, UNKNOWN  # none, or none in use
    kinds = [getattr(nvml, f"NVML_NVLINK_ERROR_DL_{name}", number) for number, name in enumerate(_ERRORS)]
    found = [read("nvmlDeviceGetNvLinkErrorCounter", link, kind) for link in range(len(states)) for kind in kinds]
    known = [int(value) for value in found if value is not None]
    return (sum(known) if known else UNKNOWN), len(states) - sum(map(bool, states))


_ERRORS = ("REPLAY", "RECOVERY", "CRC_FLIT", "CRC_DATA")
