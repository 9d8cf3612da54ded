"""The launcher's options about slots: how many workers, how many slots beside them, when one is dropped."""

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
    """Slots of this node."""

    workers: int
    spare: int
    remark: str = ""
    """A warning for the user who starts the job; empty if there is none."""


def slots_from(text: str) -> int:
    """``--nproc-per-node``: a number, ``gpu`` for one worker an accelerator, ``cpu`` for one a processor core, ``auto``
    for the one that there is. Raises ``SettingError``."""
    if text in ("auto", "gpu"):
        devices = count_accelerators()
        if devices == 0 and text == "gpu":
            raise SettingError("--nproc-per-node", text, "no GPU found on this node", "Give a number, or cpu")
        return devices or os.cpu_count() or 1
    if text == "cpu":
        return os.cpu_count() or 1
    if not text.isdecimal() or not 1 <= int(text) <= MOST_SLOTS:
        allowed = f"must be a number of at least 1 and at most {MOST_SLOTS}, or auto, gpu or cpu"
        raise SettingError("--nproc-per-node", text, allowed)
    return int(text)


def with_spares(options: Mapping[str, Any], slots: int) -> NodeSlots:
    """Workers and spare slots. ``slots``: what ``--nproc-per-node`` says. Where it counts accelerators the spare ones
    are among them. Raises ``SettingError`` when a spare slot would have no device of its own."""
    spare, text, devices = value("spare_slots", options), options["nproc_per_node"], count_accelerators()
    if spare and devices and text in ("auto", "gpu"):
        slots -= spare
        if slots < 1:
            few = f"no worker would be left on a node with {devices} accelerators"
            raise SettingError("--spare-slots", spare, few, "Give fewer")
    if spare and 0 < devices < slots + spare:
        few = f"{slots} workers and {spare} spare slots need as many accelerators, and this node has {devices}"
        raise SettingError(
            "--spare-slots", spare, few, "Give fewer, or --nproc-per-node=gpu: the spare ones are among them"
        )
    remark = ""
    if 0 < devices < slots and text not in ("auto", "gpu", "cpu"):
        remark = f"--nproc-per-node={text}, and this node has {devices} accelerators: workers share them"
    return NodeSlots(slots, spare, remark)
