"""The launcher's options for the number of workers and of spare slots on this node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edl.errors import SettingError
from edl.launch.accelerators import count_accelerators
from edl.launch.options import value
from edl.launch.options.job import MOST_SLOTS


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """Numbers of slots of this node."""

    workers: int
    spare: int
    remark: str = ""
    """A warning for the user; empty: none."""


def slots_from(text: str) -> int:
    """Parse ``--nproc-per-node``: a number, ``gpu`` (one worker per accelerator), ``cpu`` (one per core that it may
    use), or ``auto`` (``gpu`` if there are accelerators, otherwise ``cpu``). Raises ``SettingError``."""
    if text in ("auto", "gpu"):
        devices = count_accelerators()
        if devices == 0 and text == "gpu":
            raise SettingError("--nproc-per-node", text, "no GPU found on this node", "Give a number, or cpu")
        return devices or _cores()
    if text == "cpu":
        return _cores()
    if not text.isdecimal() or not 1 <= int(text) <= MOST_SLOTS:
        allowed = f"must be a number from 1 to {MOST_SLOTS}, or auto, gpu or cpu"
        raise SettingError("--nproc-per-node", text, allowed)
    return int(text)


def _cores() -> int:
    """Cores that this process may use. A batch system or taskset may leave it fewer than the host has."""
    return len(os.sched_getaffinity(0))


def with_spares(options: Mapping[str, Any], slots: int) -> NodeSlots:
    """Divide the slots into workers and spare slots. ``slots``: the value of ``--nproc-per-node``, which includes the
    spare slots if it is ``gpu`` or ``auto`` and there are accelerators. Raises ``SettingError`` if a spare slot would
    not have an accelerator of its own."""
    spare, text, devices = value("spare_slots", options), options["nproc_per_node"], count_accelerators()
    if spare and devices and text in ("auto", "gpu"):
        slots -= spare
        if slots < 1:
            few = f"leaves no worker on a node with {devices} accelerators"
            raise SettingError("--spare-slots", spare, few, "Lower it")
    if spare and 0 < devices < slots + spare:
        few = f"{slots} workers and {spare} spare slots need {slots + spare} accelerators, but this node has {devices}"
        raise SettingError(
            "--spare-slots", spare, few, "Lower it, or use --nproc-per-node=gpu, which includes the spare slots"
        )
    remark = ""
    if 0 < devices < slots and text not in ("auto", "gpu", "cpu"):
        remark = f"--nproc-per-node={text}, but this node has {devices} accelerators: workers share them"
    return NodeSlots(slots, spare, remark)
