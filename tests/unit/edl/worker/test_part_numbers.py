"""Which workers share a part of a sharded commit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edl.wire import local, snapshot
from edl.wire.local import STATE
from edl.worker import part_numbers
from edl.worker.contents import OtherPart
from edl.worker.link import Link
from edl.worker.part_numbers import MOST_OTHERS, Claim, RankPart
from edl.worker.state import BaseState
from tests.support.fake_agent import JOB, FakeFramework, Worker, begin


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


HSDP = [(0, 2), (1, 3), (0, 2), (1, 3)]
"""Two replicas of two shards."""


def claims(ranks: Sequence[tuple[int, ...]], nodes: str, *digests: dict[str, str]) -> list[Claim]:
    """Claims of ranks on these nodes, one letter each."""
    given = digests or ({"step": "same"},) * len(ranks)
    return [Claim(one, digest, node) for one, digest, node in zip(ranks, given, nodes, strict=True)]


def test_replicas_share_parts() -> None:
    parts = part_numbers.number(claims(HSDP, "aabb"))
    assert [(one.number, one.parts, one.workers) for one in parts] == [(0, 2, 4), (1, 2, 4), (0, 2, 4), (1, 2, 4)]
    assert [one.others for one in parts] == [("b",), ("b",), ("a",), ("a",)]
    assert [one.copies for one in parts] == [True] * 4
    assert [one.saves for one in parts] == [True, True, False, False]


def test_one_worker_of_a_node_copies_a_part() -> None:
    parts = part_numbers.number(claims(HSDP, "aaaa"))
    assert [(one.copies, one.saves, one.others) for one in parts] == [(True, True, ())] * 2 + [(False, False, ())] * 2


def test_workers_without_replicas_have_parts_of_their_own() -> None:
    parts = part_numbers.number(claims([(0,), (1,), (2,)], "abc"))
    assert parts == [RankPart.of_rank(rank, 3) for rank in range(3)]


@pytest.mark.parametrize(
    "ranks",
    [[(0, 2), (1, 3), (2,), (1, 3)], [(0, 1, 2), (1, 3), (0, 2), (1, 3)], [(0, 9), (1, 3), (2,), (1, 3)], [(2,)] * 4],
    ids=["one does not agree", "they name different ranks", "no such rank", "not itself"],
)
def test_ranks_share_a_part_only_if_all_say_so(ranks: list[tuple[int, ...]]) -> None:
    parts = part_numbers.number(claims(ranks, "abcd"))
    assert parts[0].ranks == {0}
    assert (2 in parts[2].ranks) and 0 not in parts[2].ranks


def test_ranks_that_hold_different_values_share_nothing() -> None:
    digests: list[dict[str, str]] = [{"step": "1", "loss": str(rank % 3)} for rank in range(4)]
    made = claims([(0, 3), (1, 2), (1, 2), (0, 3)], "abcd", *digests)
    assert part_numbers.differing(made) == ("loss", 1, 2)
    parts = part_numbers.number(made)
    assert [sorted(one.ranks) for one in parts] == [[0, 3], [1], [2], [0, 3]]
    assert [one.number for one in parts] == [0, 1, 2, 0]


def test_many_replicas_name_some_others() -> None:
    everybody = tuple(range(100))
    made = [Claim(everybody, {}, f"node-{rank:02}") for rank in everybody]
    assert part_numbers.number(made)[0].others == tuple(f"node-{rank:02}" for rank in range(1, 1 + MOST_OTHERS))


def test_any_claims_give_whole_commits() -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        count = rng.randrange(1, 13)
        groups = [rng.randrange(3) for _ in range(count)]
        honest = [tuple(other for other in range(count) if groups[other] == groups[rank]) for rank in range(count)]
        made = [
            Claim(
                honest[rank] if rng.random() < 0.9 else tuple(sorted(rng.sample(range(count + 2), k=2))),
                {"x": rng.choice("aaaaab")},
                rng.choice("abcd"),
            )
            for rank in range(count)
        ]
        parts = part_numbers.number([part_numbers.decode(part_numbers.encode(one)) for one in made])
        assert {one.number for one in parts} == set(range(parts[0].parts))
        for rank, part in enumerate(parts):
            assert rank in part.ranks
            same = [other for other in range(count) if parts[other].number == part.number]
            assert set(same) == part.ranks
            assert len({(made[other].ranks, made[other].digests["x"]) for other in same}) == 1
            assert [other for other in same if parts[other].saves] == same[:1]
            for node in {made[other].node for other in same}:
                there = [other for other in same if made[other].node == node]
                assert [other for other in there if parts[other].copies] == there[:1]


# --- in a state ------------------------------------------------------------------------------------------------------


class Peers(FakeFramework):
    """Every collective is answered by ranks that say the same as this one, but for what a test changes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.answer: Callable[[Claim], list[Claim]] = lambda mine: [mine]

    def exchange(self, data: bytes) -> list[bytes]:
        if b'"ranks"' not in data:
            return [data]  # other collectives
        self.asked += 1
        return [part_numbers.encode(one) for one in self.answer(part_numbers.decode(data))]


class Replicated(BaseState):
    """Holds the same pieces as ``alike``."""

    def __init__(self, peers: Peers, alike: set[int], **values: Any) -> None:
        super().__init__(peers, values, sharded=True)
        self._alike = alike
        self._recuts = 0

    def _ranks_alike(self) -> frozenset[int]:
        return frozenset(self._alike)

    def _recut(self, link: Link, seat: local.Seat, job: str) -> None:
        self._recuts += 1


def hsdp(mine: Claim) -> list[Claim]:
    """What four ranks on two nodes say, of which this one is on node a."""
    return [replace(mine, ranks=ranks, node=node) for ranks, node in zip(HSDP, "aabb", strict=True)]


def said(worker: Worker) -> list[local.Committed]:
    worker.settle()
    return [one for one in worker.agent.said if isinstance(one, local.Committed)]


def test_workers_agree_once_in_a_world(worker: Worker) -> None:
    peers = Peers()
    peers.answer = hsdp
    state = Replicated(peers, {1, 3}, step=0)
    begin(worker, state, rank=3, local_rank=1, world_size=4, local_world_size=2, position=1, node="b")
    state.save()
    state.step = 1
    state.save()
    assert peers.asked == 1
    made = [(one.shard, one.shards, one.save, one.others) for one in said(worker)]
    assert made == [(1, 2, False, ("a",))] * 2, "the node of rank 1 writes it to the directory"
    meta = snapshot.parse(worker.agent.kept[STATE, 1, 2, 1], job=JOB).meta
    assert (meta.shard, meta.shards, meta.workers) == (1, 2, 4)


def test_a_vote_takes_back_the_part_that_was_made_in_this_world(worker: Worker) -> None:
    peers = Peers()
    peers.answer = hsdp
    state = Replicated(peers, {1, 3}, step=5)
    begin(worker, state, rank=3, local_rank=1, world_size=4, local_world_size=2, position=1, node="b")
    state.commit()
    assert worker.session.seat is not None
    seat = replace(worker.session.seat, restore_era=1, restore_commit=1)
    assert state._whole_part(seat) == 1
    assert state._whole_part(replace(seat, restore_era=0, shards=2)) is None, "of another world"
    assert state._whole_part(replace(seat, restore_era=0, shards=4)) == 3, "each had its own"


def test_a_value_that_differs_is_named(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    peers = Peers()
    peers.answer = lambda mine: [
        replace(one, digests={**one.digests, "loss": "other"}) if rank == 2 else one
        for rank, one in enumerate(hsdp(mine))
    ]
    state = Replicated(peers, {0, 2}, step=0, loss=0.5)
    begin(worker, state, world_size=4)
    state.commit()
    assert [(one.shard, one.shards, one.others) for one in said(worker)] == [(0, 3, ())]
    assert "ranks 0 and 2 hold the same pieces of the sharded tensors, but state.loss differs" in capfd.readouterr().err


def test_nothing_is_committed_once_ranks_hold_different_pieces(
    worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    peers = Peers()
    peers.answer = hsdp
    state = Replicated(peers, {0, 2}, step=0, more=None)
    begin(worker, state, world_size=4, node="a")
    state.commit()
    state.more = np.zeros(3)
    state.commit()
    state._alike = {0}
    state.commit()  # nothing was added since
    state.more = np.zeros(4)
    state.commit()
    assert [one.commit for one in said(worker)] == [1, 2, 3]
    assert "commits are not kept until the next world" in capfd.readouterr().err


def test_a_part_of_as_many_workers_is_not_taken_for_ones_own(worker: Worker) -> None:
    """The last world had four workers and two parts, this one has two workers."""
    peers = Peers()
    state = Replicated(peers, set(), step=5)
    meta = snapshot.Meta(JOB, 3, 8, 1, 1, 2, "numpy", 4)
    worker.agent.kept[STATE, 3, 8, 1] = plain(meta)
    begin(worker, state, rank=1, world_size=2, restore_era=3, restore_commit=8, shards=2)
    worker.agent.expect(local.FetchHeaders)
    assert state._recuts == 1
    asked = [type(one).__name__ for one in worker.agent.said if isinstance(one, (local.Fetch, local.FetchHeaders))]
    assert asked == ["Fetch", "FetchHeaders"]


def test_a_part_of_another_place_in_the_mesh_is_not_taken_for_ones_own(worker: Worker) -> None:
    """The last world had as many workers, and ``build`` has made another mesh of this one."""

    class Moved(Replicated):
        def _load(self, *_: Any) -> None:
            raise OtherPart("weight: saved as the part (2, 4) at (0, 0), now (4, 2) at (0, 0)")

    state = Moved(Peers(), set(), step=5)
    worker.agent.kept[STATE, 3, 8, 1] = plain(snapshot.Meta(JOB, 3, 8, 1, 1, 2, "numpy", 2))
    begin(worker, state, rank=1, world_size=2, restore_era=3, restore_commit=8, shards=2)
    worker.agent.expect(local.FetchHeaders)
    assert state._recuts == 1


def test_a_part_of_a_worker_with_other_objects_is_not_taken_for_ones_own(worker: Worker) -> None:
    """The last world had as many workers, and another stage of a pipeline was here."""
    state = Replicated(Peers(), set(), step=5, second=Counter())
    worker.agent.kept[STATE, 3, 8, 1] = plain(snapshot.Meta(JOB, 3, 8, 1, 1, 2, "numpy", 2), first={"count": 1})
    begin(worker, state, rank=1, world_size=2, restore_era=3, restore_commit=8, shards=2)
    worker.agent.expect(local.FetchHeaders)
    assert state._recuts == 1


class Counter:
    """An object of a stage."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def plain(meta: snapshot.Meta, **objects: dict[str, int]) -> bytes:
    """A part without arrays."""
    plan = snapshot.plan([], meta, {"objects": objects, "values": {"step": 5}})
    data = bytearray(plan.size)
    plan.write_header(memoryview(data))
    return bytes(data)
