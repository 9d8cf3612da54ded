"""Random histories of data sets on the real machine: what was committed, record by record; and that it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from data_service.leases import consumption, file_additions, grants, independent, machine
from data_service.leases.lease_table import LeaseTable
from data_service.leases.state import ClientState, DataSet, LeaseTurn
from edl.errors import DataError
from edl.master.service import Caller, WakeAt
from tests.sim.lease_free import FreeSim
from tests.sim.lease_net import Violation
from tests.sim.lease_world import GrowingSim, StepsSim

BATCH = 60
BATCHES = 4
SOAK = 10_000
Sim = StepsSim | FreeSim
SIMS: dict[str, Callable[[int], Sim]] = {"steps": StepsSim, "growing": GrowingSim, "free": FreeSim}
KNOWN = [
    ("steps", 86),  # a restarted process used the number of the one before it, and got that one's answer
    ("free", 54),  # a failure that was reported while leases had to wait
    ("free", 84),  # woken at the very time of a deadline, again and again
]


def play(mode: str, seed: int) -> Sim:
    sim = SIMS[mode](seed)
    try:
        sim.play()
    except Exception as error:  # noqa: BLE001 - whatever it is, the seed must be told
        module = type(sim).__module__
        name = type(sim).__name__
        pytest.fail(
            f'replay with: python -c "from {module} import {name}; {name}({seed}).play()"\n'
            f"{type(error).__name__}: {error}",
            pytrace=False,
        )
    return sim


@pytest.mark.parametrize(("mode", "seed"), KNOWN)
def test_known_seed(mode: str, seed: int) -> None:
    play(mode, seed)


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("mode", SIMS)
def test_histories(mode: str, batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        play(mode, seed)


@pytest.mark.soak
@pytest.mark.parametrize("mode", SIMS)
def test_many_histories(mode: str) -> None:
    for seed in range(SOAK):
        play(mode, seed)


def test_histories_meet_what_they_are_for() -> None:
    steps = [play("steps", seed) for seed in range(60)]
    trainers = [play("free", seed) for seed in range(60)]
    both = [sim.shell for sim in (*steps, *trainers)]
    assert sum(shell.lives > 1 for shell in both) > 25, "Masters are replaced"
    assert sum(bool(shell.flaws) for shell in both) > 25, "shards are left out"
    assert sum(sim.round > 2 for sim in steps) > 12
    assert sum(bool(sim.dropped) for sim in steps if isinstance(sim, StepsSim)) > 2
    assert sum(len(sim.names) > 0 for sim in trainers if isinstance(sim, FreeSim)) > 12
    notes = [note for shell in both for note in shell.notes]
    for story in (
        "rolled back to position",
        "has not reported on its leases",
        "by its rule",
        "is skipped from now",
    ):
        assert any(story in note for note in notes), story


# --- planted defects: the histories find each of them ----------------------------------------------------------------


def found(mode: str, most: int = 300) -> bool:
    """A history among these goes wrong."""
    for seed in range(most):
        try:
            SIMS[mode](seed).play()
        except (Violation, AssertionError, DataError, LookupError):
            return True
    return False


Plant = Callable[[pytest.MonkeyPatch], None]


def never_waits(patch: pytest.MonkeyPatch) -> None:
    """A new Master gives out shards before everybody has said what it has."""
    patch.setattr(grants, "is_open", lambda data, turn: data.table is not None)


def believes_nobody(patch: pytest.MonkeyPatch) -> None:
    """A new Master takes no notice of what workers say that they have."""
    patch.setattr(LeaseTable, "hold", lambda self, by, shard, now_s: "")


def reads_on_from_the_start(patch: pytest.MonkeyPatch) -> None:
    """A begun shard is given out as if it were not."""
    grant = LeaseTable.grant

    def granted(self: LeaseTable, *args: object) -> list[tuple[int, int]]:
        return [(shard, 0) for shard, _ in grant(self, *args)]  # type: ignore[arg-type]

    patch.setattr(LeaseTable, "grant", granted)


def does_it_again(patch: pytest.MonkeyPatch) -> None:
    """A request that is said twice is done twice."""
    request = machine.LeaseMachine._request

    def asked(
        self: machine.LeaseMachine, turn: LeaseTurn, data: DataSet, caller: Caller, client: ClientState, word: object
    ) -> None:
        request(self, turn, data, caller, client, word)  # type: ignore[arg-type]
        client.last = -1

    patch.setattr(machine.LeaseMachine, "_request", asked)


def keeps_lost_leases(patch: pytest.MonkeyPatch) -> None:
    """A lease whose answer was lost stays with who never heard of it."""
    patch.setattr(LeaseTable, "release", lambda self, holder, now_s, but=(): 0)


def leaves_nothing_out(patch: pytest.MonkeyPatch) -> None:
    """A shard that nobody can read goes round and round."""
    patch.setattr(grants, "_quarantine", lambda data, turn, table, shard, attempts: None)


def tells_nobody(patch: pytest.MonkeyPatch) -> None:
    """Shards are left out silently."""
    patch.setattr(grants, "flaw", lambda data: WakeAt(1e9))


def drops_what_is_held(patch: pytest.MonkeyPatch) -> None:
    """An epoch is over when nothing is pending."""
    patch.setattr(LeaseTable, "finished", property(lambda self: self.pending == 0))


def takes_anybodys_word(patch: pytest.MonkeyPatch) -> None:
    """An acknowledgement counts whoever has the shard."""
    take = LeaseTable.take

    def taken(self: LeaseTable, by: Caller, shard: int, upto: int, complete: bool) -> tuple[int, str]:
        return take(self, self.holders.get(shard, by), shard, upto, complete)

    patch.setattr(LeaseTable, "take", taken)


def has_no_fence(patch: pytest.MonkeyPatch) -> None:
    """After a rollback, what was leased before it still counts."""

    def opened(data: DataSet, turn: LeaseTurn, caller: Caller, client: ClientState, word: object) -> object:
        refused = independent._claims(data, turn, data.position, caller, word)  # type: ignore[arg-type]
        data.independent.awaited.discard(caller)
        data.independent.callers.add(caller)
        client.heard_s = turn.now_s
        return consumption.opened(data, word.id, data.position.epoch, refused)  # type: ignore[attr-defined]

    patch.setattr(independent, "open_", opened)


def never_gives_up(patch: pytest.MonkeyPatch) -> None:
    """The shards of a silent or dead trainer stay with it."""
    patch.setattr(independent, "silence_s", lambda data: 1e9)
    patch.setattr(independent, "world_began", lambda data, turn: None)


def forgets_what_was_added(patch: pytest.MonkeyPatch) -> None:
    """Files that have joined are not kept: the next Master does not know them."""
    patch.setattr(file_additions, "load", lambda data, kept: None)


def joins_in_name_only(patch: pytest.MonkeyPatch) -> None:
    """Files are in the list of the epoch, and nobody gives them out."""
    patch.setattr(file_additions, "extend", lambda data: None)


@pytest.mark.parametrize(
    ("mode", "plant"),
    [
        ("growing", forgets_what_was_added),
        ("growing", joins_in_name_only),
        ("steps", never_waits),
        ("steps", believes_nobody),
        ("steps", reads_on_from_the_start),
        ("steps", does_it_again),
        ("steps", keeps_lost_leases),
        ("steps", leaves_nothing_out),
        ("steps", tells_nobody),
        ("free", takes_anybodys_word),
        ("free", has_no_fence),
        ("free", never_gives_up),
        ("free", reads_on_from_the_start),
        ("free", drops_what_is_held),
    ],
)
def test_planted_defect_is_found(mode: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert found(mode), plant.__doc__
