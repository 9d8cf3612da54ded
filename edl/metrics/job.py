"""The table of the job's metrics, which the Master's launcher serves. Pure."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Mapping

from edl.metrics.facts import JobFacts
from edl.metrics.metric import Metric, MetricKind, Values, one_hot, plain
from edl.wire.status import JobStatus, Kind

PHASES = ("forming", "running", "suspended", "ended")
NODE_STATES = (
    *("warming", "preparing", "loading", "ready", "running", "stopping", "done"),
    *("leaving", "spare", "cordoned", "checking", "slow", "faulty"),
)
"""See ``NodeView.state``."""
_SHARD_STATES = ("done", "leased", "pending", "quarantined")
_COUNTER = MetricKind.COUNTER


def _status(value: Callable[[JobStatus], float | None]) -> Callable[[JobFacts], Values]:
    return plain(lambda facts: value(facts.status))


def _nodes(facts: JobFacts) -> Values:
    counts = collections.Counter(node.state for node in facts.status.nodes)
    return [((state,), float(counts[state])) for state in dict.fromkeys((*NODE_STATES, *counts))]


def _step_times(status: JobStatus) -> list[float]:
    return [node.step_s for node in status.nodes if node.step_s > 0]


def _step_durations(facts: JobFacts) -> Values:
    times = _step_times(facts.status)
    return [(("median",), statistics.median(times)), (("slowest",), max(times))] if times else []


def _own_times(facts: JobFacts) -> Values:
    times = [one.own_s for node in facts.status.nodes for one in node.ranks if one.own_s >= 0]
    return [(("median",), statistics.median(times)), (("slowest",), max(times))] if times else []


def _waits(facts: JobFacts) -> Values:
    ranks = [one for node in facts.status.nodes for one in node.ranks]
    known = [one.peers_share for one in ranks if one.peers_share >= 0]
    found = {
        "peers": known,
        "commit": [one.commit_share for one in ranks],
        "data": [one.data_share for one in ranks],
        "stopped": [one.stopped_share for one in ranks],
        "cpu": [one.starved_share for one in ranks],
    }
    return [((name,), statistics.fmean(shares)) for name, shares in found.items() if shares]


def _samples_per_s(status: JobStatus) -> float | None:
    times, batch = _step_times(status), status.settings.global_batch
    return batch / statistics.median(times) if times and batch else None


def _by_kind(facts: JobFacts) -> Values:
    entries = facts.totals.entries
    kinds = dict.fromkeys((*(kind.value for kind in Kind), *entries))
    return [((kind,), float(entries.get(kind, 0))) for kind in kinds]


def _labelled(counts: Mapping[str, float]) -> Values:
    return [((name,), float(value)) for name, value in sorted(counts.items())]


def _sum(service: str, count: str, of: str = "") -> Callable[[JobFacts], Values]:
    """Reads the sum of a count over the items of a service; nothing if none has it. ``of``: only the item of this
    name."""

    def read(facts: JobFacts) -> Values:
        found = [
            one.value
            for view in facts.status.services
            if view.service == service and view.name == (of or view.name)
            for one in view.counts
            if one.name == count
        ]
        return [((), sum(found))] if found else []

    return read


def _data(count: str, *, unknown: float | None = None) -> Callable[[JobFacts], Values]:
    """Reads a count of each data set. ``unknown``: the value that means that it is not known."""

    def read(facts: JobFacts) -> Values:
        return [
            ((view.name,), one.value)
            for view in facts.status.services
            if view.service == "data"
            for one in view.counts
            if one.name == count and one.value != unknown
        ]

    return read


def _shards(facts: JobFacts) -> Values:
    return [
        ((name, state), value)
        for state in _SHARD_STATES
        for (name,), value in _data(f"{state}_shards")(facts)
    ]  # fmt: skip


JOB_METRICS: tuple[Metric[JobFacts], ...] = (
    Metric(
        "edl_job_phase",
        "Phase of the job: 1 for the current one.",
        one_hot(lambda facts: facts.status.phase, PHASES),
        ("phase",),
    ),
    Metric("edl_round", "Number of the last world that was formed.", _status(lambda status: status.round)),
    Metric("edl_nodes", "Nodes that the Master knows, by state.", _nodes, ("state",)),
    Metric(
        "edl_detached_nodes",
        "Nodes without an open stream to the Master.",
        _status(lambda status: sum(not node.attached for node in status.nodes)),
    ),
    Metric(
        "edl_draining_nodes",
        "Nodes that are leaving and still train.",
        _status(lambda status: sum(node.draining for node in status.nodes)),
    ),
    Metric("edl_world_nodes", "Nodes of the running world.", _status(lambda status: status.scale.nodes)),
    Metric("edl_world_workers", "Workers of the running world.", _status(lambda status: status.world_size)),
    Metric("edl_desired_nodes", "Requested number of nodes; 0: none.", _status(lambda status: status.scale.requested)),
    Metric("edl_minimum_nodes", "Smallest allowed number of nodes.", _status(lambda status: status.scale.minimum)),
    Metric("edl_maximum_nodes", "Largest allowed number of nodes.", _status(lambda status: status.scale.maximum)),
    Metric(
        "edl_proposed_nodes",
        "Number of nodes that the autoscale policy proposes; absent: none.",
        _status(lambda status: status.scale.proposal or None),
    ),
    Metric(
        "edl_resize_pending",
        "1 while the world does not yet conform to the newest request for a size.",
        _status(lambda status: status.scale.observed < status.scale.generation),
    ),
    Metric(
        "edl_restarts_used",
        "Restarts charged to the budget. A gauge: a charge is undone if it turns out that the node was lost.",
        _status(lambda status: status.restarts_used),
    ),
    Metric("edl_restarts_allowed", "The restart budget.", _status(lambda status: status.restarts_allowed)),
    Metric(
        "edl_restarts_left",
        "Restarts that are left in the budget.",
        _status(lambda status: status.restarts_allowed - status.restarts_used),
    ),
    Metric("edl_dropped_slots", "Slots that take no part.", _status(lambda status: len(status.dropped))),
    Metric(
        "edl_warnings",
        "Current conditions that make a failure more costly; edl status names them.",
        _status(lambda status: len(status.warnings)),
    ),
    Metric(
        "edl_flaws",
        "Remarks for the end of the job, such as data that could not be read.",
        _status(lambda status: len(status.flaws)),
    ),
    Metric(
        "edl_step",
        "Newest commit in the current round, reported every few seconds; absent: none yet, or the script makes none.",
        _status(lambda status: status.commit or None),
    ),
    Metric(
        "edl_step_duration_seconds",
        "Time from commit to commit: of the median node, and of the slowest one.",
        _step_durations,
        ("which",),
    ),
    Metric(
        "edl_own_time_seconds",
        "Time of a step in which a rank waits neither for others nor for commits: of the median rank and the slowest.",
        _own_times,
        ("which",),
    ),
    Metric(
        "edl_rank_wait_ratio",
        "Share of time that ranks wait for other ranks, for commits, for data, are stopped, or have no CPU: the mean.",
        _waits,
        ("reason",),
    ),
    Metric(
        "edl_stragglers",
        "Ranks that the others wait for, as named by the alarm straggler.",
        _status(lambda status: sum(alarm.name == "straggler" for alarm in status.alarms)),
    ),
    Metric(
        "edl_samples_per_second",
        "Samples per second of the whole world, if the global batch is prescribed.",
        _status(_samples_per_s),
    ),
    Metric(
        "edl_slot_seconds",
        "Time of all slots since the job began, by use. No counter: training that is lost moves from useful to redone.",
        lambda facts: [((one.name,), one.value) for one in facts.status.goodput],
        ("use",),
    ),
    Metric(
        "edl_checkpoint_commit",
        "Newest commit that is complete in the checkpoint directory.",
        _status(lambda status: status.saved.commit or None),
    ),
    Metric(
        "edl_checkpoint_timestamp_seconds",
        "Time at which it was complete, in seconds since 1970; absent: unknown.",
        plain(lambda facts: facts.totals.checkpoint_at_s or None),
    ),
    Metric(
        "edl_unwritten_checkpoints_total",
        "Checkpoints that could not be written.",
        plain(lambda facts: facts.totals.unwritten),
        kind=_COUNTER,
    ),
    Metric(
        "edl_rounds_total",
        "Worlds that were formed, by the most serious event since the previous one.",
        lambda facts: _labelled(facts.totals.rounds),
        ("cause",),
        _COUNTER,
    ),
    Metric(
        "edl_world_changes_total",
        "Changes of the world that have passed a phase: forming (until the next world is formed), starting (until all "
        "its workers train).",
        lambda facts: _labelled(facts.totals.changes),
        ("phase",),
        _COUNTER,
    ),
    Metric(
        "edl_world_change_seconds_total",
        "Time that these changes took together. In a planned change the workers train on for a part of forming.",
        lambda facts: _labelled(facts.totals.change_s),
        ("phase",),
        _COUNTER,
    ),
    Metric("edl_history_entries_total", "Entries of the history, by kind.", _by_kind, ("kind",), _COUNTER),
    Metric("edl_data_epoch", "Epoch of a data set.", _data("epoch"), ("dataset",)),
    Metric("edl_data_shards", "Shards of a data set in this epoch.", _data("shards"), ("dataset",)),
    Metric("edl_data_shards_by_state", "The same by state.", _shards, ("dataset", "state")),
    Metric(
        "edl_data_records",
        "Records of a data set in this epoch; absent: not counted.",
        _data("records", unknown=-1.0),
        ("dataset",),
    ),
    Metric("edl_data_done_records", "Records that are done in this epoch.", _data("done_records"), ("dataset",)),
    Metric("edl_data_records_per_second", "Records done per second.", _data("records_per_s"), ("dataset",)),
    Metric("edl_data_left_seconds", "Estimate until the end of the epoch.", _data("left_s"), ("dataset",)),
    Metric("edl_data_readers", "Remote readers.", _sum("data", "readers")),
    Metric("edl_ps_servers", "Pservers.", _sum("ps", "pservers")),
    Metric("edl_ps_trainers", "Trainers of a job with parameter servers.", _sum("ps", "trainers")),
    Metric("edl_ps_rows", "Rows on all pservers.", _sum("ps", "rows", "pservers")),
    Metric("edl_ps_rows_bytes", "Bytes of these rows.", _sum("ps", "rows_bytes", "pservers")),
    Metric("edl_ps_moving_buckets", "Buckets that are moving.", _sum("ps", "moving_buckets")),
    Metric("edl_ps_bare_buckets", "Buckets without a copy in sync.", _sum("ps", "bare_buckets")),
)
"""Another metric of the job is another row; its facts belong into ``JobFacts``."""
