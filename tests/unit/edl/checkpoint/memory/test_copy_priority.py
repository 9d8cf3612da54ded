"""Copies are sent at low priority, except where somebody waits for them or the processors are too busy."""

from __future__ import annotations

import os
import threading

import pytest

from edl.checkpoint.memory import replication
from edl.ports import Lent
from edl.testing.memory_copies import MemoryCopies
from tests.support.memory_checkpoints_fixture import LIMIT_S, A, B, Bench, Worker, h, run, until


def noted_niceness(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """For each copy that is sent from now on: whether it is urgent, and the niceness of its thread."""
    niceness: list[tuple[bool, int]] = []
    put = MemoryCopies.put

    def noted(self: MemoryCopies, host: str, port: int, lent: Lent, *, urgent: bool = False) -> None:
        niceness.append((urgent, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        put(self, host, port, lent, urgent=urgent)

    monkeypatch.setattr(MemoryCopies, "put", noted)
    return niceness


def test_a_node_that_leaves_does_not_copy_at_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    niceness = noted_niceness(monkeypatch)

    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        worker = Worker(here)
        here.keep_with(B, B, 1)
        await worker.commit(1)
        await bench.copied.get()
        await until(lambda: there.holdings() == (h(1),))
        await worker.commit(2)
        assert await here.copied_before_leaving(LIMIT_S)
        await worker.commit(3)
        assert await here.copied_before_leaving(LIMIT_S)

    run(test)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert not niceness[0][0]
    assert niceness[0][1] > usual
    assert niceness[-1] == (True, usual)


def test_copies_that_take_too_long_at_low_priority_are_sent_at_normal_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose processors are all busy, copies would fall behind without end."""
    niceness = noted_niceness(monkeypatch)

    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        worker = Worker(here)
        here.keep_with(B, B, 1)
        for commit in (1, 2):
            await worker.commit(commit)
            await bench.copied.get()
            assert there.holdings()[-1] == h(commit)
        here.keep_with(B, B, 1)  # the Master names a peer again: perhaps the processors are free now
        await worker.commit(3)
        await until(lambda: there.holdings()[-1] == h(3))

    monkeypatch.setattr(replication, "SLOW_COPY_S", -1.0)
    run(test)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert not niceness[0][0] and niceness[0][1] > usual
    assert niceness[1] == (True, usual)
    assert any(not urgent for urgent, _ in niceness[2:])
