"""What messages, the Master's record and the store's values are made of: frozen dataclasses with no logic but look-ups.
``codec.py`` converts each to and from the protobuf message of the same name in ``edl.proto``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from edl.types import Incarnation, NodeId, Rank, Round


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Identifies one commit of a job's state; a larger one continues a smaller one. ``Version()`` means "no state".

    The commit number alone is ambiguous: a world that rolls back to commit 9 makes a second commit 10.
    """

    era: int = 0
    """Counts the worlds in the whole life of a state, across restarts of the job; unlike the round."""
    commit: int = 0
    """Calls of ``commit()`` since the state was first created."""

    def __str__(self) -> str:
        return f"commit {self.commit} (era {self.era})"


NO_STATE = Version()


@dataclass(frozen=True, slots=True)
class Holding:
    """One part of a commit that a node holds in memory and can send to others."""

    version: Version
    shard: int = 0
    shards: int = 1
    """Number of parts of the commit: 1 when every worker has the same state, the world size when it is sharded."""

    def __str__(self) -> str:
        return f"shard {self.shard} of {self.shards} of {self.version}"


@dataclass(frozen=True, slots=True)
class Source:
    """A node that sends one part of the state to the members of a world that lack it."""

    node: NodeId
    host: str
    port: int
    shard: int = 0


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Identity and address of a node. Also the value of its leased key in the store."""

    node: NodeId
    incarnation: Incarnation
    host: str
    """Name or address at which other nodes reach this one."""
    port: int
    """Port on which its agent listens; a refused connection proves that the agent is gone."""
    slots: int
    """Number of workers that it runs, at least 1."""
    node_rank: int = -1
    """Position requested with ``--node-rank``; -1: none."""
    state_port: int = 0
    """Port on which it sends and receives copies of commits."""
    rack: str = ""
    """Rack, as named by the user: copies of its state go to another rack if there is one."""
    index: int = -1
    """Number assigned by the scheduler, which removes nodes from the highest number down; -1: none."""
    members: int = 0
    """Number of members of the embedded store if its launcher runs one of them, else 0."""
    spare_slots: int = 0
    """Additional slots that stay idle until one replaces a dropped slot; they are numbered after the others."""
    devices: tuple[str, ...] = ()
    """Device UUIDs of each slot, separated by commas; empty if unknown."""
    role: str = ""
    """Role of its workers, as in torchrun (``ROLE_NAME``); empty: default."""
    host_id: str = ""
    """Name of the host in the denylist, the same in every job; empty: unknown."""
    lease_s: float = 0.0
    """Duration of its lease in seconds, at least ``--lease-ttl``; 0: ``--lease-ttl``."""

    def lease_within(self, lease_ttl_s: float) -> float:
        """Seconds without a renewal after which its lease ends. ``lease_ttl_s``: ``--lease-ttl``."""
        return self.lease_s or lease_ttl_s


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a world."""

    node: NodeId
    incarnation: Incarnation
    host: str
    slots: int
    first_rank: Rank
    """Its workers have the ranks ``first_rank .. first_rank + slots - 1``."""
    ports: tuple[int, ...]
    """Ports reserved on the node for this round: the master port, then one per worker."""
    places: tuple[int, ...] = ()
    """Slots of its workers, ascending: local rank ``i`` is in ``places[i]``. Empty: ``0 .. slots - 1``."""
    role: str = ""
    """Role of its workers, as in ``NodeInfo``."""

    @property
    def used(self) -> tuple[int, ...]:
        """``places``, with the default filled in."""
        return self.places or tuple(range(self.slots))


@dataclass(frozen=True, slots=True)
class Settings:
    """Batch and learning rate prescribed by the Master, the same for all workers of a world from a given commit on.

    ``edl.arithmetic.hyper`` derives from them each worker's own batch, its micro-batches, the weights of its gradients
    and the LR factor of each step.
    """

    number: int = 0
    """Counts changes of the settings over the whole life of the job; 0: nothing is prescribed."""
    global_batch: int = 0
    """Samples of one step over all workers; 0: the sum of the workers' own batches."""
    local_batch: int = 0
    """Most samples that a worker processes at once (a micro-batch); 0: the script's own batch size."""
    logical_ranks: int = 0
    """Fixed number of logical ranks, distributed over the workers; 0: none."""
    lr: str = "none"
    """Rule for scaling the LR with the size: ``none``, ``linear``, ``sqrt``, ``adascale``, ``user``."""
    reference: int = 0
    """Size for which the script's LR was chosen: samples per step if the global batch is prescribed, else workers."""
    size: int = 0
    """Size, in the same unit, of the world to which these settings apply."""
    scale: float = 1.0
    """Set by hand: multiplies the LR in addition to the rule."""
    factor: float = 1.0
    """LR factor after the ramp, ``scale`` included, as far as the Master can know it."""
    ramp_from: float = 1.0
    """LR factor at the moment these settings took effect."""
    ramp_begin: int = 0
    """Commit at which they take effect."""
    ramp_steps: int = 0
    """Commits over which the LR factor goes from ``ramp_from`` to ``factor``; 0: at once."""


NO_SETTINGS = Settings()


@dataclass(frozen=True, slots=True)
class World:
    """The ordered members of one round; every worker's environment is derived from it."""

    round: Round
    members: tuple[Member, ...]
    restarts: int
    """Restarts used so far of the job's restart budget."""
    era: int = 0
    """Era of the commits made by this world."""
    restore: Version = NO_STATE
    """Commit from which every worker starts, the same for all; ``Version()``: the state is created first."""
    shards: int = 1
    """Number of parts of that commit; see ``Holding``."""
    stored: bool = False
    """The workers read the commit from the checkpoint directory themselves: it is sharded, for another world size."""
    sources: tuple[Source, ...] = ()
    """Nodes that hold parts of that commit; they may be outside this world."""
    settings: Settings = NO_SETTINGS

    @property
    def size(self) -> int:
        """Number of workers in the world."""
        return _facts(self.members).size

    @property
    def master_host(self) -> str:
        """Host on which the worker of rank 0 serves the framework's store."""
        return self.members[0].host

    @property
    def master_port(self) -> int:
        """Port of the framework's store; a new one in each round."""
        return self.members[0].ports[0]

    def member(self, node: NodeId) -> Member | None:
        """The member for a node, or None if the node is not in this world."""
        index = _facts(self.members).positions.get(node)
        return None if index is None else self.members[index]

    def position(self, node: NodeId) -> int:
        """Index of a node, which is its group rank. Raises ``KeyError`` if the node is not in this world."""
        return _facts(self.members).positions[node]


_KNOWN = 8


class _Facts(NamedTuple):
    """What follows from the members of a world."""

    members: tuple[Member, ...]
    positions: dict[NodeId, int]
    size: int


_known: dict[int, _Facts] = {}
"""Facts about the last few worlds, by the identity of their member tuples. The Master needs them for every node of a
world at every event; linear searches would make that quadratic in the number of nodes."""


def _facts(members: tuple[Member, ...]) -> _Facts:
    found = _known.get(id(members))
    if found is None or found.members is not members:
        while len(_known) >= _KNOWN:
            _known.pop(next(iter(_known)), None)  # another thread may have removed it
        positions = {member.node: index for index, member in reversed(tuple(enumerate(members)))}
        found = _known[id(members)] = _Facts(members, positions, sum(member.slots for member in members))
    return found


@dataclass(frozen=True, slots=True)
class Failure:
    """The unexpected end of one worker, or a worker that hung."""

    node: NodeId
    round: Round
    rank: Rank
    local_rank: int
    exit_code: int
    """Exit status, or the negative signal number; 0: it had not ended, but hung."""
    what: str
    """Description: ``killed by SIGKILL``, ``exit status 3``, ``frozen by SIGSTOP for 3 s``, ``made no progress for 30
    s``."""
    exception: str = ""
    """Last line of the Python traceback, if there is one."""
    traceback: str = ""
    """Of a worker that hung: the stacks of its threads."""
    tail: str = ""
    """Last lines that the worker wrote to stderr."""
    peer_loss: bool = False
    """The worker reports a lost peer: probably a consequence, not the root cause."""
    slot: int = -1
    """Slot of the worker; -1: the slot with the number of its local rank."""
    host: str = ""
    """The host's own name for itself."""
    pid: int = 0
    time_s: float = 0.0
    """Time of the end, in seconds since 1970 by that host's clock. For display only: clocks of hosts differ."""
    error_file: str = ""
    """Path on that host of the file that describes the exception; empty: none was written."""
    final: int = 0
    """Exit status with which the job ends at once, because a restart cannot help; 0: a restart may help."""
