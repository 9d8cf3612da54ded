"""The lease table of an epoch: each shard is pending, leased, done or quarantined.

It is large and therefore mutable: one byte per shard, and a few entries per leased one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from data_service.file_list import ListVersion
from data_service.leases.shard_order import FRESH, ShardOrder
from data_service.ledger import Ledger
from data_service.manifest import Manifest
from edl.master.service import Caller

BACK, LEASED, DONE, QUARANTINED = 1, 2, 3, 4
"""``FRESH`` and ``BACK`` are pending. ``BACK`` shards were begun or returned, and are granted first."""
PENDING = (FRESH, BACK)
RETRY_WAIT_S = 5.0
"""Seconds that a shard which a worker failed to read waits for another worker."""

_EIGHT = [bytes(DONE if byte >> bit & 1 else FRESH for bit in range(8)) for byte in range(256)]


@dataclass(slots=True)
class ReturnedShard:
    """A shard that was returned and is pending again."""

    since_s: float = 0.0
    failed: tuple[Caller, ...] = ()
    """Clients that failed to read it."""
    unreached: bool = False
    """The file was inaccessible: a client that failed only retries after a while, even if there is no other."""


class LeaseTable:
    """The leases of one epoch. Owns ``ledger``: the finished shards and the progress of begun ones."""

    __slots__ = ("_fresh", "_order", "_states", "back", "holders", "leases", "ledger", "manifest", "quarantined")

    def __init__(self, manifest: Manifest, ledger: Ledger, quarantined: Iterable[int] = ()) -> None:
        """Start from the position of ``ledger``, with nothing leased."""
        self.manifest = manifest
        self.ledger = ledger
        self.holders: dict[int, Caller] = {}
        self.leases: dict[Caller, dict[int, float]] = {}
        """Leased shards of each client, with the time of the grant."""
        self.back: dict[int, ReturnedShard] = {}
        self.quarantined = 0
        shards = ledger.shards
        self._states = bytearray(b"".join(map(_EIGHT.__getitem__, ledger.done))[:shards])
        self._fresh = shards - ledger.done_shards
        self._order = ShardOrder(shards, ledger.seed, ledger.epoch, ledger.shuffle, ledger.done_shards)
        for shard in quarantined:
            if shard < shards:
                self.quarantine(shard)
        for shard in ledger.partial:
            if self._states[shard] == FRESH:
                self._put_back(shard, ReturnedShard())

    @property
    def epoch(self) -> int:
        """The epoch of the ledger."""
        return self.ledger.epoch

    @property
    def pending(self) -> int:
        """Number of shards that can be granted."""
        return self._fresh + len(self.back)

    @property
    def finished(self) -> bool:
        """True if every shard is done or quarantined."""
        return self.ledger.done_shards + self.quarantined == len(self._states)

    def state(self, shard: int) -> int:
        """The state of a shard."""
        return self._states[shard]

    def undone(self, shards: Iterable[int]) -> list[int]:
        """Those of the given shards that are not done. Fast, because it is called with up to a million."""
        states = self._states
        return [shard for shard in shards if states[shard] != DONE]

    def grant(self, to: Caller, most: int, now_s: float, others: Collection[Caller] = ()) -> list[tuple[int, int]]:
        """Grant up to ``most`` pending shards; returns each with its number of consumed records.

        ``others``: other clients that could get a shard which this one has failed to read.
        """
        chosen: list[int] = []
        if self.back:
            for shard, returned in self.back.items():
                if len(chosen) == most:
                    break
                if self._suits(returned, to, now_s, others):
                    chosen.append(shard)
            for shard in chosen:
                del self.back[shard]
        states, order = self._states, self._order
        for _ in range(min(most - len(chosen), self._fresh)):
            shard = order.next(states)
            states[shard] = LEASED
            self._fresh -= 1
            chosen.append(shard)
        if not chosen:
            return []
        leased = self.leases.setdefault(to, {})
        count = self.ledger.partial.get
        for shard in chosen:
            states[shard] = LEASED
            self.holders[shard] = to
            leased[shard] = now_s
        return [(shard, count(shard, 0)) for shard in chosen]

    def hold(self, by: Caller, shard: int, now_s: float) -> str:
        """Accept a client's statement that it holds a shard. Returns why it does not; "" if it does or the shard is
        done."""
        state = self._states[shard]
        holder = self.holders.get(shard)
        if state == DONE or holder == by:
            return ""
        if holder is not None or state == QUARANTINED:
            return self.whose(shard, by)
        self._unqueue(shard)
        self._states[shard] = LEASED
        self.holders[shard] = by
        self.leases.setdefault(by, {})[shard] = now_s
        return ""

    def take(self, by: Caller, shard: int, upto: int, complete: bool) -> tuple[int, str]:
        """Count records of a client's shard as consumed. Returns the number of new ones, and the reason if nothing
        counts.

        Repeating an earlier report is not an error.
        """
        if self.holders.get(shard) != by:
            return 0, self.whose(shard, by)
        before = self.ledger.count(shard)
        if upto < before and complete:
            return 0, f"shard {shard} cannot end at record {upto}: {before} of its records are consumed"
        new = self.ledger.take(shard, max(upto, before), complete)
        if complete:
            self._states[shard] = DONE
            self._let_go(shard)
        return new, ""

    def finish_many(
        self, by: Caller, finished: Iterable[tuple[int, int]], exact: bool
    ) -> tuple[int, int, list[tuple[int, int]]]:
        """Finish whole shards, given with their numbers of records; ``exact``: verify these numbers.

        Handles only the common case. Shards that were begun or do not match are returned. Returns new records, new
        shards, and the remaining ones.
        """
        ledger, states, holders, leased = self.ledger, self._states, self.holders, self.leases.get(by)
        done, partial, count = ledger.done, ledger.partial, self.manifest.count
        new = shards = 0
        rest = []
        for shard, records in finished:
            if (
                holders.get(shard) is not by
                or leased is None
                or shard in partial
                or (exact and count(shard) != records)
            ):
                rest.append((shard, records))
                continue
            done[shard >> 3] |= 1 << (shard & 7)
            states[shard] = DONE
            del holders[shard], leased[shard]
            new += records
            shards += 1
        ledger.done_shards += shards
        ledger.records += new
        return new, shards, rest

    def extend(self, manifest: Manifest, version: ListVersion) -> None:
        """Files have joined this epoch: their shards can be granted from now on."""
        ledger, before = self.ledger, len(self._states)
        self.manifest = manifest
        ledger.extend(version.shards, version.digest)
        self._states.extend(bytes([FRESH]) * (version.shards - before))
        self._fresh += version.shards - before
        self._order = ShardOrder(version.shards, ledger.seed, ledger.epoch, ledger.shuffle)

    def put_back(self, shard: int, now_s: float, failed: tuple[Caller, ...] = (), *, unreached: bool = False) -> None:
        """Return a leased shard to pending, or note of a pending one who failed to read it."""
        if self._states[shard] == LEASED:
            self._let_go(shard)
        self._put_back(shard, ReturnedShard(now_s, failed, unreached))

    def release(self, holder: Caller, now_s: float, but: Collection[int] = ()) -> int:
        """Return a client's shards to pending, except ``but``. Returns their number."""
        shards = [shard for shard in self.leases.get(holder, ()) if shard not in but]
        for shard in shards:
            self.put_back(shard, now_s)
        return len(shards)

    def raise_count(self, shard: int, upto: int) -> None:
        """Raise the number of consumed records of a pending shard."""
        if self._states[shard] in PENDING and upto > self.ledger.count(shard):
            self.ledger.take(shard, upto, False)
            if self._states[shard] == FRESH:
                self._put_back(shard, ReturnedShard())

    def quarantine(self, shard: int) -> None:
        """Exclude a shard from further grants. A finished shard stays done."""
        state = self._states[shard]
        if state in (DONE, QUARANTINED):
            return
        if state == LEASED:
            self._let_go(shard)
        else:
            self._unqueue(shard)
        self._states[shard] = QUARANTINED
        self.quarantined += 1

    def whose(self, shard: int, caller: Caller) -> str:
        """Reason why a shard is not leased to a caller, as text."""
        if not 0 <= shard < len(self._states):
            return f"there is no shard {shard}; there are {len(self._states)}"
        state = self._states[shard]
        if state == LEASED:
            return f"shard {shard} is leased to {who(self.holders[shard])}, not to {who(caller)}"
        where = {DONE: "done", QUARANTINED: "quarantined"}.get(state, "pending")
        return f"shard {shard} is {where}, not leased to {who(caller)}"

    def _suits(self, returned: ReturnedShard, to: Caller, now_s: float, others: Collection[Caller]) -> bool:
        if to not in returned.failed or now_s - returned.since_s >= RETRY_WAIT_S:
            return True
        return not returned.unreached and all(other in returned.failed for other in others)

    def _put_back(self, shard: int, returned: ReturnedShard) -> None:
        if self._states[shard] == FRESH:
            self._fresh -= 1
        self._states[shard] = BACK
        self.back[shard] = returned

    def _unqueue(self, shard: int) -> None:
        """Remove a pending shard from its queue."""
        if self.back.pop(shard, None) is None:
            self._fresh -= 1

    def _let_go(self, shard: int) -> None:
        leased = self.leases[self.holders.pop(shard)]
        del leased[shard]


def who(caller: Caller) -> str:
    """A caller as text: slot and node."""
    return f"worker {caller.slot} on {caller.node}"
