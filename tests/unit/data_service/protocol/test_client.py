"""Requests of a worker to the lease machine, repeated after a failover."""

from __future__ import annotations

from typing import Any

import pytest

from data_service.loader.lease_client import LeaseClient
from data_service.loader.transport import Dispatcher
from data_service.manifest import ShardRef
from data_service.protocol import messages
from data_service.protocol.messages import (
    DataRefused,
    DataSetOptions,
    Done,
    Given,
    Lease,
    LeasesGranted,
    NextEpoch,
    Open,
    Opened,
    RegisterFiles,
)
from edl.errors import DataError


class Wire(Dispatcher):
    """Records sent messages."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def say(self, text: str, number: int) -> None:
        assert number == 3
        self.said.append(messages.decode(text))

    def answer(self, word: type[Any], **fields: Any) -> None:
        """Answer the last request."""
        self.hear(messages.encode(word(self.said[-1].id, "d", **fields)))

    def grant(self, *shards: int, state: str = "more") -> None:
        leases = tuple(Given(ShardRef(shard, "f", 0, 9, 9), 0) for shard in shards)
        self.answer(LeasesGranted, epoch=0, leases=leases, state=state)

    def open(self, **fields: Any) -> None:
        settings = {"digest": "x", "format": "ipc", "shards": 9, "records": 81, "options": DataSetOptions(), "epoch": 0}
        self.answer(Opened, **settings, **fields)


@pytest.fixture
def line() -> Wire:
    return Wire()


@pytest.fixture
def client(line: Wire) -> LeaseClient:
    return LeaseClient(line, "d", 3, 0, lambda: "position")


def never() -> None:
    raise AssertionError("it has to wait")


def test_one_thing_after_the_other(line: Wire, client: LeaseClient) -> None:
    opened, lease = client.open(0, ""), client.lease(0, 2)
    assert [type(word) for word in line.said] == [Open] and line.said[0].ledger == "position"
    line.open()
    assert client.wait(opened, never, Opened).shards == 9
    assert line.said[-1] == Lease(line.said[0].id + 1, "d", 0, 2) and not lease.done.is_set()
    line.grant(4, 5)
    assert [one.shard.index for one in client.wait(lease, never, LeasesGranted).leases] == [4, 5]


def test_only_rank_0_tells_the_position(line: Wire) -> None:
    LeaseClient(line, "d", 3, 1, lambda: "position").open(0, "")
    assert line.said[0].ledger == ""
    line.hear(None)
    assert line.said[1].ledger == ""


def test_an_answer_to_something_else_is_ignored(line: Wire, client: LeaseClient) -> None:
    lease = client.lease(0, 2)
    line.hear(messages.encode(LeasesGranted(line.said[-1].id - 1, "d", 0, (), "more")))
    line.hear(messages.encode(LeasesGranted(line.said[-1].id, "other", 0, (), "more")))
    assert not lease.done.is_set()
    line.grant()
    assert lease.done.is_set()


def test_all_is_said_again_to_another_master(line: Wire, client: LeaseClient) -> None:
    client.register(b"manifest", DataSetOptions())
    line.answer(messages.FilesRegistered, digest="x", shards=9, records=81)
    client.open(0, "")
    line.open()
    client.lease(0, 4)
    line.grant(1, 2, 3, 7)
    client.lease(0, 1, [(2, 9)], [(7, 4, "broken")])
    asked = len(line.said)
    line.hear(None)
    assert line.said[asked] == RegisterFiles(line.said[asked - 1].id + 1, "d", b"manifest", DataSetOptions())
    line.answer(messages.FilesRegistered, digest="x", shards=9, records=81)
    again = line.said[-1]
    assert isinstance(again, Open) and again.ledger == "position"
    assert (again.granted, again.finished, again.returned) == (((1, 4),), ((2, 3),), ((7, 4),))
    line.open()
    assert line.said[-1].finished == ((2, 9),) and line.said[-1].id > again.id
    line.grant(7)
    line.hear(None)
    line.answer(messages.FilesRegistered, digest="x", shards=9, records=81)
    assert (line.said[-1].granted, line.said[-1].returned) == (((1, 4), (7, 8)), ()), "it has been granted again"


def test_another_failover_while_it_is_said_again(line: Wire, client: LeaseClient) -> None:
    client.open(0, "")
    line.open()
    lease = client.lease(0, 4)
    for _ in range(3):
        line.hear(None)
        assert isinstance(line.said[-1], Open)
    line.open()
    line.grant(3)
    assert client.wait(lease, never, LeasesGranted).leases


@pytest.mark.parametrize("again", [False, True])
def test_used_records_are_remembered_though_the_master_refuses_them(line: Wire, again: bool) -> None:
    """They are in the parameters: the intents of this worker have to name them."""
    client = LeaseClient(line, "d", 3, 0, lambda: "", lambda: (3, 0), independent=True)
    client.open(0, "")
    line.open()
    client.ack(0, ((4, 2, False), (5, 9, True)))
    refused = ((4, "it is pending"), (5, "it is pending"))
    if again:
        line.hear(None)
        assert line.said[-1].acks == ((4, 2, False), (5, 9, True))
        line.open(refused=refused, number=7, kept=7)
    else:
        line.answer(Done, epoch=0, refused=refused, number=7, kept=7)
    assert client.unkept() == ((4, 2, False), (5, 9, True))
    client.next_epoch(1, 0, True)
    line.answer(Done, epoch=1, number=7, kept=7)
    assert client.unkept() == ()


def test_what_another_master_has_stored_says_nothing_about_numbers_of_the_last_one(line: Wire) -> None:
    client = LeaseClient(line, "d", 3, 0, lambda: "", lambda: (3, 0), independent=True)
    client.open(0, "")
    line.open()
    client.ack(0, ((4, 2, True),))
    line.answer(Done, epoch=0, number=84, kept=82)
    line.hear(None)
    assert line.said[-1].acks == ((4, 2, True),)
    line.open(number=90, kept=85)  # it has stored three of others
    assert client.unkept() == ((4, 2, True),)
    client.ack(0, ((5, 1, False),))
    line.answer(Done, epoch=0, number=91, kept=90)
    assert client.unkept() == ((5, 1, False),)


def test_an_acknowledgement_that_an_open_has_repeated_is_kept_like_others(line: Wire) -> None:
    """Its own answer never comes. One that waited behind the Open gets its own."""
    client = LeaseClient(line, "d", 3, 0, lambda: "", lambda: (3, 0), independent=True)
    client.open(0, "")
    line.open()
    client.ack(0, ((4, 2, True),))
    line.hear(None)
    client.ack(0, ((5, 9, True),))
    assert line.said[-1].acks == ((4, 2, True),)
    line.open(number=7, kept=6)
    assert client.unkept() == ((4, 2, True), (5, 9, True))
    line.answer(Done, epoch=0, number=8, kept=7)
    assert client.unkept() == ((5, 9, True),)
    line.hear(None)
    assert line.said[-1].acks == ((5, 9, True),)


def test_an_older_acknowledgement_does_not_hide_what_others_have_used_since(line: Wire) -> None:
    """The shard was returned, begun again by others, and granted again."""
    client = LeaseClient(line, "d", 3, 0, lambda: "", lambda: (3, 0), independent=True)
    client.open(0, "")
    line.open()
    client.ack(0, ((4, 2, False),))
    line.answer(Done, epoch=0, number=8, kept=7)
    client.lease(0, 1)
    line.answer(LeasesGranted, epoch=0, leases=(Given(ShardRef(4, "f", 0, 9, 9), 6),), state="more", kept=7)
    line.hear(None)
    assert line.said[-1].acks == ((4, 6, False),)


def test_the_next_epoch_forgets_what_was_granted(line: Wire, client: LeaseClient) -> None:
    client.open(0, "")
    line.open()
    client.lease(0, 4)
    line.grant(1)
    asked = client.next_epoch(1, 0, tell=True)
    assert asked is not None and isinstance(line.said[-1], NextEpoch)
    line.answer(Done, epoch=1)
    line.hear(None)
    again: Any = line.said[-1]
    assert (again.epoch, again.granted) == (1, ())


def test_numbers_go_on_above_those_of_the_process_before(line: Wire, client: LeaseClient) -> None:
    lease = client.lease(0, 1)
    line.answer(DataRefused, kind="old", text="higher", last=1 << 50)
    assert line.said[-1].id == (1 << 50) + 1 and not lease.done.is_set()
    line.grant()
    assert lease.done.is_set()


def test_a_refusal_is_an_error_with_its_text(line: Wire, client: LeaseClient) -> None:
    opened = client.open(0, "")
    line.answer(DataRefused, kind="differs", text="other files: b.parquet")
    with pytest.raises(DataError, match=r"data set d: other files: b\.parquet"):
        client.wait(opened, never, Opened)


def test_a_refusal_of_what_is_said_again_reaches_who_waits(line: Wire, client: LeaseClient) -> None:
    client.open(0, "")
    line.open()
    lease = client.lease(0, 1)
    line.hear(None)
    line.answer(DataRefused, kind="ledger", text="both have it")
    with pytest.raises(DataError, match="both have it"):
        client.wait(lease, never, LeasesGranted)


def test_after_a_stale_answer_it_waits_for_the_end_of_the_round(line: Wire, client: LeaseClient) -> None:
    lease = client.lease(0, 1)
    line.answer(DataRefused, kind="stale", text="round 4")
    client.lease(0, 1)
    assert len(line.said) == 1

    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.wait(lease, check, LeasesGranted)


def test_a_closed_one_neither_speaks_nor_hears(line: Wire, client: LeaseClient) -> None:
    client.lease(0, 1)
    client.close()
    client.lease(0, 1)
    line.hear(None)
    assert len(line.said) == 1
    other = LeaseClient(line, "d", 3, 0, lambda: "")
    client.close()
    lease = other.lease(0, 1)
    line.grant()
    assert lease.done.is_set(), "closing twice does not silence who came after it"


def test_a_late_message_about_the_previous_epoch_is_ignored(line: Wire, client: LeaseClient) -> None:
    """A reading thread may be about to ask when the epoch ends."""
    client.open(0, "")
    line.open()
    client.next_epoch(1, 0, tell=False)
    client.lease(0, 1, [(2, 9)], [(7, 4, "broken")])
    line.grant()
    client.lease(1, 2)
    line.answer(
        LeasesGranted, epoch=1, leases=tuple(Given(ShardRef(one, "f", 0, 9, 9), 0) for one in (2, 3)), state="more"
    )
    line.hear(None)
    again: Any = line.said[-1]
    assert (again.granted, again.finished, again.returned) == (((2, 4),), (), ())
