"""``edl errors``: incidents from the history and from the failures that the Master keeps."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from click.testing import CliRunner

from edl.cli.__main__ import edl
from edl.cli.errors import incident_lines
from edl.cli.find import NoMaster, Where
from edl.cli.incident_list import PastIncident, incidents
from edl.types import NodeId, Rank, Round
from edl.wire.messages import Finish
from edl.wire.records import Failure
from edl.wire.status import HistoryEntry, JobStatus

BOOM = 'Traceback (most recent call last):\n  File "train.py", line 1\nValueError: \x1b[31mboom\x07'


def failure(rank: int, number: int, *, peer_loss: bool = False, traceback: str = "") -> Failure:
    error = traceback.splitlines()[-1] if traceback else ""
    return Failure(
        NodeId(f"n{rank}"), Round(number), Rank(rank), 0, 1, "ended with exit status 1", error, traceback,
        peer_loss=peer_loss, host=f"host-{rank}", pid=4711, time_s=1.8e9,
    )  # fmt: skip


def entry(number: int, rounds: int, text: str, kind: str = "worker-failed") -> HistoryEntry:
    return HistoryEntry(number, 1.8e9 + number, kind, text, "", rounds)


HISTORY = [
    entry(1, 1, "round 1", "world-formed"),
    entry(2, 1, "worker 0 on n0 was killed by SIGKILL; restart 1 of 3"),
    entry(3, 2, "round 2", "world-formed"),
    entry(4, 2, "2 workers ended that had lost a peer: 2 on n2, 3 on n3"),
    entry(5, 2, "also worker 4 on n4 ended with exit status 1"),
    entry(6, 2, "worker 1 on n1 ended with exit status 1: ValueError: boom; restart 2 of 3"),
]
FAILURES = (failure(2, 2, peer_loss=True), failure(1, 2, traceback=BOOM), failure(4, 2, traceback="E\nE: four"))


def test_newest_first_and_the_root_cause_before_its_consequences() -> None:
    last, first = incidents(HISTORY, FAILURES)
    assert (last.round, first.round) == (2, 1)
    assert [one.number for one in last.events] == [6, 5, 4]
    assert [one.rank for one in last.failures] == [1, 4, 2]
    assert [one.number for one in first.events] == [2] and first.failures == ()
    assert (last.at_s, first.at_s) == (1.8e9 + 6, 1.8e9 + 2)


def test_failures_whose_events_are_no_longer_kept() -> None:
    (only,) = incidents([], FAILURES)
    assert (only.events, only.at_s, len(only.failures)) == ((), 1.8e9, 3)
    assert incidents([], ()) == []


def test_every_independent_failure_has_its_traceback_and_no_control_characters() -> None:
    lines = incident_lines("digits", incidents(HISTORY, FAILURES)[:1], 1)
    text = "\n".join(lines)
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("Incident in round 2, 20")
    assert lines[-1] == "1 earlier incident: edl errors --all"
    assert text.index("rank      : 1 (") < text.index("rank      : 4 (") < text.index("rank      : 2 (")
    assert '      File "train.py", line 1' in lines
    assert "    E: four" in lines
    assert text.count("traceback :") == 2


def test_nothing_has_failed() -> None:
    assert incident_lines("digits", [], 0) == ["no failure of a worker of job digits is known"]


def run(monkeypatch: pytest.MonkeyPatch, ending: NoMaster | None, *words: str) -> str:
    class Client:
        async def status(self) -> JobStatus:
            return JobStatus("digits", "running", 2, 5, "", "1:5", "elastic", 2, 3, "a", (), (), FAILURES)

        async def events(self, after: int, follow: bool) -> AsyncIterator[HistoryEntry]:
            assert (after, follow) == (0, False)
            for one in HISTORY:
                yield one

    @asynccontextmanager
    async def master_of(where: Where) -> AsyncIterator[Client]:
        if ending is not None:
            raise ending
        yield Client()

    monkeypatch.setattr("edl.cli.find.master_of", master_of)
    done = CliRunner().invoke(edl, ["errors", *words, "--rdzv-id=digits"], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize(("words", "rounds"), [((), [2]), (("--all",), [2, 1])])
def test_as_json(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], rounds: list[int]) -> None:
    plain = json.loads(run(monkeypatch, None, "--json", *words))
    assert (plain["job"], plain["ending"]) == ("digits", "")
    assert [one["round"] for one in plain["incidents"]] == rounds
    assert plain["incidents"][0]["failures"][0]["traceback"] == BOOM


def test_a_job_that_has_just_ended_still_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = NoMaster("job digits has ended with exit code 1: lost", Finish(1, "lost", FAILURES))
    text = run(monkeypatch, ending)
    assert text.startswith("job digits has ended with exit code 1: lost\n")
    assert "rank      : 1 (" in text


def test_a_hang_has_no_failed_worker() -> None:
    hang = entry(1, 4, "no progress for 60 s on n0; restart 1 of 3")
    assert incidents([hang], ()) == [PastIncident(4, hang.at_s, (hang,))]
