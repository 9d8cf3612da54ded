"""Jobs for the dashboard to show: a large one, one with parameter servers, one after the loss of a node."""

from __future__ import annotations

import dataclasses

from edl.types import NodeId, Rank, Round
from edl.wire.alarm import Alarm
from edl.wire.records import Failure, Version
from edl.wire.scale_requests import ScaleView
from edl.wire.status import Count, DroppedSlot, HistoryEntry, JobStatus, NodeView, ServiceView
from tests.support.fake_master import JOB, FakeMaster

NOW_S = 1_795_000_000.0
"""Time of the newest entries of the history."""
HTML = "<img src=x onerror=\"document.title='hacked'\">"
"""A name that would run if it became markup."""
TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 118, in train
    loss.backward()
  File "torch/_tensor.py", line 647, in backward
    torch.autograd.backward(self, gradient, retain_graph, create_graph)
RuntimeError: CUDA error: an illegal memory access was encountered
"""


def counts(**values: float) -> tuple[Count, ...]:
    return tuple(Count(name, float(value)) for name, value in values.items())


def nodes(many: int, slots: int, outside: int = 0) -> tuple[NodeView, ...]:
    """Running nodes, of which every 97th is slow, then spares."""
    found = [
        NodeView(
            node=f"gpu-{at:04d}",
            host=f"10.0.{at // 250}.{at % 250 + 1}",
            slots=slots,
            state="running",
            attached=True,
            position=at,
            first_rank=at * slots,
            underway=True,
            how=f"{slots} in process",
            places=tuple(range(slots)),
            step_s=0.0815 + 0.0007 * (at * 7919 % 11) + (0.09 if at % 97 == 5 else 0.0),
        )
        for at in range(many)
    ]
    found += [
        NodeView(f"gpu-{many + at:04d}", f"10.9.0.{at + 1}", slots, "spare", True, -1, -1) for at in range(outside)
    ]
    return tuple(found)


def rounds(many: int) -> list[HistoryEntry]:
    """A history with this number of rounds, each after an incident."""
    found: list[HistoryEntry] = []

    def note(kind: str, text: str, node: str, number: int, *, ago_s: float) -> None:
        found.append(HistoryEntry(len(found) + 1, NOW_S - ago_s, kind, text, node, number))

    for number in range(1, many + 1):
        ago_s, node = 700.0 * (many - number) + 90.0, f"gpu-{number * 37 % 1000:04d}"
        size = 24 - number % 3
        if number > 1 and number % 4 == 1:
            note("node-joined", f"node {node} is ready with 8 slots", node, number, ago_s=ago_s + 1)
        elif number > 1 and number % 3:
            text = f"worker {number} on {node} was killed by SIGKILL; restart {number // 2} of 30"
            note("worker-failed", text, node, number, ago_s=ago_s + 1)
        elif number > 1:
            text = f"node {node} lost: its launcher is gone (connection refused)"
            note("node-lost", text, node, number, ago_s=ago_s + 1)
        note("world-stopped", f"round {number}: a failure", "", number, ago_s=ago_s + 0.9)
        note(
            "world-formed",
            f"round {number}: {size} nodes, {8 * size} workers ({size} nodes ready)",
            "",
            number,
            ago_s=ago_s,
        )
        cost = (
            f"; the change took {0.1 * (number % 9 + 1):.3f} s and cost {19.5 * (number % 5 + 1):.1f} s of slot time "
            f"(rendezvous {11.5 * (number % 5 + 1):.1f} s, restore 4.2 s), 0.0{number % 9 + 1} s of training redone"
        )
        note(
            "world-underway",
            f"round {number} is underway: in process{cost if number > 1 else ''}",
            "",
            number,
            ago_s=ago_s - 0.4,
        )
        note(
            "state",
            f"commit {100 * number} is complete in /checkpoints/commit-{100 * number}",
            "",
            number,
            ago_s=ago_s - 60,
        )
    return found


class DashboardMaster(FakeMaster):
    """A Master whose status a test sets."""

    def __init__(self, shown: JobStatus, history: list[HistoryEntry]) -> None:
        super().__init__()
        self.shown = shown
        self.history = history
        self.scale = shown.scale
        self.names = [node.node for node in shown.nodes]
        self.reads = 0
        """How often the status was read."""

    def status(self) -> JobStatus:
        self.reads += 1
        return dataclasses.replace(self.shown, history=tuple(self.history[-10:]), scale=self.scale)

    def show(self, **fields: object) -> None:
        """Change fields of the status."""
        self.shown = dataclasses.replace(self.shown, **fields)  # type: ignore[arg-type]


def training(many: int = 24, outside: int = 2, slots: int = 8, history: int = 30) -> DashboardMaster:
    """A job that trains and has had incidents, with two data sets."""
    shown = nodes(many, slots, outside)
    status = JobStatus(
        job=JOB,
        phase="running",
        round=history,
        world_size=many * slots,
        reason=f"round {history}: {many} nodes, {many * slots} workers ({many + outside} nodes ready)",
        nnodes=f"{2 * many // 3}:{many + 8}",
        fault_tolerance="elastic",
        restarts_used=9,
        restarts_allowed=30,
        master=shown[0].node,
        nodes=shown,
        history=(),
        failures=(),
        era=2,
        restored=Version(2, 100 * history - 12),
        saved=Version(2, 100 * history),
        saved_in=f"/checkpoints/commit-{100 * history}",
        services=(
            ServiceView(
                "data",
                "web-text",
                "web-text: epoch 2, 412 of 1,000 shards done",
                counts(epoch=2, shards=1000, done_shards=412, leased_shards=24, records=5e8, done_records=2.07e8,
                       records_per_s=48_200, left_s=6080),
            ),
            ServiceView(
                "data", "validation", "validation: epoch 7, 61 of 64 shards done",
                counts(epoch=7, shards=64, done_shards=61, quarantined_shards=1),
            ),
        ),
        scale=ScaleView(
            minimum=2 * many // 3, maximum=many + 8, desired=many, nodes=many, revision=40, generation=4, observed=4,
            by="kim (edl scale)", reason="the evening's quota", need_s=21.4,
        ),
        goodput=counts(useful=4_812_400, commit=61_300, data_wait=22_000, starting=48_100, rendezvous=9_420,
                       restore=5_130, resize=2_210, redone=7_900, idle=31_000, lost=1_200),
        commit=100 * history + 41,
    )  # fmt: skip
    return DashboardMaster(status, rounds(history))


def large() -> DashboardMaster:
    """A thousand nodes; one has markup as its name, one is cut off, one drains."""
    master = training(990, 10)
    shown = list(master.shown.nodes)
    shown[7] = dataclasses.replace(shown[7], node=HTML, host=HTML)
    shown[12] = dataclasses.replace(shown[12], attached=False)
    shown[20] = dataclasses.replace(shown[20], draining=True)
    master.show(nodes=tuple(shown), reason=f"{HTML} joined")
    master.names = [node.node for node in shown]
    master.history += [HistoryEntry(len(master.history) + 1, NOW_S, "node-joined", f"node {HTML} is ready", HTML, 30)]
    return master


def after_a_loss() -> DashboardMaster:
    """A job that has just lost a node, with errors, alarms and a dropped slot."""
    master = training(23)
    cause = Failure(
        *(NodeId("gpu-0003"), Round(29), Rank(27), 3, 1, "exit status 1"),
        exception="RuntimeError: CUDA error: an illegal memory access was encountered",
        traceback=TRACEBACK,
        tail="step 2899 loss 2.113\nstep 2900 loss 2.108\n" + HTML,
        host="gpu-0003.cluster",
        pid=18231,
        time_s=NOW_S - 95,
    )
    consequence = dataclasses.replace(
        cause,
        node=NodeId("gpu-0004"),
        rank=Rank(32),
        local_rank=0,
        traceback="",
        tail="",
        peer_loss=True,
        exception="RuntimeError: Connection closed by peer [10.0.0.4]:31337",
    )
    master.show(
        failures=(consequence, cause),
        restarts_used=30,
        alarms=(
            Alarm(
                "disk-full",
                "/checkpoints",
                "critical",
                "full in about 40 min at the present rate: 31 GiB are left. Delete old checkpoints",
                "",
                True,
            ),
            Alarm("disk-space", "/var/log/edl", "warning", "9 % of the space is left", "gpu-0011"),
        ),
        warnings=("commits of node gpu-0009 are not kept in memory: /dev/shm is full",),
        dropped=(DroppedSlot("gpu-0003", "10.0.0.4", 3, "GPU-5a2f", "two failures of this slot alone", 29),),
    )
    master.scale = dataclasses.replace(master.scale, desired=24, waiting="1 more node is needed for 24")
    return master


def parameter_servers() -> DashboardMaster:
    """A job with trainers and pservers."""
    master = training(4, 0, 2, history=6)
    each = tuple(
        ServiceView(
            "ps",
            f"ps-{at}",
            f"ps-{at}: 16 buckets, 16 copies, {1_200_000 * (at + 1):,} rows",
            counts(number=at, owned_buckets=16, copied_buckets=16, rows=1_200_000 * (at + 1),
                   rows_bytes=3.1e8 * (at + 1), most_bytes=2e9, lag_s=2.4 if at == 2 else 0.0, pulls=5e6, keys=9e8),
        )
        for at in range(4)
    )  # fmt: skip
    everything = ServiceView("ps", "pservers", "4 pservers, all copies in sync", counts(pservers=4, moving_buckets=0))
    trainers = ServiceView("ps", "trainers", "8 trainers: a, b, c, d, e and 3 more", counts(trainers=8))
    master.show(services=(master.shown.services[0], everything, *each, trainers))
    return master


def long_history(many: int) -> DashboardMaster:
    """A job with this many entries in its history."""
    master = training()
    master.history = [
        HistoryEntry(at, NOW_S - (many - at), "node-joined", f"node gpu-{at} is ready with 8 slots", f"gpu-{at}", 3)
        for at in range(1, many + 1)
    ]
    return master
