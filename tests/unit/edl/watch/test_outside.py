"""The watchdogs of ``edl watch``, held against plain rules on random courses."""

from __future__ import annotations

import random

import pytest

from edl.watch.outside import PROGRESS, REACHABLE, RUNNING, OutsideMemory, OutsideSnapshot, look
from edl.watch.readings import Sight

LIMIT_S, GRACE_S = 600.0, 60.0


def stretch(seen: list[OutsideSnapshot], holds: list[bool]) -> float:
    """Seconds for which it has held, with looks without an answer left out; -1: it does not hold."""
    first = len(holds)
    while first and holds[first - 1]:
        first -= 1
    return seen[-1].at_s - seen[first].at_s if first < len(seen) else -1.0


@pytest.mark.parametrize("seed", range(200))
def test_random_courses_follow_the_rules(seed: int) -> None:
    random_, memory, at_s = random.Random(seed), OutsideMemory(), 0.0
    looks: list[OutsideSnapshot] = []
    for _ in range(60):
        at_s += random_.choice([20.0, 40.0, 300.0])
        silent = random_.choice(["", "", "", "connection refused"])
        phase = "" if silent else random_.choice(["running", "running", "running", "forming", "suspended"])
        progress = None if silent else random_.choice([1, 1, 1, 2, None])
        looks.append(OutsideSnapshot(at_s, silent, phase, "why", progress))
        memory, readings = look(memory, looks[-1], LIMIT_S, GRACE_S)
        found = {one.name: one.sight for one in readings}
        mute = stretch(looks, [bool(one.silent) for one in looks]) >= GRACE_S
        assert (found[REACHABLE] is Sight.FIRED) == mute
        if silent:
            assert found[RUNNING] is found[PROGRESS] is Sight.BLIND
            continue
        answers = [one for one in looks if not one.silent]
        stopped = stretch(answers, [one.phase == "forming" for one in answers])
        assert (found[RUNNING] is Sight.FIRED) == (stopped >= LIMIT_S)
        last = answers[-1]
        still = [one.phase == "running" and one.progress == last.progress for one in answers]
        first = len(still)
        while first and still[first - 1]:
            first -= 1
        # The look before counts as well if the job did not run then: from there on it could have got on.
        if first and answers[first - 1].progress == last.progress and last.progress is not None:
            first -= 1
        stands = last.phase == "running" and last.progress is not None and at_s - answers[first].at_s >= LIMIT_S
        assert (found[PROGRESS] is Sight.FIRED) == stands


def test_a_job_of_which_no_progress_is_known_does_not_stand_still() -> None:
    memory = OutsideMemory()
    for at_s in (0.0, 1e6):
        memory, readings = look(memory, OutsideSnapshot(at_s, "", "running", "", None), LIMIT_S, GRACE_S)
        assert all(one.sight is Sight.CLEAR for one in readings)
