"""Which slots are struck, and what is kept of that."""

from __future__ import annotations

import dataclasses

import pytest

from edl.master.policies.slots import (
    AFRESH_S,
    KEPT,
    Dropped,
    DroppedBy,
    Strike,
    against,
    counted,
    culprit,
    drop_of,
    is_same,
    newest,
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
