"""The course of the faults, over many seeds, on jobs that a plain model plays: only what is survived is drawn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from benchmarks.soak.faults import FAULTS, Need, Target
from benchmarks.soak.plan import NEVER_S, Begin, Course, End, JobView, Replay, Strike, refusal

SEEDS = 1000
ALL = frozenset(Need)
COLLECTIVE = JobView("torch", ("a", "b", "c"), (), ("a", "b", "c"), spared="b", clock="c", master="a", allowed=ALL)
PUSHING = JobView(
    "ps", ("t1", "t2", "t3"), ("p1", "p2"), ("t1", "t2", "t3"), spared="p1", clock="t1", master="t1", allowed=ALL
)
WHOLE = replace(COLLECTIVE, whole_at_s=10.0, store_whole=True, copied_at_s=10.0)
PS_WHOLE = replace(PUSHING, whole_at_s=10.0, store_whole=True, copied_at_s=10.0)


def strike(fault: str, node: str, view: JobView = WHOLE, end_s: float = 0.0) -> Strike:
    return Strike(1, fault, view.name, node, 0.0, end_s, 0.5)


FULL_DISK = strike("fill-disk", "")


@pytest.mark.parametrize(
    ("fault", "node", "view", "open_", "reason"),
    [
        ("kill-worker", "a", COLLECTIVE, (), "the job does not train yet"),
        ("kill-worker", "a", replace(WHOLE, ending=True), (), "the job is ending"),
        ("cut", "a", replace(WHOLE, allowed=frozenset()), (), "the machine does not allow it"),
        ("kill-launcher", "b", WHOLE, (), "the launcher is spared"),
        ("stop-launcher", "b", WHOLE, (), ""),
        ("kill-launcher", "a", WHOLE, (), ""),
        ("kill-launcher", "a", WHOLE, (strike("kill-member", "c"),), "the store would lose its majority"),
        ("kill-launcher", "a", replace(WHOLE, store_whole=False), (), "the store would lose its majority"),
        ("kill-member", "a", replace(WHOLE, members=("a",)), (), "the store would lose its majority"),
        ("kill-member", "a", WHOLE, (strike("stop-launcher", "c"),), ""),
        ("descriptors", "a", WHOLE, (strike("stop-launcher", "c"),), "a second node would be away"),
        ("kill-worker", "a", WHOLE, (strike("stop-worker", "a"),), "the target is under a fault"),
        ("kill-worker", "a", WHOLE, (strike("stop-worker", "b"),), ""),
        ("kill-worker", "a", WHOLE, (strike("stop-worker", "b"), FULL_DISK), "enough happens to this job"),
        ("stop-launcher", "a", replace(WHOLE, trainers=("a",)), (), "nobody would be left"),
        ("stop-launcher", "a", replace(WHOLE, copied_at_s=NEVER_S), (), "state would be lost with its last copy"),
        ("stop-launcher", "a", WHOLE, (strike("fill-disk", ""),), "state would be lost with its last copy"),
        ("kill-pserver", "p1", PS_WHOLE, (), ""),
        ("kill-pserver", "p1", PS_WHOLE, (strike("kill-pserver", "p2"),), "state would be lost with its last copy"),
        ("kill-pserver", "p1", PS_WHOLE, (strike("cut", "p2"),), "nobody would be left"),
        ("kill-worker", "t1", PS_WHOLE, (strike("stop-pserver", "p2"),), ""),
    ],
)  # fmt: skip
def test_each_rule(fault: str, node: str, view: JobView, open_: tuple[Strike, ...], reason: str) -> None:
    assert refusal(FAULTS[fault], node, view, open_) == reason


@dataclass
class Played:
    """A job as a plain model: what is down, and until when."""

    view: JobView
    draw: random.Random
    began_s: float
    down: dict[int, Strike] = field(default_factory=dict)
    back_s: dict[int, float] = field(default_factory=dict)
    """When the consequences of a fault are over, some time after it was undone."""

    def begin(self, one: Strike, now_s: float) -> None:
        self.down[one.number] = one
        self.back_s[one.number] = float("inf")

    def end(self, one: Strike, now_s: float) -> None:
        self.back_s[one.number] = now_s + self.draw.uniform(0.1, 10.0)

    def seen(self, now_s: float) -> JobView:
        for number in [number for number, back_s in self.back_s.items() if back_s <= now_s]:
            del self.down[number], self.back_s[number]
        kinds = [one.kind for one in self.down.values()]
        whole = now_s >= self.began_s and not any(
            kind.takes_node or kind.target in (Target.WORKER, Target.PSERVER) for kind in kinds
        )
        if now_s >= self.began_s and whole:
            self.view = replace(self.view, whole_at_s=now_s)
        if whole and not any(kind.takes_rows or kind.target is Target.DISK for kind in kinds):
            self.view = replace(self.view, copied_at_s=now_s)
        store_whole = now_s >= self.began_s and not any(kind.takes_member for kind in kinds)
        master = self.draw.choice(self.view.nodes) if self.draw.random() < 0.05 else self.view.master
        self.view = replace(self.view, store_whole=store_whole, master=master)
        return self.view

    def survives(self) -> None:
        """What no job survives is not there."""
        struck = list(self.down.values())
        members = {one.node for one in struck if one.kind.takes_member} & set(self.view.members)
        assert 2 * len(members) < len(self.view.members), f"no majority: {struck}"
        nodes = {one.node for one in struck if one.kind.takes_node}
        assert len(nodes) <= 1, f"two nodes away: {struck}"
        assert not any(one.kind.takes_process and one.node == self.view.spared for one in struck)
        rows = [one for one in struck if one.kind.takes_rows and one.node in self.view.pservers]
        assert len({one.node for one in rows}) <= 1, f"rows and their replicas: {struck}"


def played(seed: int, seconds: float = 60.0) -> tuple[Course, dict[str, Played], Counter[str]]:
    draw = random.Random(seed)
    jobs = {view.name: Played(view, draw, draw.uniform(1, 8)) for view in (COLLECTIVE, PUSHING)}
    course = Course(seed, tuple(FAULTS), every_s=draw.uniform(0.5, 4))
    counts: Counter[str] = Counter()
    undone: set[int] = set()
    now_s = 0.0
    while now_s < seconds:
        now_s += draw.uniform(0.1, 0.5)
        views: Mapping[str, JobView] = {name: job.seen(now_s) for name, job in jobs.items()}
        for order in course.step(now_s, views):
            one = order.strike
            if isinstance(order, Begin):
                assert views[one.job].whole_at_s != NEVER_S
                jobs[one.job].begin(one, now_s)
                counts[one.fault] += 1
            else:
                assert now_s >= one.end_s and one.number not in undone
                undone.add(one.number)
                jobs[one.job].end(one, now_s)
        for job in jobs.values():
            job.survives()
        due = [one for job in jobs.values() for one in job.down.values() if one.end_s < now_s]
        assert {one.number for one in due} <= undone, "a fault is undone when its time is over"
    return course, jobs, counts


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(n * SEEDS, marks=pytest.mark.soak) for n in range(1, 10))])
def test_nothing_is_drawn_that_no_job_survives(first: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, first + SEEDS):
        total += played(seed)[2]
    assert set(total) == set(FAULTS), "every fault has its turn"
    assert min(total.values()) * 8 > max(total.values()), "and about as often as another"


def test_the_same_seed_gives_the_same_course() -> None:
    first, second = played(7), played(7)
    assert first[2] == second[2] and first[0].refusals == second[0].refusals


def test_what_is_not_over_is_undone_when_its_job_is_gone() -> None:
    course = Course(1, ("freeze-disk",), 1.0)
    (begin,) = course.step(20.0, {"torch": WHOLE})
    assert isinstance(begin, Begin) and course.pending("torch")
    assert course.drop("torch") == [End(begin.strike)]
    assert course.open == []


def test_a_fault_without_a_victim_is_forgotten() -> None:
    course = Course(1, ("kill-worker",), 1.0)
    (begin,) = course.step(20.0, {"torch": WHOLE})
    course.withdraw(begin.strike)
    assert course.counts["kill-worker"] == 0 and course.open == []


def test_a_fault_is_over_only_when_the_job_has_trained_since() -> None:
    course = Course(1, ("cut",), 1000.0)
    (begin,) = course.step(20.0, {"torch": WHOLE})
    end_s = begin.strike.end_s
    assert course.step(end_s + 1, {"torch": replace(WHOLE, whole_at_s=end_s + 1)}) == [End(begin.strike)]
    views = {"torch": replace(WHOLE, whole_at_s=end_s - 0.1, copied_at_s=end_s + 2)}
    course.step(end_s + 2, views)
    assert course.on("torch"), "its nodes were last seen together before the end"
    course.step(end_s + 3, {"torch": replace(WHOLE, whole_at_s=end_s + 2.5, copied_at_s=end_s + 2)})
    assert not course.on("torch")


def test_a_replay_strikes_at_the_same_times() -> None:
    old = [Strike(n, "kill-worker", "torch-9", "a", at_s, at_s, 0.5) for n, at_s in ((1, 5.0), (2, 12.0))]
    course = Replay(0, (), 0.0, left=old)
    assert course.step(100.0, {"torch": COLLECTIVE}) == []
    begun = {}
    for tenth in range(1000, 1300):
        now_s = tenth / 10
        for order in course.step(now_s, {"torch": replace(WHOLE, whole_at_s=now_s)}):
            if isinstance(order, Begin):
                begun[order.strike.number] = now_s
    assert begun == {1: 105.0, 2: 112.0}
