"""The health of a job's nodes, from the status and the nodes' registrations. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl.cli.node_text import kind_of
from edl.cli.show import dropped_line, health_line
from edl.master.alarms import described
from edl.wire.alarm import Alarm
from edl.wire.health import HealthView
from edl.wire.records import NodeInfo
from edl.wire.status import DroppedSlot, JobStatus, NodeView

NODES = ("NODE", "HOST", "STATE", "DEVICES", "DROPPED", "ALARMS", "CHECK")


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """What is known about the health of one node."""

    node: str
    host: str
    state: str
    slots: int
    devices: tuple[str, ...] = ()
    """UUIDs of the devices of each slot, separated by commas; empty if unknown."""
    dropped: tuple[DroppedSlot, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    check: HealthView | None = None
    """What is known from health checks; None: nothing."""


def health_of(status: JobStatus, launchers: Sequence[NodeInfo]) -> list[NodeHealth]:
    """The health of all nodes of a job, in the order of the status."""
    infos: dict[str, NodeInfo] = {info.node: info for info in launchers}
    return [_health(view, status, infos.get(view.node)) for view in status.nodes]


def _health(view: NodeView, status: JobStatus, info: NodeInfo | None) -> NodeHealth:
    return NodeHealth(
        *(view.node, view.host, kind_of(view), view.slots + view.spare_slots),
        info.devices if info is not None else (),
        tuple(one for one in status.dropped if one.node == view.node),
        tuple(one for one in status.alarms if one.node == view.node),
        next((one for one in status.health if one.node == view.node), None),
    )


def health_row(one: NodeHealth) -> list[str]:
    """The row of the table ``NODES``."""
    known = [device for device in one.devices if device]
    devices = f"{len(known)} of {one.slots}" if known else "unknown"
    counted = [str(len(part)) if part else "-" for part in (one.dropped, one.alarms)]
    return [one.node, one.host, one.state, devices, *counted, one.check.state if one.check is not None else "-"]


def problem_lines(status: JobStatus, nodes: Sequence[NodeHealth]) -> list[str]:
    """The alarms, dropped slots and warnings, in full. Those of the whole job are included."""
    alarms = [one for one in status.alarms if not one.node] + [alarm for one in nodes for alarm in one.alarms]
    lines = [f"Alarm ({one.severity}): {described(one, one.text)}" for one in alarms]
    lines += [dropped_line(slot) for one in nodes for slot in one.dropped]
    lines += [health_line(one.check) for one in nodes if one.check is not None and one.check.why]
    return lines + [f"Warning: {text}" for text in status.warnings]
