"""The watchdogs of a job, held against plain rules on random courses."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import dataclass, field, replace

import pytest

from edl.watch.job import PLAIN_S, JobMemory, JobSnapshot, look
from edl.watch.readings import Sight
from edl.watch.table import WatchLimits
from edl.wire.records import NO_STATE, Version

START = JobSnapshot(0.0, "running", "round 1", 1, 3, 0, NO_STATE, NO_STATE, True, 0, 3, 0, 0)
LIMITS = WatchLimits((("checkpoint-age", 900.0),))


def fired(memory: JobMemory, seen: JobSnapshot, limits: WatchLimits = LIMITS) -> tuple[JobMemory, set[str]]:
    memory, readings = look(memory, seen, limits)
    return memory, {one.name for one in readings if one.sight is Sight.FIRED}


@dataclass
class Course:
    """A random job, and what is true of it by rules that look at the whole past."""

    random: random.Random
    seen: list[JobSnapshot] = field(default_factory=lambda: [START])

    def next(self) -> JobSnapshot:
        last, random_ = self.seen[-1], self.random
        now = replace(last, at_s=last.at_s + random_.choice([2.0, 50.0, 200.0]), members=random_.randrange(1, 4))
        what = random_.choice(["train", "train", "train", "save", "fail", "form", "size", "store", "member"])
        if what == "save" and last.phase == "running":
            now = replace(now, saved=Version(1, last.saved.commit + 5))
        elif what == "fail":
            used = min(last.restarts_used + 1, last.restarts_allowed)
            restored = random_.choice([last.restored, last.restored, last.saved])
            now = replace(now, round=last.round + 1, restarts_used=used, restored=max(restored, last.restored))
        elif what == "form":
            now = replace(now, phase=random_.choice(["forming", "running", "suspended"]))
        elif what == "size":
            now = replace(now, requested=random_.choice([0, 2, 3]))
        elif what == "store":
            now = replace(now, store_trouble=random_.choice(["", "no answer"]))
        elif what == "member":
            total = random_.choice([0, 1, 3, 5])
            now = replace(now, store_total=total, store_up=random_.randrange(0, total + 1))
        self.seen.append(now)
        return now

    def since(self, holds: list[bool]) -> float | None:
        """When the current stretch began in which it holds; None: it does not hold."""
        if not holds[-1]:
            return None
        first = len(holds)
        while first and holds[first - 1]:
            first -= 1
        return self.seen[first].at_s

    def trained_s(self, first: int, last: int) -> float:
        steps = range(first, last)
        return sum(self.seen[at + 1].at_s - self.seen[at].at_s for at in steps if self.seen[at].phase == "running")

    def expected(self) -> set[str]:
        seen, now, found = self.seen, self.seen[-1], set()
        at = len(seen) - 1
        changes = [index for index in range(1, at + 1) if seen[index].saved != seen[index - 1].saved]
        age_s = self.trained_s(changes[-1] if changes else 0, at)
        intervals = [self.trained_s(a, b) for a, b in itertools.pairwise(changes)][-5:]
        if now.phase == "running" and age_s > 900:
            found.add("checkpoint-age")
        if now.phase == "running" and len(intervals) >= 2 and 0 < 3 * statistics.median(intervals) < age_s:
            found.add("checkpoint-late")
        if self.futile() >= 3:
            found.add("no-progress")
        if now.restarts_used and now.restarts_allowed - now.restarts_used <= 1:
            found.add("restarts-left")
        for name, limit_s, holds in (
            ("short-of-nodes", 300, [one.phase == "running" and 0 < one.members < one.requested for one in seen]),
            ("waiting", 300, [one.phase == "forming" for one in seen]),
            ("store", 30, [bool(one.store_trouble) for one in seen]),
        ):
            since_s = self.since(holds)
            if since_s is not None and now.at_s - since_s >= limit_s:
                found.add(name)
        if now.store_up < now.store_total and now.store_up - (now.store_total // 2 + 1) < 1:
            found.add("store-members")
        return found

    def futile(self) -> int:
        worlds = 0
        for before, after in itertools.pairwise(self.seen):
            if after.round != before.round:
                worlds = 0 if after.restored > before.restored else worlds + after.restarts_used - before.restarts_used
            if after.saved != before.saved:
                worlds = 0
        return worlds


def test_members_whose_launchers_have_not_started_yet_are_not_lost() -> None:
    starting = replace(START, phase="forming", round=0, underway=False, store_total=3, store_up=2)
    memory, found = fired(JobMemory(), starting)
    assert found == set(), "the launchers of a job start one after the other"
    memory, found = fired(memory, replace(starting, at_s=2.0, phase="running", round=1))
    assert found == {"store-members"}, "and a job that trains without one is told so"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_random_courses_follow_the_rules(seed: int) -> None:
    course = Course(random.Random(seed))
    memory, _ = look(JobMemory(), START, LIMITS)
    for _ in range(60):
        memory, found = fired(memory, course.next())
        assert found == course.expected(), course.seen[-3:]


def test_worlds_that_begin_where_the_last_one_began_are_counted() -> None:
    memory, found = fired(JobMemory(), START)
    for number in (1, 2, 3):
        assert "no-progress" not in found
        memory, found = fired(memory, replace(START, at_s=10.0 * number, round=1 + number, restarts_used=number))
    assert "no-progress" in found
    _, found = fired(memory, replace(START, at_s=40.0, round=4, restarts_used=3, saved=Version(4, 9)))
    assert "no-progress" not in found, "a checkpoint is progress"


def test_a_resize_is_no_failure() -> None:
    memory, found = fired(JobMemory(), START)
    for number in range(1, 9):
        memory, found = fired(memory, replace(START, at_s=number, round=1 + number))
    assert "no-progress" not in found


def test_a_script_without_state_has_made_progress_if_it_ran_long() -> None:
    plain = replace(START, underway=False)
    memory, found = fired(JobMemory(), plain)
    for number in range(1, 5):
        memory, found = fired(memory, replace(plain, at_s=number * (PLAIN_S + 1), round=1 + number, restarts_used=3))
    assert "no-progress" not in found


@pytest.mark.parametrize(
    ("underway", "told"), [(True, "each began again from the beginning"), (False, "failed within 10 min (limit 3)")]
)
def test_where_a_script_without_state_began_again_is_not_told(underway: bool, told: str) -> None:
    seen = replace(START, underway=underway)
    memory, readings = look(JobMemory(), seen, LIMITS)
    for number in (1, 2, 3):
        seen = replace(seen, at_s=10.0 * number, round=1 + number, restarts_used=number)
        memory, readings = look(memory, seen, LIMITS)
    (text,) = [one.text for one in readings if one.name == "no-progress"]
    assert told in text


def test_the_text_names_values_limit_and_next_action() -> None:
    _, readings = look(JobMemory(), replace(START, restarts_used=2), WatchLimits())
    (text,) = [one.text for one in readings if one.sight is Sight.FIRED]
    assert text == (
        "1 of 3 restarts left (limit 1); after that, the next failure ends the job. Read the failures in edl status"
    )


def unsure(seen: JobSnapshot, *later: JobSnapshot) -> set[str]:
    """What a new Master cannot tell after these snapshots."""
    memory, readings = look(JobMemory(), seen, LIMITS)
    for one in later:
        memory, readings = look(memory, one, LIMITS)
    return {one.name for one in readings if one.sight is Sight.UNSURE}


def test_a_new_master_does_not_take_for_over_what_it_has_not_watched_for_long_enough() -> None:
    late = {"checkpoint-late", "checkpoint-age"}
    running = replace(START, saved=Version(1, 5), restored=Version(1, 5), requested=3, members=3)
    assert unsure(running) == late | {"no-progress"}
    assert unsure(replace(running, members=2)) == late | {"no-progress", "short-of-nodes"}
    assert unsure(replace(running, phase="forming")) == late | {"no-progress", "short-of-nodes", "waiting"}
    assert unsure(running, replace(running, at_s=2.0, round=2)) == late | {"no-progress"}, "from the same commit"
    assert unsure(running, replace(running, at_s=2.0, round=2, restored=Version(2, 7))) == late
    assert unsure(running, replace(running, at_s=2.0, saved=Version(1, 9))) == set()
    joining = replace(running, underway=False, saved=NO_STATE)
    assert unsure(joining, running) == late | {"no-progress"}, "an old checkpoint that a node has told of"


def test_an_older_checkpoint_is_none_that_was_completed() -> None:
    """The newest one that any node knows of: that node may be lost."""
    memory, found = fired(JobMemory(), replace(START, saved=Version(1, 9)))
    for number in (1, 2, 3):
        now = replace(START, at_s=10.0 * number, round=1 + number, restarts_used=number, saved=Version(1, 9 - number))
        memory, found = fired(memory, now)
    assert "no-progress" in found
    assert memory.intervals_s == ()


def test_what_cannot_be_told_while_no_world_runs_is_not_over() -> None:
    memory, found = fired(JobMemory(), START)
    memory, found = fired(memory, replace(START, at_s=901.0))
    assert "checkpoint-age" in found
    memory, readings = look(memory, replace(START, at_s=902.0, phase="forming"), LIMITS)
    assert {one.name: one.sight for one in readings}["checkpoint-age"] is Sight.UNSURE
