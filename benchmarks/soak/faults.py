"""The faults that the soak injects: whom they strike, how long they last, and what they take away meanwhile."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Target(enum.Enum):
    """Whom a fault strikes."""

    WORKER = "a worker"
    NODE = "a launcher"
    MASTER = "the Master's launcher"
    MEMBER = "a node's member of the store"
    PSERVER = "a pserver"
    CLOCK = "the clock of a node that has one of its own"
    DISK = "a job's disk"
    MACHINE = "the machine"


class Need(enum.Enum):
    """What the machine must allow. The value completes "this machine lacks …"."""

    NAMESPACES = "network namespaces"
    NETEM = "the packet scheduler netem"
    NARROW = "the packet scheduler tbf"
    DISK = "a disk of its own for each job (loop mounts)"
    FREEZE = "fsfreeze on a disk of its own"
    CLOCK = "a C compiler, for clocks that can be moved"


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault. ``lasts_s``: shortest and longest time until it is undone; zeros if there is nothing to undo.

    ``takes_node``: the node's workers may leave the world. ``takes_member``: its member of the store may be lost.
    ``takes_rows``: a pserver's rows may be lost. ``takes_process``: the launcher's process ends.
    """

    name: str
    target: Target
    lasts_s: tuple[float, float] = (0.0, 0.0)
    takes_node: bool = False
    takes_member: bool = False
    takes_rows: bool = False
    takes_process: bool = False
    needs: Need | None = None


def _link(name: str, lasts_s: tuple[float, float], need: Need = Need.NAMESPACES) -> Fault:
    return Fault(name, Target.NODE, lasts_s, takes_node=True, takes_member=True, takes_rows=True, needs=need)


def _process(name: str, target: Target, lasts_s: tuple[float, float]) -> Fault:
    return Fault(name, target, lasts_s, takes_node=True, takes_member=True, takes_rows=True, takes_process=True)


def _frozen(name: str, target: Target) -> Fault:
    return Fault(name, target, (1.0, 8.0), takes_node=True, takes_rows=True)


_ALL = (
    Fault("kill-worker", Target.WORKER),
    Fault("stop-worker", Target.WORKER, (1.0, 8.0)),
    _process("kill-launcher", Target.NODE, (0.5, 6.0)),
    _frozen("stop-launcher", Target.NODE),
    _process("kill-master", Target.MASTER, (0.5, 6.0)),
    _frozen("stop-master", Target.MASTER),
    Fault("kill-member", Target.MEMBER, takes_member=True),
    # A frozen member that led the store ends all leases when it resumes, so its node may leave the world.
    Fault("stop-member", Target.MEMBER, (1.0, 8.0), takes_node=True, takes_member=True, takes_rows=True),
    Fault("kill-pserver", Target.PSERVER, takes_rows=True),
    Fault("stop-pserver", Target.PSERVER, (1.0, 10.0), takes_rows=True),
    Fault("fill-disk", Target.DISK, (3.0, 12.0), needs=Need.DISK),
    Fault("slow-disk", Target.DISK, (3.0, 12.0), needs=Need.FREEZE),
    Fault("freeze-disk", Target.DISK, (1.0, 8.0), needs=Need.FREEZE),
    _link("cut", (1.0, 12.0)),
    _link("deaf", (1.0, 12.0)),
    _link("mute", (1.0, 12.0)),
    _link("narrow", (3.0, 12.0), Need.NARROW),
    _link("loss", (3.0, 12.0), Need.NETEM),
    _link("delay", (3.0, 12.0), Need.NETEM),
    Fault("memory", Target.MACHINE, (3.0, 12.0)),
    Fault("cores", Target.MACHINE, (3.0, 12.0)),
    Fault("descriptors", Target.NODE, (3.0, 12.0), takes_node=True, takes_rows=True),
    Fault("clock", Target.CLOCK, (2.0, 12.0), needs=Need.CLOCK),
)
FAULTS = {fault.name: fault for fault in _ALL}
"""By name, as ``--faults`` has them."""
