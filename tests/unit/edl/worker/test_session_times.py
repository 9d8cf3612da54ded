"""A session reports the times of its steps."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from edl.wire.local import StepTimes
from edl.worker import session as sessions
from edl.worker.framework import CollectiveWaits
from edl.worker.session import Session, _alone


class Sending:
    """A link that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Group:
    """A communicator in which the worker has waited."""

    def __init__(self) -> None:
        self.spent: CollectiveWaits | None = CollectiveWaits()

    def waits(self) -> CollectiveWaits | None:
        return self.spent


def test_one_report_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    link, group, now = Sending(), Group(), [0.0, 0.0]
    session: Any = Session(link, {})  # type: ignore[arg-type]
    session.seat, session._group, session._connected = dataclasses.replace(_alone({}), round=3), group, True
    monkeypatch.setattr(sessions, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(sessions, "now", lambda: (now[0], now[1]))
    session.measure()
    for _ in range(4):
        now[0] += 2.5  # a second of them computing, a half waiting for data, and one in collectives
        now[1] += 1.0
        session.waiting_s += 0.5
        group.spent = CollectiveWaits(group.spent.waited_s + 1.0, group.spent.idle_s + 1.0)  # type: ignore[union-attr]
        session.samples += 8
        session.measure()
    assert link.sent == [StepTimes(3, 2.5, 2.5, 0.4, 0.0, 0.2, 0.2, 8.0)] * 2
    group.spent = None
    now[0] += 5.0
    session.measure()
    assert link.sent[-1].peers_share == -1.0


def test_without_an_agent_nothing_is_reported() -> None:
    session = Session(None, {})
    session.seat = _alone({})
    session.measure()
