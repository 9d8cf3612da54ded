"""The table of a node's metrics, which every launcher serves. Pure."""

from __future__ import annotations

from collections.abc import Callable

from edl.metrics.facts import DirectoryFacts, NodeFacts
from edl.metrics.metric import Metric, MetricKind, Values, one_hot, plain

PHASES = ("warming", "preparing", "idle", "running", "stopping", "leaving", "over")
"""The values of ``AgentPhase``."""
EXITS = ("success", "error", "signal")
MEMORY = ("workers", "replicas", "loaded")


def _directories(
    value: Callable[[DirectoryFacts], float], shown: Callable[[DirectoryFacts], bool] = lambda one: one.answers
) -> Callable[[NodeFacts], Values]:
    """Reads a value of each directory that is ``shown``."""
    return lambda node: [((one.name,), float(value(one))) for one in node.directories if shown(one)]


def _counted(one: DirectoryFacts) -> bool:
    """Whether the file system counts inodes."""
    return one.answers and one.inodes > 0


NODE_METRICS: tuple[Metric[NodeFacts], ...] = (
    Metric(
        "edl_build_info",
        "Always 1; the labels name the versions.",
        lambda node: [((node.version, node.python), 1.0)],
        ("version", "python"),
    ),
    Metric(
        "edl_node_info",
        "Always 1; the labels name the node. No other metric has these labels.",
        lambda node: [((node.node, node.host, node.role), 1.0)],
        ("node", "host", "role"),
    ),
    Metric("edl_master", "1 if this launcher is the Master, else 0.", plain(lambda node: node.is_master)),
    Metric(
        "edl_node_phase",
        "Phase of the node: 1 for the current one.",
        one_hot(lambda node: node.phase, PHASES),
        ("phase",),
    ),
    Metric("edl_node_attached", "1 while the stream to the Master is open.", plain(lambda node: node.attached)),
    Metric("edl_node_draining", "1 while the node is leaving and still trains.", plain(lambda node: node.draining)),
    Metric(
        "edl_node_round",
        "Round whose workers the node runs; absent: none.",
        plain(lambda node: node.round or None),
    ),
    Metric("edl_node_slots", "Slots of the node, without spare ones.", plain(lambda node: node.slots)),
    Metric(
        "edl_node_workers",
        "Worker processes: training (in the world), waiting (in none).",
        lambda node: [(("training",), float(node.training)), (("waiting",), float(node.waiting))],
        ("state",),
    ),
    Metric(
        "edl_node_worker_exits_total",
        "Workers that have ended: success (status 0), error (another status), signal (also those that edl stops).",
        lambda node: [((result,), float(node.exits.get(result, 0))) for result in EXITS],
        ("result",),
        MetricKind.COUNTER,
    ),
    Metric(
        "edl_store_reachable",
        "1 if the last attempt to renew the lease in etcd was answered.",
        plain(lambda node: node.store_answers),
    ),
    Metric(
        "edl_lease_age_seconds",
        "Time since the last renewal of the node's lease.",
        plain(lambda node: node.lease_age_s),
    ),
    Metric(
        "edl_lease_ttl_seconds",
        "Duration of the node's lease: --lease-ttl, or more after losses.",
        plain(lambda node: node.lease_ttl_s),
    ),
    Metric("edl_node_commit", "Newest commit in memory; absent: none.", plain(lambda node: node.held.commit or None)),
    Metric(
        "edl_node_checkpoint_commit",
        "Newest checkpoint that the node knows of; absent: none.",
        plain(lambda node: node.stored.commit or None),
    ),
    Metric(
        "edl_node_commit_parts",
        "Parts of commits in memory, copies for other nodes included.",
        plain(lambda node: node.parts),
    ),
    Metric(
        "edl_node_memory_bytes",
        "Memory of commits: of this node's workers, replicas for other nodes, loaded from the checkpoint directory.",
        lambda node: [((use,), float(node.memory_bytes.get(use, 0))) for use in MEMORY],
        ("use",),
    ),
    Metric(
        "edl_node_memory_limit_bytes",
        "Limit on that memory (--state-memory).",
        plain(lambda node: node.memory_limit_bytes),
    ),
    Metric(
        "edl_directory_reachable",
        "1 if the file system of the directory has answered; 0: not in time, or with an error.",
        _directories(lambda one: one.answers, lambda one: True),
        ("directory",),
    ),
    Metric(
        "edl_directory_size_bytes",
        "Size of the file system of the directory: checkpoints, logs.",
        _directories(lambda one: one.size_bytes),
        ("directory",),
    ),
    Metric(
        "edl_directory_free_bytes",
        "Bytes on it that are free for the launcher's user.",
        _directories(lambda one: one.free_bytes),
        ("directory",),
    ),
    Metric(
        "edl_directory_inodes",
        "Inodes of the file system; absent: it does not count them.",
        _directories(lambda one: one.inodes, _counted),
        ("directory",),
    ),
    Metric(
        "edl_directory_free_inodes",
        "Inodes on it that are free for the launcher's user.",
        _directories(lambda one: one.free_inodes, _counted),
        ("directory",),
    ),
)
