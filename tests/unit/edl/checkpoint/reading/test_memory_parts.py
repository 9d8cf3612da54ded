"""A worker of another world reads parts through its agent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from edl.checkpoint.reading.assembly import LOCAL, OFFSET, SHAPE, Spread
from edl.checkpoint.reading.memory_parts import MemoryParts
from edl.checkpoint.reading.saved_parts import ReadRequest
from edl.errors import CheckpointError
from edl.wire import local, snapshot
from edl.wire.parts import PartHeader, encode_headers
from edl.worker import tree
from edl.worker.session import PeersLost
from edl.worker.state import headers_stream
from tests.support.fake_agent import JOB, TIMEOUT_S, Worker, a_seat


def part(shard: int, shards: int, values: bytes, offset: int, *, commit: int = 8) -> bytes:
    """A worker's snapshot: rows of a tensor of bytes, and the number of the worker."""
    kept = {"model": {"w": {LOCAL: bytearray(values), SHAPE: [8], OFFSET: [offset]}}}
    found, names, leaves = tree.walk(kept, lambda value: isinstance(value, bytearray), "")
    structure = {"objects": found, "values": {"worker": shard}}
    meta = snapshot.Meta(JOB, 3, commit, 1, shard, shards, "none")
    planned = snapshot.plan([(names[0], "U8", (len(values),), len(values))], meta, structure)
    return planned.header + bytes(leaves[0])


PARTS = [part(shard, 4, bytes([2 * shard, 2 * shard + 1]), 2 * shard) for shard in range(4)]
SEAT = a_seat(1, rank=1, world_size=2, restore_era=3, restore_commit=8, shards=4)


def headers(parts: list[bytes], near: tuple[int, ...] = ()) -> bytes:
    return encode_headers(
        [
            PartHeader(shard, len(data), int(shard not in near), data[: snapshot.header_bytes(data[:8])])
            for shard, data in enumerate(parts)
        ]
    )


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    made.agent.place(SEAT)
    made.link.wait_for_place()
    yield made
    made.close()


def opened(worker: Worker, parts: list[bytes] = PARTS) -> MemoryParts:
    content = headers(parts)
    worker.agent.send_memory(local.Piece(headers_stream(SEAT), len(content)), content)
    return MemoryParts(worker.link, SEAT, JOB)


def spread(parts: MemoryParts) -> Spread:
    found = parts.object("model", range(4), union=True)["w"]
    assert isinstance(found, Spread)
    return found


def test_a_worker_gets_the_pieces_that_it_needs(worker: Worker) -> None:
    parts = opened(worker)
    request, memory = ReadRequest.part_of(spread(parts), spread(parts).box)
    reading = threading.Thread(target=parts.fetch, args=([request],))
    reading.start()
    asked = worker.agent.expect(local.FetchRanges)
    assert (asked.era, asked.commit) == (3, 8)
    content = bytes(range(8))
    worker.agent.send_memory(local.Piece(asked.stream, len(content)), content)
    reading.join(TIMEOUT_S)
    assert bytes(memory) == content
    assert [one.values["worker"] for one in parts.parts(range(4))] == [0, 1, 2, 3]


def test_an_answer_to_an_earlier_round_is_not_taken(worker: Worker) -> None:
    old = a_seat(0, shards=4)
    content = headers(PARTS[:1])
    worker.agent.send_memory(local.Piece(headers_stream(old), len(content)), content)
    assert len(opened(worker).parts(range(4))) == 4


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (part(2, 4, b"xx", 4, commit=7), r"shard 2 of commit 8 \(era 3\): received .*\(3, 7, 2\)"),
        (part(1, 4, b"xx", 4), r"shard 2 of commit 8 \(era 3\): received .*\(3, 8, 1\)"),
        (b"\x10\0\0\0\0\0\0\0" + b"{" * 16, "header"),
    ],
)
def test_a_part_of_another_commit_or_worker_is_refused(worker: Worker, changed: bytes, said: str) -> None:
    parts = opened(worker, [*PARTS[:2], changed, PARTS[3]])
    with pytest.raises(CheckpointError, match=said):
        parts.parts(range(4))


def test_a_missing_header_is_refused(worker: Worker) -> None:
    parts = opened(worker, PARTS[:3])
    with pytest.raises(CheckpointError, match=r"commit 8 \(era 3\) came without the header of shard 3"):
        parts.parts(range(4))


def test_what_no_node_delivers_means_that_peers_are_lost(worker: Worker) -> None:
    worker.agent.send(local.NoPiece(headers_stream(SEAT), "node b: gone"))
    with pytest.raises(PeersLost, match=r"commit 8 \(era 3\) could not be fetched for rank 1: node b: gone"):
        MemoryParts(worker.link, SEAT, JOB)
    parts = opened(worker)
    request, _ = ReadRequest.part_of(spread(parts), spread(parts).box)
    errors: list[Any] = []

    def fetch() -> None:
        try:
            parts.fetch([request])
        except PeersLost as error:
            errors.append(error)

    reading = threading.Thread(target=fetch)
    reading.start()
    worker.agent.send(local.NoPiece(worker.agent.expect(local.FetchRanges).stream, "node c: gone"))
    reading.join(TIMEOUT_S)
    assert "node c: gone" in str(errors[0])
