"""Random facts for metrics."""

from __future__ import annotations

import random

from edl.metrics.facts import DirectoryFacts, HistoryTotals, JobFacts, NodeFacts
from edl.wire.rank_pace import UNKNOWN, RankPace
from edl.wire.records import Settings, Version
from edl.wire.scale_requests import ScaleView
from edl.wire.status import Count, DroppedSlot, JobStatus, Kind, NodeView, ServiceView

STATES = ("warming", "running", "spare", "a state of a newer Master")
NAME = 'na"me\\with\nall'


def random_node_view(number: int, drawn: random.Random) -> NodeView:
    return NodeView(
        *(f"node-{number}", "10.0.0.1", 2, drawn.choice(STATES), drawn.random() < 0.5, number, 2 * number),
        draining=drawn.random() < 0.3,
        step_s=drawn.choice((0.0, drawn.uniform(0.01, 9.0))),
        ranks=tuple(RankPace(slot, 0.2, 0.3, drawn.choice((UNKNOWN, drawn.random()))) for slot in range(2)),
    )


def random_services(drawn: random.Random) -> tuple[ServiceView, ...]:
    """A data set with an odd name, which may have no count of records, and pservers."""
    if drawn.random() < 0.3:
        return ()
    counts = {name: float(drawn.randrange(99)) for name in ("epoch", "shards", "done_shards", "leased_shards")}
    counts |= {"pending_shards": 5.0, "quarantined_shards": 0.0, "records": drawn.choice((-1.0, 500.0))}
    counts |= {"done_records": 7.0, "records_per_s": drawn.random()}
    data = tuple(Count(*item) for item in counts.items())
    all_rows = (Count("pservers", 2.0), Count("rows", 300.0), Count("rows_bytes", 9e9))
    return (
        ServiceView("data", NAME, "", data),
        ServiceView("data", "readers", "", (Count("readers", 3.0),)),
        ServiceView("ps", "pservers", "", all_rows),
        ServiceView("ps", "ps-0", "", (Count("number", 1.0), Count("rows", 100.0))),
    )


def random_job_facts(drawn: random.Random) -> JobFacts:
    allowed = drawn.randrange(5)
    status = JobStatus(
        job="train",
        phase=drawn.choice(("forming", "running", "suspended", "ended", "a phase of a newer Master")),
        round=drawn.randrange(100),
        world_size=drawn.randrange(100),
        reason="",
        nnodes="1:8",
        fault_tolerance="elastic",
        restarts_used=drawn.randint(0, allowed),
        restarts_allowed=allowed,
        master="node-0",
        nodes=tuple(random_node_view(number, drawn) for number in range(drawn.randrange(9))),
        history=(),
        failures=(),
        saved=Version(1, drawn.choice((0, 120))),
        services=random_services(drawn),
        flaws=("flaw",) * drawn.randrange(3),
        settings=Settings(global_batch=drawn.choice((0, 256))),
        scale=ScaleView(1, 8, 1, desired=drawn.randrange(8), nodes=2, generation=drawn.randint(1, 2), observed=1),
        dropped=(DroppedSlot("n", "h", 0, "", "", 1),) * drawn.randrange(3),
        warnings=("warning",) * drawn.randrange(3),
        goodput=(Count("useful", drawn.random()), Count("idle", drawn.random())) * drawn.randrange(2),
        commit=drawn.choice((0, drawn.randrange(1000))),
    )
    totals = HistoryTotals(
        entries={kind.value: drawn.randrange(9) for kind in drawn.sample(list(Kind), 3)},
        rounds={"first": 1, "node-lost": drawn.randrange(9)},
        changes={"forming": 3},
        change_s={"forming": drawn.random()},
        unwritten=drawn.randrange(3),
        checkpoint_at_s=drawn.choice((0.0, 1.8e9)),
    )
    return JobFacts(status, totals)


def random_node_facts(drawn: random.Random) -> NodeFacts:
    inodes = drawn.choice((0, 1000))
    return NodeFacts(
        *("0.1.0", "3.12.1", NAME, "10.0.0.1", "default"),
        is_master=drawn.random() < 0.5,
        phase=drawn.choice(("running", "idle", "leaving")),
        slots=drawn.randrange(9),
        round=drawn.randrange(3),
        attached=drawn.random() < 0.5,
        training=drawn.randrange(9),
        waiting=drawn.randrange(9),
        exits={"signal": drawn.randrange(9)},
        store_answers=drawn.random() < 0.5,
        lease_age_s=drawn.random(),
        lease_ttl_s=10.0,
        held=Version(1, drawn.choice((0, 130))),
        parts=drawn.randrange(3),
        memory_bytes={"workers": drawn.randrange(10**12)},
        memory_limit_bytes=10**12,
        directories=(
            DirectoryFacts("checkpoints", True, 10**15, drawn.randrange(10**15), inodes, inodes // 2),
            DirectoryFacts("logs", answers=False),
        ),
    )
