"""The launcher's options about slots: how many workers, how many slots beside them, when one is dropped."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from edl.config import SlotRules
from edl.errors import SettingError
from edl.launch.accelerators import count_accelerators

MOST_SLOTS = 4096
"""Of one node: far above what hosts have, low enough to catch a typing slip."""

SLOT_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--nproc-per-node", default="1", metavar="N|auto|gpu|cpu", help="Workers on this node. Default: 1."),
    click.option(
        "--spare-slots", type=int, default=0, metavar="N", help="Idle slots that replace dropped ones. Default: 0."
    ),
    click.option(
        "--slot-strikes",
        type=int,
        default=2,
        metavar="N",
        help="Drop a slot that failed N times. 0: never. Default: 2.",
    ),
    click.option(
        "--slot-cooldown", type=float, default=0.0, metavar="SECONDS", help="A dropped slot is back then. 0: never."
    ),
]


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """Slots of this node."""

    workers: int
    spare: int
    remark: str = ""
    """What whoever starts it should know; empty: nothing."""


def rules_from(options: Mapping[str, Any]) -> SlotRules:
    """What all launchers of a job must agree on. Raises ``SettingError``."""
    return SlotRules(options["slot_strikes"], options["slot_cooldown"])


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
    spare, text, devices = options["spare_slots"], options["nproc_per_node"], count_accelerators()
    if not 0 <= spare <= MOST_SLOTS:
        raise SettingError("--spare-slots", spare, f"must be from 0 to {MOST_SLOTS}")
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
