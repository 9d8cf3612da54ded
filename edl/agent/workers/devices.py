"""Which of a node's devices belong to which of its slots. Pure.

A node's devices are listed by a variable such as ``CUDA_VISIBLE_DEVICES``, or by number where it is not set. Where they
divide evenly among all slots (spare ones included), slot 0 has the first share, slot 1 the next, and so on. Workers
count the devices that they see from 0, so after a drop their list holds the devices of the used slots only, in order:
local rank ``i`` finds its own where it always does, and nobody touches the dropped one.
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
"""By which a process is told the accelerators that it may use: NVIDIA, AMD, Ascend, Kunlun, Intel."""

Devices = Mapping[str, tuple[str, ...]]
"""Variable to the node's own list, for each kind of accelerator that the node has."""


def listed(text: str) -> tuple[str, ...]:
    """The entries of such a variable: ``0,2`` or UUIDs. What follows a ``-1`` is not visible (CUDA's rule)."""
    found: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry == "-1":
            break
        if entry:
            found.append(entry)
    return tuple(found)


def devices_of_slot(devices: Sequence[str], slots: int, slot: int) -> tuple[str, ...]:
    """A slot's own devices. ``slots``: all that the node has, spare ones included; ``slot`` is below that.

    Empty when they do not divide evenly: then slots share devices, and nothing belongs to one alone.
    """
    share, rest = divmod(len(devices), slots)
    return () if rest else tuple(devices[slot * share : (slot + 1) * share])


def visible(devices: Devices, slots: int, used: Sequence[int]) -> dict[str, str]:
    """The variables by which workers see the devices of these slots, and only those. ``used``: slots, ascending.

    Empty when all slots are used, or nothing can be told apart: the node's own environment holds.
    """
    if len(used) == slots:
        return {}
    found = {
        variable: ",".join(entry for slot in used for entry in devices_of_slot(entries, slots, slot))
        for variable, entries in devices.items()
    }
    return {variable: text for variable, text in found.items() if text}
