"""What agents, the Master and the command line say to each other: frozen dataclasses, no behaviour beyond look-ups.

``codec.py`` turns each into the protobuf message of the same name in ``edl.proto`` and back.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.types import Incarnation, NodeId, Rank, Round


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Who a node is. Also the value of its leased key in the store."""

    node: NodeId
    incarnation: Incarnation
    host: str
    """Name or address at which other nodes reach this one."""
    port: int
    """Where its agent listens; a refused connection there proves that the agent is gone."""
    slots: int
    """Workers it runs, at least 1."""
    node_rank: int = -1
    """Position asked for with ``--node-rank``, -1 for none."""


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a world."""

    node: NodeId
    incarnation: Incarnation
    host: str
    slots: int
    first_rank: Rank
    """Its workers have ranks ``first_rank .. first_rank + slots - 1``."""
    ports: tuple[int, ...]
    """Ports reserved on the node for this round: the master port, then one for each worker."""


@dataclass(frozen=True, slots=True)
class World:
    """The ordered members of one round; what every worker's environment is made from."""

    round: Round
    members: tuple[Member, ...]
    restarts: int
    """Restart budget used so far in the job."""

    @property
    def size(self) -> int:
        """Number of workers."""
        return sum(member.slots for member in self.members)

    @property
    def master_host(self) -> str:
        """Where the worker of rank 0 serves the framework's store."""
        return self.members[0].host

    @property
    def master_port(self) -> int:
        """Port of the framework's store; fresh in each round."""
        return self.members[0].ports[0]

    def member(self, node: NodeId) -> Member | None:
        """The entry of a node, or None when it is not in this world."""
        return next((member for member in self.members if member.node == node), None)

    def position(self, node: NodeId) -> int:
        """Index of a node, which is its group rank. Raises ``KeyError`` when it is not in this world."""
        for index, member in enumerate(self.members):
            if member.node == node:
                return index
        raise KeyError(node)


@dataclass(frozen=True, slots=True)
class Failure:
    """How one worker ended that should not have."""

    node: NodeId
    round: Round
    rank: Rank
    local_rank: int
    exit_code: int
    """Exit status, or minus the signal number."""
    what: str
    """In words: ``killed by SIGKILL``, ``exit status 3``, ``frozen by SIGSTOP for 3 s``."""
    exception: str = ""
    """Last line of the Python traceback, when there is one."""
    traceback: str = ""
    tail: str = ""
    """Last lines the worker wrote to stderr."""
    peer_loss: bool = False
    """It looks like the consequence of another worker's end (connection to a peer lost), not a cause."""


# --- agent to Master -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attach:
    """First message on a stream: who this is and what it knows, so that a new Master need not ask."""

    info: NodeInfo
    seen_round: Round
    """Highest round this incarnation was told to start; 0 for none."""
    running_round: Round
    """Round whose workers are alive (or have all ended with status 0) here; 0 for none."""
    done: bool
    """All workers of ``running_round`` ended with status 0."""


@dataclass(frozen=True, slots=True)
class Ready:
    """No worker runs here; this node joins the next round. Sent again whenever the agent attaches while idle."""

    seen_round: Round
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker ended badly without having been told to. The node's other workers may still run."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class WorkersDone:
    """All workers of the round on this node ended with status 0."""

    round: Round


@dataclass(frozen=True, slots=True)
class Leaving:
    """This node goes away on purpose; its workers are being stopped."""

    reason: str


AgentMessage = Attach | Ready | WorkerFailed | WorkersDone | Leaving


# --- Master to agent -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopRound:
    """Stop the workers of this round (and any older one), then say ``Ready``."""

    round: Round
    reason: str


@dataclass(frozen=True, slots=True)
class StartRound:
    """Start this node's workers of this world."""

    world: World
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over; stop whatever runs and exit with this status."""

    exit_code: int
    reason: str
    failures: tuple[Failure, ...] = ()
    """Root cause first; empty on success."""


@dataclass(frozen=True, slots=True)
class Expelled:
    """This incarnation is not part of the job any more; stop the workers.

    With ``exit_code`` 0 the agent may come back under a new lease; any other value ends the launcher.
    """

    reason: str
    exit_code: int = 0


MasterMessage = StopRound | StartRound | Finish | Expelled
