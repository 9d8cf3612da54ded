"""Which slots are struck, and what is kept of that."""

from __future__ import annotations

import dataclasses
import random

import pytest

from edl.config import Replicas
from edl.master.policies.slots import (
    AFRESH_S,
    KEPT,
    Dropped,
    DroppedBy,
    KnownDrops,
    Strike,
    against,
    counted,
    culprit,
    drop_of,
    is_same,
    meant,
    newest,
    places,
    slot_in,
    struck,
    trained,
)
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.records import Failure, NodeInfo

A = NodeInfo(NodeId("a"), Incarnation(1), "host-a", 1, 4, host_id="id-a")


def failure(slot: int, *, local_rank: int = 0, exit_code: int = 3, peer_loss: bool = False) -> Failure:
    return Failure(A.node, Round(1), Rank(0), local_rank, exit_code, "ended", peer_loss=peer_loss, slot=slot)


def dropped(slot: int, by: DroppedBy = DroppedBy.JOB, strike: Strike | None = None) -> Dropped:
    return drop_of(A, slot, "why", Round(1), by, strike)


def test_a_drop_names_node_host_and_slot() -> None:
    one = dropped(2)
    assert (one.node, one.host, one.slot, one.host_id, one.round) == ("a", "host-a", 2, "id-a", 1)


def test_only_the_newest_drops_are_kept_but_all_of_the_denylist() -> None:
    denied = [dropped(slot, DroppedBy.DENYLIST) for slot in range(3)]
    others = [dropped(slot, DroppedBy.HAND) for slot in range(KEPT + 2)]
    assert newest([denied[0], others[0], denied[1], *others[1:], denied[2]], {A.node}) == (
        *denied[:2], *others[2:], denied[2]
    )  # fmt: skip


def test_of_absent_nodes_on_the_denylist_the_newest_are_kept() -> None:
    denied = [dropped(slot, DroppedBy.DENYLIST) for slot in range(KEPT + 2)]
    by_hand = dropped(0, DroppedBy.HAND)
    assert newest([by_hand, *denied], ()) == (by_hand, *denied[2:])
    assert newest([by_hand, *denied], {A.node}) == (by_hand, *denied)


def test_an_index_of_drops_finds_what_a_search_of_all_finds() -> None:
    rng = random.Random(0)
    found = set()
    for _ in range(500):
        devices = tuple(rng.choice(["", f"GPU-{slot}"]) for slot in range(4))
        info = dataclasses.replace(A, slots=3, spare_slots=1, devices=rng.choice([(), devices]))
        drops = [
            dataclasses.replace(
                dropped(rng.randrange(5)),
                node=NodeId(rng.choice("ab")),
                device=rng.choice(["", f"GPU-{rng.randrange(5)}"]),
            )
            for _ in range(rng.randrange(5))
        ]
        usable_slots = [slot for slot in range(4) if not any(is_same(one, info, slot) for one in drops)]
        expected = tuple(usable_slots[:3])
        assert KnownDrops(drops).places(info, Replicas()) == places(drops, info, Replicas()) == expected
        found.add(expected)
    assert len(found) > 8


def test_what_is_undone_goes_by_node_and_by_number_or_device() -> None:
    one, other = dataclasses.replace(dropped(1), device="GPU-1,gpu-2"), dropped(3)
    far = dataclasses.replace(dropped(1), node=NodeId("b"))
    drops = [one, far, other]
    here = dataclasses.replace(A, slots=4, devices=("GPU-0", "GPU-1,gpu-2", "", ""))
    for info in (None, here):  # also of a node that is absent
        assert meant(drops, info, "a", "") == (one, other)
        for device in ("1", "gpu-1", "GPU-2"):
            assert meant(drops, info, "a", device) == (one,)
        assert meant(drops, info, "a", "3") == (other,)
        for device in ("0", "7", "GPU-0", "GPU-9", ","):
            assert meant(drops, info, "a", device) == ()
    assert meant(drops, None, "b", "") == (far,)


def test_a_device_that_is_on_another_node_now_is_undone_where_it_was_dropped() -> None:
    moved = dataclasses.replace(dropped(1), node=NodeId("b"), device="GPU-1")
    here = dataclasses.replace(A, slots=2, devices=("GPU-0", "GPU-1"))
    assert meant([moved], here, "a", "GPU-1") == (moved,)
    assert meant([moved], dataclasses.replace(here, devices=()), "b", "GPU-1") == (moved,)


@pytest.mark.parametrize(("slot", "local_rank", "found"), [(0, 1, 0), (1, 0, 1), (-1, 2, 2)])
def test_a_failure_that_names_no_slot_happened_in_that_of_its_local_rank(
    slot: int, local_rank: int, found: int
) -> None:
    assert slot_in(failure(slot, local_rank=local_rank)) == found


def test_who_hangs_or_has_lost_a_peer_is_not_to_blame() -> None:
    own, hanging, bereft = failure(1), failure(2, exit_code=0), failure(3, peer_loss=True)
    assert culprit([hanging, bereft, own]) == own
    assert culprit([hanging]) is culprit([bereft]) is None
    assert culprit([own, failure(2)]) is None, "then it is the script"


def test_strikes_of_a_slot_add_up_until_it_has_trained_long_enough() -> None:
    strikes, first = struck((), A, 1, Rank(5))
    assert first == Strike(A.node, 1, "", 1, ranks=(Rank(5),))
    strikes, second = struck((*strikes, Strike(A.node, 2, "", 7)), A, 1, Rank(5))
    assert second == Strike(A.node, 1, "", 2, ranks=(Rank(5),)), "each rank is named once"
    assert strikes == (Strike(A.node, 2, "", 7), second)
    strikes = trained(strikes, [(A, (1, 3))], AFRESH_S)
    assert [(one.slot, one.trained_s) for one in strikes] == [(2, 0.0), (1, AFRESH_S)], "slot 2 took no part"
    assert struck(strikes, A, 1, Rank(6))[1] == Strike(A.node, 1, "", 1, ranks=(Rank(6),))


def test_only_failures_that_still_count_excuse_others() -> None:
    one = Strike(A.node, 1, "", 2, ranks=(Rank(5),))
    elsewhere = Strike(A.node, 2, "", 1, ranks=(Rank(5),))
    assert against(one, counted([one, elsewhere], ())) == 1
    assert against(one, counted([one, dataclasses.replace(elsewhere, trained_s=AFRESH_S)], ())) == 2
    assert against(one, counted([one], [dropped(2, strike=elsewhere)])) == 1, "also those of a dropped slot"


def test_a_known_device_is_the_same_wherever_it_is_and_an_unknown_one_where_it_was() -> None:
    here = dataclasses.replace(A, devices=("GPU-0", "GPU-1"))
    assert is_same(Strike(NodeId("b"), 3, "GPU-1", 1), here, 1)
    assert not is_same(Strike(A.node, 1, "GPU-9", 1), here, 1)
    assert is_same(Strike(A.node, 1, "", 1), here, 1) and is_same(Strike(A.node, 1, "GPU-1", 1), A, 1)
    assert not is_same(Strike(A.node, 1, "", 1), here, 0)
