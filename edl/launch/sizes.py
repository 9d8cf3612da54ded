"""Numbers of nodes, workers and pservers, which the other settings depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edl.agent.workers.paddle_environment import NOWHERE, ScriptPlaces
from edl.config import NodeRange, ScriptServers, parse_nnodes
from edl.job_records import Training
from edl.launch.options import value
from edl.launch.ps_options import places_from, training_from, wants_servers
from edl.launch.script_servers import roles_from
from edl.launch.settings import ServerSettings
from edl.launch.slot_options import slots_from


@dataclass(frozen=True, slots=True)
class Sizes:
    """The job's range of nodes, and what runs on this node."""

    nodes: NodeRange
    """Number of nodes with workers."""
    slots: int
    """Number of workers on this node, including pservers that run the script; 0: none."""
    servers: ServerSettings = field(default_factory=ServerSettings)
    """edl's own pservers on this node."""
    training: Training | None = None
    """Training settings of a job with edl's own pservers; None: any other job."""
    scripts: ScriptPlaces = NOWHERE
    """Which workers on this node are pservers that run the script."""
    script_servers: ScriptServers = field(default_factory=ScriptServers)
    """The whole job's pservers that run the script."""


def sizes_from(options: Mapping[str, Any]) -> Sizes:
    """Compute the sizes from the options. Raises ``SettingError``."""
    roles = roles_from(options, slots_from)
    if roles is not None:
        return Sizes(roles.nodes, roles.slots, scripts=roles.here, script_servers=roles.job)
    if not wants_servers(options):
        nodes = parse_nnodes(options["nnodes"], options["node_unit"])
        return Sizes(nodes, slots_from(options["nproc_per_node"]))
    found = places_from(options, slots_from, value("pserver_memory", options))
    return Sizes(found.nodes, found.slots, found.here, training_from(options))
