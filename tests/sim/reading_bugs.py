"""Bugs planted around data leases: in the client of the loader, and in the machine that the Master hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from data_service.leases import consumption, file_additions, grants, independent
from data_service.leases.lease_table import LeaseTable
from data_service.leases.state import ClientState, DataSet, LeaseTurn
from data_service.loader import replay, trainers
from data_service.loader.lease_client import LeaseClient
from data_service.protocol.messages import DataRefused, Opened
from edl.master.service import Caller, WakeAt
from ps.intents import Intent, Intents, home

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]


def asks_a_new_master_nothing(patch: Patch) -> None:
    """A request that was under way when the Master changed is not sent again."""
    patch.setattr(LeaseClient, "_say_again", lambda self: None)


def takes_late_answers(patch: Patch) -> None:
    """An answer counts for the request that waits now, whichever it is for: those of repeated requests count twice."""
    answered = LeaseClient._answered

    def takes(self: LeaseClient, message: Any) -> None:
        asked = self._sent
        if asked is not None:
            object.__setattr__(message, "id", asked.message.id)
        answered(self, message)

    patch.setattr(LeaseClient, "_answered", takes)


def gives_up_what_is_asked(patch: Patch) -> None:
    """A stale answer, of a round that is over, ends the client for good, also one that outlives rounds."""
    answered = LeaseClient._answered

    def ends(self: LeaseClient, message: Any) -> None:
        if isinstance(message, DataRefused) and message.kind == "stale":
            self._closed = True
        answered(self, message)

    patch.setattr(LeaseClient, "_answered", ends)


def loses_what_is_queued(patch: Patch) -> None:
    """With a new Master, requests that have not been sent yet go away."""
    again = LeaseClient._say_again

    def loses(self: LeaseClient) -> None:
        self._queue.clear()
        again(self)

    patch.setattr(LeaseClient, "_say_again", loses)


def believes_old_numbers(patch: Patch) -> None:
    """A new Master's number of what is stored is compared with numbers that the last Master gave."""
    remember = LeaseClient._remember

    def remembers(self: LeaseClient, request: Any, message: Any) -> None:
        before = self._unkept
        remember(self, request, message)
        if isinstance(message, Opened):
            self._unkept = [(number, ack) for number, ack in before if not number or number > message.kept]

    patch.setattr(LeaseClient, "_remember", remembers)


def never_waits(patch: Patch) -> None:
    """A new Master gives out shards before everybody has said what it has."""
    patch.setattr(grants, "is_open", lambda data, turn: data.table is not None)


def believes_nobody(patch: Patch) -> None:
    """A new Master takes no notice of what workers say that they have."""
    patch.setattr(LeaseTable, "hold", lambda self, by, shard, now_s: "")


def reads_on_from_the_start(patch: Patch) -> None:
    """A begun shard is given out as if it were not."""
    grant = LeaseTable.grant

    def granted(self: LeaseTable, *args: object) -> list[tuple[int, int]]:
        return [(shard, 0) for shard, _ in grant(self, *args)]  # type: ignore[arg-type]

    patch.setattr(LeaseTable, "grant", granted)


def keeps_lost_leases(patch: Patch) -> None:
    """A lease whose answer was lost stays with who never heard of it."""
    patch.setattr(LeaseTable, "release", lambda self, holder, now_s, but=(): 0)


def leaves_nothing_out(patch: Patch) -> None:
    """A shard that nobody can read goes round and round."""
    patch.setattr(grants, "_quarantine", lambda data, turn, table, shard, attempts: None)


def tells_nobody(patch: Patch) -> None:
    """Shards are left out silently."""
    patch.setattr(grants, "flaw", lambda data: WakeAt(1e9))


def drops_what_is_held(patch: Patch) -> None:
    """An epoch is over when nothing is pending."""
    patch.setattr(LeaseTable, "finished", property(lambda self: self.pending == 0))


def forgets_what_was_added(patch: Patch) -> None:
    """Files that have joined are not kept: the next Master does not know them."""
    patch.setattr(file_additions, "load", lambda data, kept: None)


def joins_in_name_only(patch: Patch) -> None:
    """Files are in the list of the epoch, and nobody gives them out."""
    patch.setattr(file_additions, "extend", lambda data: None)


def trusts_who_opens(patch: Patch) -> None:
    """A process keeps what its slot had leased, though it has taken the place of another or comes from before a
    rollback."""

    def opened(data: DataSet, turn: LeaseTurn, caller: Caller, client: ClientState, word: Any) -> object:
        refused = independent._claims(data, turn, data.position, caller, word)
        data.independent.awaited.discard(caller)
        data.independent.callers.add(caller)
        client.heard_s = turn.now_s
        return consumption.opened(data, word.id, data.position.epoch, refused)

    patch.setattr(independent, "open_", opened)


# --- records of pushes ------------------------------------------------------------------------------------------------


def fences_nobody(patch: Patch) -> None:
    """A lost trainer whose records others have taken over may still push."""
    patch.setattr(Intents, "fence", lambda self, trainer: self.of(home(trainer)).get(trainer, Intent()))


def redoes_nothing(patch: Patch) -> None:
    """The last push of a lost trainer is not repeated."""
    patch.setattr(trainers, "decode", lambda *_: None)


def redoes_under_another_number(patch: Patch) -> None:
    """A push is repeated under a number that it did not have."""
    real = replay.decode

    def changed(text: str, dataset: str, epoch: int, trainer: int, seq: int) -> Any:
        return real(text, dataset, epoch, trainer, seq + 1)

    patch.setattr(trainers, "decode", changed)


FIRST: list[tuple[Bug, int]] = [
    (asks_a_new_master_nothing, 11),
    (takes_late_answers, 14),
    (gives_up_what_is_asked, 2),
    (loses_what_is_queued, 20),
    (never_waits, 43),
    (believes_nobody, 51),
    (reads_on_from_the_start, 4),
    (reads_on_from_the_start, 14),
    (keeps_lost_leases, 11),
    (leaves_nothing_out, 19),
    (tells_nobody, 10),
    (drops_what_is_held, 8),
    (forgets_what_was_added, 50),
    (joins_in_name_only, 50),
    (trusts_who_opens, 8),
    (fences_nobody, 413),
    (believes_old_numbers, 92),
    (redoes_nothing, 41),
    (redoes_under_another_number, 56),
]
"""Each with a schedule that is known to find it."""
