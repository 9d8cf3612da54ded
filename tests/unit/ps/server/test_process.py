"""Messages of a pserver process to its launcher."""

from __future__ import annotations

import io
import resource
import sys
import threading

import pytest

from ps.net.caller import FrameCaller
from ps.net.stdio import ParentLauncher
from ps.protocol.frames import FrameOp
from ps.protocol.handshake import MASTER, TRAINER, CallerHello
from ps.server.process import FILES, allow_files
from tests.support.ps_echo import LONG_S
from tests.support.ps_servers import SECRET, place, server


def test_it_says_whether_a_master_has_been_in_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, gone, known = io.StringIO(), threading.Event(), [True, False]
    monkeypatch.setattr(sys, "stdin", io.StringIO("?\n?\n"))
    launcher = ParentLauncher(answers)
    launcher.answer_until_gone(gone.set, lambda: known.pop(), lambda: len(known) == 1)
    assert gone.wait(LONG_S)
    assert answers.getvalue() == "!w\n!0\n" and launcher.gone


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(1024, 100_000, 12_288), (1024, 4096, 4096), (20_000, 100_000, 0), (1024, resource.RLIM_INFINITY, 12_288)],
)
def test_as_many_files_as_a_thousand_trainers_need(
    soft: int, hard: int, expected: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: told.append(limits))
    allow_files(FILES)
    assert FILES >= 3 * 1000 * 2, "three connections, each with memory that is lent"
    assert told == ([(expected, hard)] if expected else [])
    assert ("ulimit -Hn" in caplog.text) is (hard == 4096)


def test_a_master_is_in_touch_while_it_asks_and_for_a_lease_after_its_connection() -> None:
    one = server()
    assert one.masterless(LONG_S)
    trainer = FrameCaller.connect(place(one), CallerHello(TRAINER, 1), secret=SECRET, deadline_s=LONG_S)
    assert one.masterless(LONG_S)
    master = FrameCaller.connect(place(one), CallerHello(MASTER, token=1), secret=SECRET, deadline_s=LONG_S)
    master.request(FrameOp.PING, deadline_s=LONG_S)  # answered only after the pserver has taken note of the connection
    assert not one.masterless(LONG_S)
    peer = one._newest
    assert peer is not None
    peer.heard_s -= LONG_S
    assert one.masterless(LONG_S)
    master.request(FrameOp.PING, deadline_s=LONG_S)
    assert not one.masterless(LONG_S)
    trainer.close()
    master.close()
    assert not one.masterless(LONG_S)
    peer.heard_s -= LONG_S
    assert one.masterless(LONG_S)
    one.stop()
