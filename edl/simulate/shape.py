"""The cluster, the job and the durations that a simulation takes as given."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from edl.config import NodeRange
from edl.errors import SettingError

MOST_NODES = 20_000


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Nodes and what they have in common."""

    nodes: int
    """All nodes of the job, spares included."""
    slots: int = 8
    """Slots of each node. They fail together: a simulated node is one slot of the Master, counted this many times."""
    rack_nodes: int = 0
    """Nodes in each rack; 0: no racks."""
    switch_nodes: int = 0
    """Nodes behind each switch; 0: no switches."""
    racks_known: bool = True
    """Whether launchers know their rack (``--rack``), so that copies go to another one."""

    def __post_init__(self) -> None:
        _between("--nodes", self.nodes, 1, MOST_NODES)
        _between("--slots", self.slots, 1, 1_000_000)
        _between("--rack-nodes", self.rack_nodes, 0, self.nodes)
        _between("--switch-nodes", self.switch_nodes, 0, self.nodes)


@dataclass(frozen=True, slots=True)
class JobShape:
    """Sizes of the job's worlds, and where its state is."""

    minimum: int
    """Least number of nodes of a world."""
    maximum: int
    """Most nodes of a world; the cluster's other nodes are spares."""
    unit: int = 1
    """As ``--node-unit``."""
    replica_nodes: int = 1
    """Nodes that hold one replica of the model together, as ``--replica-size`` of that many nodes."""
    state_nodes: int = 1
    """Nodes over which one complete state is spread; 1: each node has all of it; 0: all nodes of the world."""
    memory: bool = True
    """Whether commits are kept in memory, with copies on other nodes. Otherwise each fault costs a load."""
    in_process: bool = True
    """Whether workers keep their processes. Otherwise all of them start again after each fault."""

    def __post_init__(self) -> None:
        _between("--replica-nodes", self.replica_nodes, 1, self.maximum)
        _between("--state-nodes", self.state_nodes, 0, self.maximum)
        self.bounds  # noqa: B018 - checks the sizes

    @property
    def bounds(self) -> NodeRange:
        """Raises ``SettingError`` for sizes that no world can have."""
        return NodeRange(self.minimum, self.maximum, self.unit)


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds that each part of a recovery takes. The defaults are medians of docs/benchmarks.md, measured with small
    models on one host: take your own."""

    noticed_worker_s: float = 0.02
    """From the end of a worker to the Master's knowledge of it."""
    noticed_node_s: float = 2.7
    """From a node's last sign to the end of its lease."""
    stop_s: float = 0.01
    """Until workers have left the broken world."""
    hold_s: float = 0.05
    """Until workers have stopped at an agreed step boundary."""
    connect_s: float = 0.036
    """Until the next world's communicator is there."""
    restore_s: float = 0.02
    """Reading a commit from memory, its own or another node's."""
    load_s: float = 60.0
    """Reading a checkpoint from storage."""
    start_s: float = 1.0
    """Starting a worker's process, up to its place in the queue for the next world."""
    boot_s: float = 3.1
    """Starting a launcher, with the import of the framework."""
    master_s: float = 0.19
    """Without a Master after one has died."""

    def __post_init__(self) -> None:
        for phase, name in phases().items():
            value = getattr(self, name)
            if not 0 <= value < 1e7:  # written this way, it also rejects NaN
                raise SettingError(f"--time {phase}", f"{value:g}", "must be from 0 to 1e7 seconds")


def phases() -> dict[str, str]:
    """The fields of ``PhaseTimes`` by their names in ``--time``."""
    return {one.name.removesuffix("_s").replace("_", "-"): one.name for one in dataclasses.fields(PhaseTimes)}


def _between(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise SettingError(name, value, f"must be from {least} to {most}")
