"""Numbers of nodes, workers and pservers of a command line. Read once, before anything else is decided."""

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
    """Nodes of the job, and what runs on this one."""

    nodes: NodeRange
    """Nodes with workers."""
    slots: int
    """Workers here, pservers that run the script among them; 0: none."""
    servers: ServerSettings = field(default_factory=ServerSettings)
    """Pservers of edl's own here."""
    training: Training | None = None
    """Training settings of a job with pservers; None without them."""
    scripts: ScriptPlaces = NOWHERE
    """Which workers here are pservers that run the script."""
    script_servers: ScriptServers = field(default_factory=ScriptServers)
    """Pservers of the whole job."""


def sizes_from(options: Mapping[str, Any]) -> Sizes:
    """Workers and pservers of this node, and the job's range of sizes. Raises ``SettingError``."""
    roles = roles_from(options, slots_from)
    if roles is not None:
        return Sizes(roles.nodes, roles.slots, scripts=roles.here, script_servers=roles.job)
    if not wants_servers(options):
        nodes = parse_nnodes(options["nnodes"], options["node_unit"])
        return Sizes(nodes, slots_from(options["nproc_per_node"]))
    found = places_from(options, slots_from, value("pserver_memory", options))
    return Sizes(found.nodes, found.slots, found.here, training_from(options))
