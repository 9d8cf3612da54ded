"""Computes how many nodes a scheduler should provide, and which surplus nodes can be removed. Pure and stateless."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """The part of a node's status that the plan needs."""

    name: str
    index: int = -1
    """The scheduler's index (``NodeInfo.index``); -1: unknown."""
    member: bool = False
    """Whether it is in the running world, or in the one that is being left."""
    spare: bool = False
    """Whether it is ready and waits for a place in a world."""
    cordoned: bool = False
    is_master: bool = False
    """Whether the Master runs in its launcher."""
    host: str = ""
    """Its address."""

    def is_called(self, text: str) -> bool:
        """Whether ``text``, as a scheduler reports it, means this node: its name, its address, or its host's name, from
        which a launcher without ``--node-id`` derives the name."""
        return text in (self.name, self.host) or re.fullmatch(re.escape(text) + "-[0-9a-f]{4}", self.name) is not None


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The part of a job's status that the plan needs."""

    minimum: int
    maximum: int
    unit: int
    """World sizes are multiples of this."""
    desired: int
    asked: bool
    """Whether a size has been requested."""
    running: bool
    """Whether a world is training."""
    suspended: bool = False
    ended: bool = False
    reason: str = ""
    """The reason given for the desired size."""
    nodes: tuple[Node, ...] = ()
    """All nodes, in the order in which they joined."""


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """How to remove surplus nodes."""

    left: int
    """The number of nodes left afterwards; more than wanted if some cannot be removed yet."""
    names: tuple[str, ...] = ()
    """The nodes to remove."""
    drain: tuple[str, ...] = ()
    """The nodes to drain first: those to remove, and members that block the removal of others."""
    reason: str = ""
    blocked: str = ""
    """Why no more nodes can be removed now; empty: all surplus nodes can."""


def target_of(job: JobSummary, size: int) -> int:
    """The number of nodes that the scheduler should provide: the desired size, or the current ``size`` as long as no
    size has been requested, both within the bounds."""
    lowest, highest = -(-job.minimum // job.unit) * job.unit, job.maximum // job.unit * job.unit
    if not job.asked:
        return min(max(size, lowest), highest)
    return min(max(job.desired // job.unit * job.unit, lowest), highest)


def release_plan(job: JobSummary, size: int, indexed: bool) -> RemovalPlan | None:
    """How to reduce ``size`` to the target. ``indexed``: whether the scheduler removes the highest indexes. None: there
    is no surplus, or the world has to change first."""
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
    # Cordoned nodes first, then the newest; the Master's node last, because its removal requires an election.
    order = sorted(
        enumerate(others), key=lambda pair: (pair[1].is_master, not pair[1].cordoned, -pair[1].index, -pair[0])
    )
    going = tuple(node.name for _, node in order[: max(0, surplus - to_come)])
    return RemovalPlan(size - min(surplus, to_come) - len(going), going, going, reason)


def _by_index(job: JobSummary, size: int, target: int, reason: str) -> RemovalPlan | None:
    """The plan for a scheduler that removes the nodes with the highest indexes, so that none of these may be a
    member."""
    unknown = [node.name for node in job.nodes if node.index < 0]
    if unknown:
        return RemovalPlan(
            size, blocked=f"the index of {', '.join(unknown)} is unknown (--node-index): no node can be removed"
        )
    least = _least(job, target)
    left = max([least, *(node.index + 1 for node in job.nodes if node.member)])
    going = tuple(node.name for node in job.nodes if node.index >= left)
    if left == least:
        return RemovalPlan(min(left, size), going, going, reason)
    # Members above the least size are replaced by spare nodes with lower indexes, once enough exist.
    high = [node.name for node in job.nodes if node.member and node.index >= least]
    low = [node for node in job.nodes if node.spare and not node.member and node.index < least]
    if len(low) >= len(high):
        return RemovalPlan(min(left, size), going, (*going, *high), f"{reason}, and others have lower indexes")
    return RemovalPlan(
        min(left, size), going, going, reason, f"{', '.join(high)} trains until nodes with lower indexes join"
    )


def _least(job: JobSummary, target: int) -> int:
    """The least size with ``target`` nodes that are not cordoned: one more than the highest of their indexes, if they
    have the lowest ones. Cordoned nodes with lower indexes stay, because they cannot be removed before those."""
    cordoned = {node.index for node in job.nodes if node.cordoned}
    size = target
    while size - sum(index < size for index in cordoned) < target:
        size += 1
    return size
