"""CPU microseconds to encode and to decode one message of each kind: ``python -m benchmarks.messages``.

The best of seven runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from data_service.manifest import ShardRef
from data_service.protocol import messages as data
from edl.config import JobSpec, NodeRange
from edl.types import Incarnation, JobId, NodeId, Rank, Round
from edl.wire import local, plain
from edl.wire.records import Member, World
from ps.protocol import messages as ps
from ps.spec import BUCKETS

RUNS, RUN_S = 7, 0.03


def cases() -> list[tuple[str, Any, Callable[[Any], Any], Callable[[Any], Any]]]:
    """Name, message, how it is encoded and decoded."""
    members = tuple(
        Member(NodeId(f"node-{i}"), Incarnation(2**42 + i), f"10.0.{i >> 8}.{i & 255}", 8, Rank(8 * i), PORTS)
        for i in range(1000)
    )
    leases = tuple(
        data.Given(ShardRef(i, f"/data/part-{i // 10}.parquet", i, i + 100, 100, 2**20), 0) for i in range(1000)
    )
    servers = tuple(ps.PserverAddress(i, f"pserver-{i}", "10.0.0.1", 4000 + i) for i in range(8))
    owner = ps.pack([1] * BUCKETS)
    placement = ps.PlacementMap(3, 1, servers, owner, owner, owner)
    trainers = tuple(ps.TrainerMember(i, f"node-{i}/0") for i in range(64))
    return [
        (
            "job's settings",
            JobSpec(JobId("job"), NodeRange(2, 8, 2)),
            plain.dumps,
            lambda text: plain.loads(JobSpec, text),
        ),
        ("world of 1,000 nodes", World(Round(4), members, 1), plain.dumps, lambda text: plain.loads(World, text)),
        (
            "worker's commit",
            local.Committed("state", 1, 2**30, 3, 120, 0, 1, True),
            local.encode_to_agent,
            local.decode_to_agent,
        ),
        ("1,000 leases", data.LeasesGranted(7, "train", 1, leases, "more"), data.encode, data.decode),
        ("acknowledgement", data.Ack(7, "train", 1, ((1, 100, True), (2, 50, False))), data.encode, data.decode),
        ("placement, 64 trainers", ps.PlacementUpdate(7, placement, 3, trainers), ps.encode, ps.decode),
    ]


PORTS = tuple(range(40_000, 40_008))


def best_us(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    times: list[float] = []
    calls = 1
    while len(times) < RUNS:
        begin_s = time.process_time()
        for _ in range(calls):
            call()
        took_s = time.process_time() - begin_s
        if took_s < RUN_S:
            calls *= 2
        else:
            times.append(took_s / calls * 1e6)
    return min(times)


def main() -> None:
    """Print the table."""
    print("| message | bytes | encode, µs | decode, µs |\n|---|---|---|---|")
    for name, message, encode, decode in cases():
        text = encode(message)
        assert decode(text) == message
        encode_us, decode_us = best_us(lambda: encode(message)), best_us(lambda: decode(text))  # noqa: B023 - called here
        print(f"| {name} | {len(text):,} | {encode_us:.1f} | {decode_us:.1f} |", flush=True)


if __name__ == "__main__":
    main()
