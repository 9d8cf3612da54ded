"""Reporting the workers' step rate to the Master."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from edl.agent.machine.events import Event, Report
from edl.agent.workers.step_rate import Mark, pace, tell_pace
from edl.rendezvous.parting import Saver, need_s, saver
from edl.types import Round
from edl.wire.messages import Pace

R1, R2 = Round(1), Round(2)


@pytest.mark.parametrize(
    ("before", "now", "step_s"),
    [
        (None, None, None),
        (None, Mark(R1, 5, 10.0), None),
        (Mark(R1, 5, 10.0), None, None),
        (Mark(R1, 5, 10.0), Mark(R1, 5, 10.0), None),
        (Mark(R1, 5, 10.0), Mark(R1, 9, 12.0), 0.5),
        (Mark(R1, 5, 10.0), Mark(R1, 6, 90.0), 80.0),
        (Mark(R1, 5, 10.0), Mark(R2, 9, 12.0), None),
        (Mark(R1, 9, 10.0), Mark(R1, 5, 12.0), None),
        (Mark(Round(0), 5, 10.0), Mark(Round(0), 9, 12.0), None),
    ],
)
def test_pace(before: Mark | None, now: Mark | None, step_s: float | None) -> None:
    found = pace(before, now, 100.0)
    assert (found.step_s if found is not None else None) == step_s


def test_it_is_said_only_while_somebody_commits() -> None:
    marks = iter(
        [
            None,
            Mark(R1, 1, 1.0),
            Mark(R1, 1, 1.0),
            Mark(R1, 3, 5.0),
            Mark(R1, 3, 5.0),
            Mark(R1, 4, 9.0),
            Mark(R2, 4, 10.0),
            Mark(R2, 6, 11.0),
            None,
        ]
    )
    told: list[Event] = []

    async def scenario() -> None:
        with contextlib.suppress(RuntimeError):  # the last mark has been taken
            await tell_pace(lambda: next(marks), told.append, every_s=0, holders=lambda: 2)

    asyncio.run(scenario())
    messages = [one.message for one in told if isinstance(one, Report)]
    paces = [dataclasses.replace(one, age_s=0.0) for one in messages if isinstance(one, Pace)]
    assert paces == [Pace(R1, 3, 2.0, holders=2), Pace(R1, 4, 4.0, holders=2), Pace(R2, 6, 0.5, holders=2)]


def test_it_comes_with_the_shares_of_time_that_the_workers_waited() -> None:
    before, now = Mark(R1, 5, 10.0, 1.0, 2.0), Mark(R1, 9, 14.0, 2.0, 5.0)
    assert pace(before, now, 14.5) == Pace(R1, 9, 1.0, 0.5, 0.25, 0.75)
    restarted = Mark(R1, 9, 14.0, 0.5, 10.0)
    assert pace(before, restarted, 14.0) == Pace(R1, 9, 1.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("grace_s", "step_s", "save_s", "who"),
    [
        (15.0, 1.0, 5.0, Saver.LEAVER),
        (15.0, 10.0, 10.0, Saver.LEAVER),
        (15.0, 10.1, 10.0, Saver.OTHERS),
        (0.5, 0.1, 5.0, Saver.OTHERS),
        (0.5, 60.0, 0.0, Saver.LEAVER),
    ],
    ids=["plenty", "just enough", "a little short", "no time", "nothing is known of saving"],
)
def test_who_writes(grace_s: float, step_s: float, save_s: float, who: Saver) -> None:
    assert saver(grace_s, step_s, save_s) is who


def test_need() -> None:
    assert need_s(0.75, 2.0) == 4.75
    assert need_s(0.0, 0.0) == 0.0
