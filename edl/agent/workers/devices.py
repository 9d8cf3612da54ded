"""Assigns a node's devices to its slots. Pure.

A node's devices are listed by a variable such as ``CUDA_VISIBLE_DEVICES``, or by number if it is not set. If they
divide evenly among all slots (spare ones included), slot 0 has the first share, slot 1 the next, and so on. Workers
count the visible devices from 0, so after a slot is dropped their list contains only the devices of the used slots, in
order: local rank ``i`` finds its device as usual, and the dropped slot's device is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "XPU_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
"""Variables that list the accelerators a process may use: NVIDIA, AMD, Ascend, Kunlun, Intel."""

Devices = Mapping[str, tuple[str, ...]]
"""The node's device list by variable, for each kind of accelerator that it has."""


def listed(text: str) -> tuple[str, ...]:
    """Parse such a variable: ``0,2`` or UUIDs. Entries after a ``-1`` are not visible (CUDA's rule)."""
    found: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry == "-1":
            break
        if entry:
            found.append(entry)
    return tuple(found)


def devices_of_slot(devices: Sequence[str], slots: int, slot: int) -> tuple[str, ...]:
    """A slot's own devices. ``slots``: the number of slots, spare ones included; ``slot``: from 0 to ``slots - 1``.

    Empty if they do not divide evenly: then slots share devices.
    """
    share, rest = divmod(len(devices), slots)
    return () if rest else tuple(devices[slot * share : (slot + 1) * share])


def visible(devices: Devices, slots: int, used: Sequence[int]) -> dict[str, str]:
    """Variables that make only the devices of these slots visible. ``used``: slots, ascending.

    Empty if all slots are used or devices cannot be assigned: then the node's own environment applies.
    """
    if len(used) == slots:
        return {}
    found = {
        variable: ",".join(entry for slot in used for entry in devices_of_slot(entries, slots, slot))
        for variable, entries in devices.items()
    }
    return {variable: text for variable, text in found.items() if text}
