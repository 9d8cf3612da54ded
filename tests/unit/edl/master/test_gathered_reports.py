"""Reports of pace wait for the next decision while decisions are slow; everything else is decided about at once."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edl.master import events as ev
from edl.master import gathered_reports as module
from edl.master import service as sv
from edl.master.gathered_reports import GatheredReports
from edl.master.hosting import Hosted
from edl.master.shell import MasterShell
from edl.master.state import MasterState
from edl.types import Incarnation, NodeId, Round
from edl.wire.messages import Pace, Ready
from tests.support.master_fixture import Agent, Bench, play, turns, until
from tests.unit.edl.master.test_shell import failure, running

SLOW_S = 0.02
"""Duration of a decision about a thousand nodes."""


def said(message: Any) -> ev.NodeSaid:
    return ev.NodeSaid(NodeId("a"), Incarnation(1), message)


def pace(commit: int = 1) -> Pace:
    return Pace(Round(1), commit, 0.5)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The times for which the timer is set; the clock stands at 100 s."""
    times: list[float | None] = []

    class Recorder:
        def __init__(self, now_s: Callable[[], float], fire: Callable[[], None]) -> None:
            self.set = times.append

    monkeypatch.setattr(module, "Timer", Recorder)
    return times


def gathered() -> GatheredReports:
    return GatheredReports(lambda: 100.0, lambda: None)


def test_reports_wait_together_until_the_oldest_is_due(timer: list[float | None]) -> None:
    kept, reports = gathered(), [said(pace(one)) for one in range(3)]
    assert all(kept.keep(one, SLOW_S) for one in reports)
    assert timer == [pytest.approx(100.8)]
    assert kept.take() == reports and timer[1:] == [None]
    assert kept.take() == []


def test_none_waits_longer_than_a_second(timer: list[float | None]) -> None:
    assert gathered().keep(said(pace()), 3.0)
    assert timer == [101.0]


def test_a_small_job_decides_at_once(timer: list[float | None]) -> None:
    assert not gathered().keep(said(pace()), 0.001)
    assert timer == []


@pytest.mark.parametrize("event", [said(Ready(Round(0), (1,))), ev.Tick(), RuntimeError()], ids=repr)
def test_others_do_not_wait(timer: list[float | None], event: object) -> None:
    assert not gathered().keep(event, SLOW_S)


class Decisions:
    """The events of each decision."""

    def __init__(self) -> None:
        self.events: list[Sequence[ev.Event]] = []
        self.one = asyncio.Event()

    def take(self, state: MasterState | None, events: Sequence[ev.Event], decision: ev.Decision) -> None:
        self.events.append(events)
        self.one.set()


async def slow_job(bench: Bench) -> tuple[MasterShell, Agent, Decisions]:
    """A job of one node whose last decision took long."""
    shell, _, agent = await running(bench)
    decisions = Decisions()
    shell._took_s = SLOW_S
    shell._deps = dataclasses.replace(shell._deps, decided=decisions.take)
    return shell, agent, decisions


def test_the_next_other_event_takes_them_along_in_order() -> None:
    async def scenario(bench: Bench) -> None:
        shell, agent, decisions = await slow_job(bench)
        agent.say(pace(1))
        agent.say(pace(2))
        await turns()
        assert decisions.events == [] and shell.status().nodes[0].step_s == 0.0
        agent.say(failure())
        await decisions.one.wait()
        messages = [event.message for event in decisions.events[0] if isinstance(event, ev.NodeSaid)]
        assert messages == [pace(1), pace(2), failure()]

    play(scenario)


def test_a_services_event_before_one_is_handled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        shell, agent, decisions = await slow_job(bench)
        served, serve = asyncio.Event(), shell._serve

        async def counted() -> None:
            await serve()
            served.set()

        monkeypatch.setattr(shell, "_serve", counted)
        shell._events.put_nowait(Hosted(None, sv.Tick()))  # which waits for those behind it
        shell._events.put_nowait(ev.NodeSaid(agent.info.node, agent.info.incarnation, pace()))
        await until(served.is_set)
        assert decisions.events == []

    play(scenario)


def test_without_another_event_they_are_decided_about_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORTEST_S", 0.0)
    monkeypatch.setattr(module, "LONGEST_S", 0.01)

    async def scenario(bench: Bench) -> None:
        shell, agent, decisions = await slow_job(bench)
        agent.say(pace(7))
        await decisions.one.wait()
        assert [type(event) for event in decisions.events[0]] == [ev.NodeSaid, ev.Tick]
        await until(lambda: shell.status().nodes[0].step_s == 0.5)

    play(scenario)
