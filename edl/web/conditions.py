"""The conditions of a job, in the sense of Kubernetes. Pure.

The status says whether a condition holds. Since when it does is derived from the history, which is in the store, so the
next Master gives the same answer. If the history does not reach back far enough, the time of its oldest entry is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edl.wire.status import SUSPENDED, HistoryEntry, JobStatus, Kind

TYPES = ("Available", "Progressing", "Suspended", "Degraded", "Stopping", "Ended")


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the job: whether it holds, why, and since when."""

    kind: str
    """One of ``TYPES``."""
    holds: bool
    reason: str
    """One word in CamelCase, for programs."""
    message: str
    since_s: float
    """Time of the last transition, in seconds since the Unix epoch by the clock of a Master's host; 0 if there is no
    history."""


Transition = Callable[[HistoryEntry], "bool | None"]
"""A function from a history entry to the value of a condition after it; None: the entry does not change it."""


def conditions(status: JobStatus, history: Sequence[HistoryEntry]) -> tuple[Condition, ...]:
    """All conditions of the job, in the order of ``TYPES``."""
    found = []
    for kind, evaluate, transition in _RULES:
        holds, reason, message = evaluate(status)
        found.append(Condition(kind, holds, reason, message, _since(holds, transition, history)))
    return tuple(found)


def _since(holds: bool, transition: Transition, history: Sequence[HistoryEntry]) -> float:
    """The time of the last change to the value ``holds``, as far as the history tells."""
    state, since_s = None, history[0].at_s if history else 0.0
    for entry in history:
        new = transition(entry)
        if new is not None and new != state:
            if state is not None or new == holds:
                since_s = entry.at_s
            state = new
    if state is not None and state != holds and history:
        return history[-1].at_s  # the change is newer than the last entry
    return since_s


Evaluation = tuple[bool, str, str]
"""Whether a condition holds, its reason, and its message."""


def _available(status: JobStatus) -> Evaluation:
    if status.phase == "running" and status.world_size:
        return True, "WorldRunning", f"{status.world_size} workers on {_nodes(status)} nodes"
    if status.phase == "ended":
        return False, "Ended", status.reason
    if status.scale.suspended:
        return False, "Suspended", "no worker trains until the job is resumed"
    return False, "NoWorld", status.reason


def _progressing(status: JobStatus) -> Evaluation:
    scale = status.scale
    if status.phase == "ended":
        return False, "Ended", status.reason
    if status.boundary:
        return True, "AtBoundary", status.boundary
    if scale.waiting:
        return True, "Waiting", scale.waiting
    if scale.observed < scale.generation:
        return True, "Resizing", f"generation {scale.generation} is requested, {scale.observed} is in effect"
    if status.phase != "running" and not scale.suspended:
        return True, "Forming", status.reason
    return False, "AsRequested", "the world has the requested size"


def _suspended(status: JobStatus) -> Evaluation:
    scale = status.scale
    if scale.suspended:
        return True, "Suspended", scale.reason or "requested"
    return False, "NotSuspended", ""


def _degraded(status: JobStatus) -> Evaluation:
    scale, there = status.scale, _nodes(status)
    if status.phase == "ended" or scale.suspended:
        return False, "NotTraining", ""
    if status.flaws:
        return True, "Incomplete", status.flaws[0]
    if status.phase != "running":
        return True, "NoWorld", status.reason
    if there < scale.requested:
        return True, "FewerNodes", f"{there} of {scale.requested} requested nodes train"
    return False, "AllNodes", f"{there} nodes train"


def _stopping(status: JobStatus) -> Evaluation:
    return (True, "Asked", f"stop requested by {status.kill}") if status.kill else (False, "NotAsked", "")


def _ended(status: JobStatus) -> Evaluation:
    return (True, "Ended", status.reason) if status.phase == "ended" else (False, "NotEnded", "")


def _nodes(status: JobStatus) -> int:
    """Number of nodes of the running world, counted from the nodes if the Master reports no size."""
    return status.scale.nodes or sum(node.position >= 0 for node in status.nodes)


_WORLD = {Kind.WORLD_FORMED: True, Kind.WORLD_STOPPED: False, Kind.WAITING: False, Kind.JOB_ENDED: False}
_MOVING = {
    Kind.NODE_JOINED: True,
    Kind.NODE_RETURNED: True,
    Kind.NODE_LOST: True,
    Kind.WORLD_STOPPED: True,
    Kind.WAITING: True,
    Kind.BOUNDARY: True,
    Kind.WORLD_FORMED: False,
}
_FEWER = {Kind.NODE_LOST: True, Kind.WORLD_STOPPED: True, Kind.WAITING: True, Kind.WORLD_FORMED: False}


def _by_kind(table: Mapping[Kind, bool], rests: bool | None = None) -> Transition:
    """A transition that depends only on the kind of the entry. ``rests``: the value once the job is suspended."""
    by_value = {kind.value: after for kind, after in table.items()}

    def transition(entry: HistoryEntry) -> bool | None:
        resting = entry.kind == Kind.SCALE.value and entry.text.startswith(SUSPENDED)
        return rests if resting else by_value.get(entry.kind)

    return transition


def _suspension(entry: HistoryEntry) -> bool | None:
    """The transition of ``Suspended``: entries are recognised by the texts of ``edl.master.sizing``."""
    if entry.kind != Kind.SCALE.value:
        return None
    return True if entry.text.startswith("job suspended") else False if entry.text.startswith("job resumed") else None


_RULES: tuple[tuple[str, Callable[[JobStatus], Evaluation], Transition], ...] = (
    ("Available", _available, _by_kind(_WORLD, rests=False)),
    ("Progressing", _progressing, _by_kind(_MOVING, rests=False)),
    ("Suspended", _suspended, _suspension),
    ("Degraded", _degraded, _by_kind(_FEWER, rests=False)),
    ("Stopping", _stopping, lambda entry: None),
    ("Ended", _ended, _by_kind({Kind.JOB_ENDED: True})),
)
