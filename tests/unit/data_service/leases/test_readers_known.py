"""The list of remote readers, from their keys to the workers."""

from __future__ import annotations

import json

import pytest

from data_service.leases.machine import LeaseMachine
from data_service.leases.reader_registry import ReaderRegistry
from data_service.manifest import ManifestBuilder
from data_service.protocol.messages import (
    DataRefused,
    DataSetOptions,
    Open,
    ReaderList,
    RegisterFiles,
    decode,
    encode,
)
from edl.master.service import AddToHistory, Caller, Effect, KeyGone, KeyPut, Said, TellWorker, WorldBegan, WorldEnded
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.records import Member, World

A, B = Caller(NodeId("a"), 0), Caller(NodeId("b"), 0)
FIRST = ("a-1", "10.0.0.1", 7000, "one")
SECOND = ("b-1", "10.0.0.2", 7001, "two")


def world(number: int) -> World:
    members = [Member(NodeId(name), Incarnation(1), "h", 1, Rank(rank), ()) for rank, name in enumerate("ab")]
    return World(Round(number), tuple(members), 0)


def key(reader: tuple[str, str, int, str]) -> KeyPut:
    name, host, port, secret = reader
    sent = {"host": host, "port": port, "capacity": 4, "secret": secret}
    return KeyPut(f"readers/{name}", json.dumps(sent).encode())


class Job:
    """A machine, and the lists that it tells."""

    def __init__(self) -> None:
        self.machine = LeaseMachine()
        self.machine.load({}, 0.0)
        self.round = 0
        self.notes: list[str] = []
        self.ids = 0
        self.begin()

    def begin(self) -> None:
        if self.round:
            self.machine.step(WorldEnded(Round(self.round), "over"), 0.0)
        self.round += 1
        self.take(self.machine.step(WorldBegan(world(self.round)), 0.0))

    def take(self, effects: tuple[Effect, ...]) -> list[tuple[Caller, list[str]]]:
        self.notes += [effect.text for effect in effects if isinstance(effect, AddToHistory)]
        words = [(effect.caller, decode(effect.body)) for effect in effects if isinstance(effect, TellWorker)]
        return [(to, [one[0] for one in word.readers]) for to, word in words if isinstance(word, ReaderList)]

    def say(self, caller: Caller, word: RegisterFiles | Open) -> list[tuple[Caller, list[str]]]:
        return self.take(self.machine.step(Said(caller, Round(self.round), encode(word)), 0.0))

    def open(self, caller: Caller, dataset: str = "set") -> list[tuple[Caller, list[str]]]:
        sent: list[tuple[Caller, list[str]]] = []
        if caller == A:
            builder = ManifestBuilder("ipc")
            builder.file(f"/{dataset}", 10)
            builder.shard(0, 10, 10)
            self.ids += 1
            sent += self.say(A, RegisterFiles(self.ids, dataset, builder.build().encode(), DataSetOptions()))
        self.ids += 1
        return sent + self.say(caller, Open(self.ids, dataset, 0 if caller == A else 1, 0))

    def key(self, event: KeyPut | KeyGone) -> list[tuple[Caller, list[str]]]:
        return self.take(self.machine.step(event, 0.0))


def test_a_worker_hears_of_readers_when_it_opens_and_when_they_change() -> None:
    job = Job()
    assert job.key(key(FIRST)) == []
    assert job.open(A) == [(A, ["a-1"])]
    assert job.open(B) == [(B, ["a-1"])]
    assert job.key(key(SECOND)) == [(A, ["a-1", "b-1"]), (B, ["a-1", "b-1"])]
    assert job.key(key(SECOND)) == []
    assert job.key(KeyGone("readers/a-1")) == [(A, ["b-1"]), (B, ["b-1"])]
    assert job.key(KeyGone("readers/b-1")) == [(A, []), (B, [])]


def test_a_worker_hears_once_however_many_data_sets_it_opens() -> None:
    job = Job()
    job.key(key(FIRST))
    job.open(A)
    assert job.open(A, "other") == [(A, ["a-1"])]  # it opens: words may have been lost
    assert job.key(key(SECOND)) == [(A, ["a-1", "b-1"])]


@pytest.mark.parametrize("authority", ["", "of the readers"])
def test_workers_hear_by_what_to_know_the_readers_of_a_job_with_a_secret(authority: str) -> None:
    known = ReaderRegistry(authority)
    known.changed(key(FIRST))
    (sent,) = known.tell({A})
    assert isinstance(sent, TellWorker)
    assert decode(sent.body) == ReaderList((FIRST,), authority)
    assert "of the readers" not in repr(decode(sent.body))


def test_a_job_without_readers_hears_nothing() -> None:
    job = Job()
    assert job.open(A) + job.open(B) == []
    assert job.key(KeyGone("readers/a-1")) == []


def test_a_delayed_open_request_is_answered_later() -> None:
    job = Job()
    job.key(key(FIRST))
    assert job.open(B) == []  # nobody has registered the data yet
    assert sorted(job.open(A)) == [(A, ["a-1"]), (B, ["a-1"])]


def test_processes_of_the_next_round_are_told_again() -> None:
    job = Job()
    job.key(key(FIRST))
    job.open(A)
    job.begin()
    assert job.open(A) == [(A, ["a-1"])]


def test_an_invalid_key_is_ignored_with_a_note() -> None:
    job = Job()
    job.open(A)
    job.notes.clear()
    for value in (
        b"",
        b"[]",
        b"{}",
        b'{"host": "h", "port": "7", "secret": "s"}',
        b'{"host":"h","port":0,"secret":"s"}',
    ):
        assert job.key(KeyPut("readers/x", value)) == []
    assert len(job.notes) == 5
    assert "ignoring reader x" in job.notes[0]
    assert job.key(KeyPut("something/else", b"")) == []


def test_a_worker_cannot_say_which_readers_there_are() -> None:
    job = Job()
    (answer,) = job.machine.step(Said(A, Round(1), encode(ReaderList((FIRST,)))), 0.0)
    assert isinstance(answer, TellWorker)
    refused = decode(answer.body)
    assert isinstance(refused, DataRefused)
    assert refused.kind == "malformed"


def test_the_status_names_them() -> None:
    known = ReaderRegistry()
    assert known.report() == ()
    for number in range(10):
        value = b'{"host": "h", "port": 5, "secret": "s"}'
        known.changed(KeyPut(f"readers/r{number}", value))
    (shown,) = known.report()
    assert shown.text == "10 remote readers: r0, r1, r2, r3, r4, r5, r6, r7 and 2 more"
    assert shown.counts == {"readers": 10}
