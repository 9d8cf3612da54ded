"""How many nodes a scheduler should give, and which of those that are too many can go. Arithmetic, no state."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """One that is there, as far as this matters."""

    name: str
    index: int = -1
    """See ``NodeInfo``."""
    member: bool = False
    """It is in the running world, or in the one that is being left."""
    spare: bool = False
    """It is ready, and waits."""
    cordoned: bool = False
    rules: bool = False
    """Its launcher is the Master's."""
    host: str = ""
    """Its address."""

    def is_called(self, text: str) -> bool:
        """Whether a scheduler means this node: by its own name, its address, or the host's name, of which a launcher
        makes a node's name when it is given none."""
        return text in (self.name, self.host) or re.fullmatch(re.escape(text) + "-[0-9a-f]{4}", self.name) is not None


@dataclass(frozen=True, slots=True)
class Job:
    """What of its status matters here."""

    minimum: int
    maximum: int
    unit: int
    desired: int
    asked: bool
    """Somebody has asked for a size."""
    running: bool
    """A world trains."""
    suspended: bool = False
    ended: bool = False
    reason: str = ""
    """Why it wants the size it wants."""
    nodes: tuple[Node, ...] = ()
    """In the order in which they came."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The way down."""

    left: int
    """Nodes that can be left now; more than wanted when some cannot go yet."""
    names: tuple[str, ...] = ()
    """Who goes with it."""
    drain: tuple[str, ...] = ()
    """Who has to be told to leave first: these, or members that stand in the way."""
    reason: str = ""
    blocked: str = ""
    """Why it goes no further, in words."""


def target_of(job: Job, size: int) -> int:
    """Nodes it should give. Until somebody has asked for a size, what it gives is right within the bounds."""
    lowest, highest = -(-job.minimum // job.unit) * job.unit, job.maximum // job.unit * job.unit
    if not job.asked:
        return min(max(size, lowest), highest)
    return min(max(job.desired // job.unit * job.unit, lowest), highest)


def release_plan(job: Job, size: int, indexed: bool) -> Plan | None:
    """What of ``size`` can be given back now; None: nothing is too much, or the world has to change first."""
    target = target_of(job, size)
    members = [node for node in job.nodes if node.member]
    if size <= target or not job.running or len(members) > target:
        return None
    reason = f"{target} nodes are wanted"
    if indexed:
        return _by_index(job, size, target, reason)
    others = [node for node in job.nodes if not node.member]
    to_come = max(0, size - len(job.nodes))
    surplus = size - target
    # Last come, first gone; the Master's node stays if another can go: its place would have to be taken.
    order = sorted(enumerate(others), key=lambda pair: (pair[1].rules, not pair[1].cordoned, -pair[1].index, -pair[0]))
    going = tuple(node.name for _, node in order[: max(0, surplus - to_come)])
    return Plan(size - min(surplus, to_come) - len(going), going, going, reason)


def _by_index(job: Job, size: int, target: int, reason: str) -> Plan | None:
    """The scheduler takes away those with the highest indexes, whoever that is: none of them may be a member."""
    unknown = [node.name for node in job.nodes if node.index < 0]
    if unknown:
        return Plan(size, blocked=f"nobody knows the index of {', '.join(unknown)} (--node-index): none is given back")
    left = max([target, *(node.index + 1 for node in job.nodes if node.member)])
    going = tuple(node.name for node in job.nodes if node.index >= left)
    if left == target:
        return Plan(left, going, going, reason)
    # Members above the target: nodes with lower indexes take their places, once these are there.
    high = [node.name for node in job.nodes if node.member and node.index >= target]
    low = [node for node in job.nodes if node.spare and not node.member and node.index < target]
    if len(low) >= len(high):
        return Plan(min(left, size), going, (*going, *high), f"{reason}, and others have lower indexes")
    return Plan(min(left, size), going, going, reason, f"{', '.join(high)} trains until nodes with lower indexes come")
