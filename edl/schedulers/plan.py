"""Computes how many nodes a scheduler should provide, and which surplus nodes can be removed. Stateless."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A node that exists, reduced to what matters here."""

    name: str
    index: int = -1
    """See ``NodeInfo``."""
    member: bool = False
    """It is in the running world, or in the one that is being left."""
    spare: bool = False
    """It is ready and waiting."""
    cordoned: bool = False
    is_master: bool = False
    """The Master runs in its launcher."""
    host: str = ""
    """Its address."""

    def is_called(self, text: str) -> bool:
        """Whether a scheduler means this node: by its own name, its address, or its host's name, from which a launcher
        derives a node name when it is given none."""
        return text in (self.name, self.host) or re.fullmatch(re.escape(text) + "-[0-9a-f]{4}", self.name) is not None


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The part of a job's status that matters here."""

    minimum: int
    maximum: int
    unit: int
    desired: int
    asked: bool
    """A size has been requested."""
    running: bool
    """A world is training."""
    suspended: bool = False
    ended: bool = False
    reason: str = ""
    """Why it wants that size."""
    nodes: tuple[Node, ...] = ()
    """In the order in which they joined."""


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """The nodes to remove now."""

    left: int
    """The number of nodes left afterwards; more than wanted when some cannot be removed yet."""
    names: tuple[str, ...] = ()
    """The nodes to remove."""
    drain: tuple[str, ...] = ()
    """The nodes that must leave first: those to remove, or members that block the removal."""
    reason: str = ""
    blocked: str = ""
    """Why no more can be removed now, in words."""


def target_of(job: JobSummary, size: int) -> int:
    """The number of nodes that the scheduler should provide. Until a size is requested, the current size is kept within
    the bounds."""
    lowest, highest = -(-job.minimum // job.unit) * job.unit, job.maximum // job.unit * job.unit
    if not job.asked:
        return min(max(size, lowest), highest)
    return min(max(job.desired // job.unit * job.unit, lowest), highest)


def release_plan(job: JobSummary, size: int, indexed: bool) -> RemovalPlan | None:
    """The part of ``size`` that can be given back now; None: there is no surplus, or the world has to change first."""
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
    # Newest first. The Master's node is last, since its removal requires a new election.
    order = sorted(
        enumerate(others), key=lambda pair: (pair[1].is_master, not pair[1].cordoned, -pair[1].index, -pair[0])
    )
    going = tuple(node.name for _, node in order[: max(0, surplus - to_come)])
    return RemovalPlan(size - min(surplus, to_come) - len(going), going, going, reason)


def _by_index(job: JobSummary, size: int, target: int, reason: str) -> RemovalPlan | None:
    """The scheduler removes the nodes with the highest indexes, so none of these may be a member."""
    unknown = [node.name for node in job.nodes if node.index < 0]
    if unknown:
        return RemovalPlan(
            size, blocked=f"the index of {', '.join(unknown)} is unknown (--node-index): no node is given back"
        )
    left = max([target, *(node.index + 1 for node in job.nodes if node.member)])
    going = tuple(node.name for node in job.nodes if node.index >= left)
    if left == target:
        return RemovalPlan(left, going, going, reason)
    # Members above the target are replaced by spare nodes with lower indexes, once enough exist.
    high = [node.name for node in job.nodes if node.member and node.index >= target]
    low = [node for node in job.nodes if node.spare and not node.member and node.index < target]
    if len(low) >= len(high):
        return RemovalPlan(min(left, size), going, (*going, *high), f"{reason}, and others have lower indexes")
    return RemovalPlan(
        min(left, size), going, going, reason, f"{', '.join(high)} trains until nodes with lower indexes join"
    )
