"""Placement of buckets: the roles that pservers have, and the planning of moves. Pure; no messages, no time.

A bucket has an owner, at most one replica in sync (``backup``) and at most one being made (``joining``). A new owner
always has all data first: it is the backup, or ``joining`` once in sync (``heir``). It serves once the old owner, the
``giver``, has released the bucket; the old owner is then its backup. Until the new owner reports that it serves, no
push is acknowledged that the old owner lacks, in any mode of replication, so either of them may be lost. With
asynchronous replication (``lagging``) a backup may miss pushes; to become the owner it must also be ``joining`` until
it has caught up.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ps.protocol.messages import NO_PSERVER, RESTORE

REPAIR = 16
"""Missing replicas are created with this many times the concurrency of moves: until they exist, one more failure loses
rows. An image is only made when the stream has room for it, so this costs no memory; but a checkpoint waits until all
replicas that were started are complete."""


@dataclass(frozen=True, slots=True)
class Site:
    """A pserver as a target for buckets."""

    number: int
    machine: str
    active: bool
    """True if it may be given buckets: it is not leaving, and within the maximum number of pservers."""


class Grid:
    """The roles of every bucket. ``touched`` collects the buckets that have changed."""

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.owner = array("h", bytes(2 * buckets))
        self.backup = array("h", self.owner)
        self.joining = array("h", self.owner)
        self.giver = array("h", self.owner)
        self.heir = array("h", self.owner)
        """1 where ``joining`` will become the owner."""
        self.since = array("i", bytes(4 * buckets))
        self.touched: set[int] = set()

    def clear(self) -> None:
        """Leave every bucket without owner, replica and giver."""
        for bucket in range(self.buckets):
            self.put(bucket)

    def put(
        self, bucket: int, owner: int = 0, backup: int = 0, joining: int = 0, giver: int = 0, heir: bool = False
    ) -> None:
        """Set the roles of a bucket."""
        self.owner[bucket], self.backup[bucket], self.joining[bucket] = owner, backup, joining
        self.giver[bucket], self.heir[bucket] = giver, int(heir)
        self.touched.add(bucket)

    def join(self, bucket: int, number: int, heir: bool = False) -> None:
        """Start making a replica."""
        self.joining[bucket], self.heir[bucket] = number, int(heir)
        self.touched.add(bucket)

    def hand_over(self, bucket: int, heir: int) -> None:
        """Make ``heir``, which has all data, the owner and the old owner its backup."""
        old = self.owner[bucket]
        self.put(bucket, heir, old, NO_PSERVER if self.joining[bucket] == heir else self.joining[bucket], old)

    def stamp(self, version: int) -> None:
        """Record ``version`` as the last change of all touched buckets."""
        for bucket in self.touched:
            self.since[bucket] = version
        self.touched.clear()

    def is_settled(self, bucket: int) -> bool:
        """True if the bucket is neither moving nor being copied."""
        return not self.joining[bucket] and not self.giver[bucket]

    def roles(self, bucket: int) -> tuple[int, int, int, int]:
        """Owner, backup, joining, giver of a bucket."""
        return self.owner[bucket], self.backup[bucket], self.joining[bucket], self.giver[bucket]

    def in_motion(self) -> int:
        """Number of buckets that are moving or being copied."""
        return sum(1 for joining, giver in zip(self.joining, self.giver, strict=True) if joining or giver)

    def holders(self) -> set[int]:
        """Numbers of all pservers with any role."""
        return (set(self.owner) | set(self.backup) | set(self.joining) | set(self.giver)) - {NO_PSERVER, RESTORE}

    # --- reports of pservers -----------------------------------------------------------------------------------------

    def _current(self, buckets: Iterable[int], version: int) -> Iterator[int]:
        """The buckets that have not changed since ``version``."""
        return (bucket for bucket in buckets if version >= self.since[bucket] and bucket not in self.touched)

    def synced(self, owner: int, follower: int, version: int, buckets: Iterable[int], may_own: bool) -> None:
        """A replica is in sync: it becomes the owner if it was made for that, otherwise the backup."""
        for bucket in self._current(buckets, version):
            if self.owner[bucket] != owner or self.joining[bucket] != follower or self.giver[bucket]:
                continue
            if self.heir[bucket] and may_own:
                self.hand_over(bucket, follower)
            else:
                self.put(bucket, owner, follower)

    def unsynced(self, teller: int, follower: int, version: int, buckets: Iterable[int], copies: bool) -> None:
        """A replica is out of sync, or a giver reports that its release may not have reached the new owner. The giver
        then gets the bucket back: it is alive and has everything acknowledged, and the new owner may be dead."""
        for bucket in self._current(buckets, version):
            owner, backup, joining, giver = self.roles(bucket)
            if owner == teller and giver == follower:
                continue  # it notices itself whether the bucket has been released
            if owner == teller and backup == follower:
                self.put(bucket, owner, NO_PSERVER, joining or follower * copies, giver, bool(self.heir[bucket]))
            elif owner == teller and joining == follower:
                self.touched.add(bucket)
            elif giver == teller and owner == follower:
                self.put(bucket, giver, NO_PSERVER if backup == giver else backup, joining or owner * copies)

    def took(self, owner: int, version: int, buckets: Iterable[int], copies: bool) -> None:
        """The owner now serves buckets that were released to it or loaded."""
        for bucket in self._current(buckets, version):
            if self.owner[bucket] == owner and self.giver[bucket]:
                self.put(bucket, owner, self.backup[bucket] * copies, self.joining[bucket], 0, bool(self.heir[bucket]))

    def spares(self, number: int, others: Collection[int]) -> bool:
        """True if the other pservers hold everything that this one holds."""
        if not others or not self.holders().intersection(others):
            return False
        owned = (bucket for bucket, owner in enumerate(self.owner) if owner == number)
        return all(self.backup[bucket] in others and self.giver[bucket] != RESTORE for bucket in owned)

    def lost_with(self, number: int) -> list[int]:
        """The buckets that would be lost with this pserver: no other one has all of their rows."""
        owned = (bucket for bucket, owner in enumerate(self.owner) if owner == number)
        return [bucket for bucket in owned if not self.backup[bucket] or self.giver[bucket] == RESTORE]

    def bury(self, number: int) -> list[int]:
        """Remove a dead pserver; replicas in sync become owners. Returns the lost buckets."""
        lost = []
        for bucket in range(self.buckets):
            owner, backup, joining, giver = self.roles(bucket)
            if number not in (owner, backup, joining, giver):
                continue
            left = joining if joining != number else NO_PSERVER
            if owner == number and backup and giver != RESTORE:
                self.put(bucket, backup, NO_PSERVER, left if left != backup else NO_PSERVER)
            elif owner == number:
                lost.append(bucket)
                self.put(bucket)
            else:
                kept = backup if backup != number else NO_PSERVER
                self.put(bucket, owner, kept, left, giver * (giver != number), bool(self.heir[bucket] and left))
        return lost


class Planner:
    """One planning pass over the grid. Starts as few moves as possible."""

    def __init__(self, grid: Grid, sites: Sequence[Site], copies: bool, motion: int, *, lagging: bool = False) -> None:
        """``motion``: most buckets in motion per pserver. ``lagging``: pushes do not wait for backups."""
        self.grid, self.copies, self._lagging = grid, copies, lagging
        self.machine = {site.number: site.machine for site in sites}
        self.active = sorted(site.number for site in sites if site.active)
        busy = dict.fromkeys(self.machine, 0)
        self._owned = dict.fromkeys(self.machine, 0)
        self._copied = dict.fromkeys(self.machine, 0)
        for bucket in range(grid.buckets):
            owner, backup, joining, giver = grid.roles(bucket)
            if joining or giver > NO_PSERVER:
                for number in {owner, joining, giver} & busy.keys():
                    busy[number] += 1
            if joining:
                backup, owner = (owner, joining) if grid.heir[bucket] else (joining, owner)
            if owner in self._owned:
                self._owned[owner] += 1
            if backup in self._copied:
                self._copied[backup] += 1
        self._room = _room(busy, motion)
        self._urgent = _room(busy, REPAIR * motion)
        """Remaining capacity for missing replicas."""
        self.moving = grid.in_motion()

    def run(self, heat: Mapping[int, float] | None = None) -> None:
        """Create missing replicas, then drain leaving pservers, then balance. ``heat``: keys served per bucket."""
        self._repair()
        self._drain()
        self._balance_owners()
        if self.copies and not self.moving:
            self._balance_copies()
        if heat and not self.moving and not self.grid.touched:
            self._spread(heat)

    # --- beginning ---------------------------------------------------------------------------------------------------

    def place_all(self, giver: int = NO_PSERVER) -> None:
        """Assign every bucket in even ranges; if there is no data to load yet, also start replicas."""
        count = len(self.active)
        for bucket in range(self.grid.buckets):
            owner = self.active[bucket * count // self.grid.buckets]
            self._owned[owner] += 1
            copy = self._other(owner) if self.copies and giver == NO_PSERVER else NO_PSERVER
            if copy:
                self._copied[copy] += 1
            self.grid.put(bucket, owner, NO_PSERVER, copy, giver)

    def place(self, buckets: Iterable[int], giver: int) -> None:
        """Assign owners to buckets that have none and are either empty or in the checkpoint."""
        for bucket in buckets:
            owner = min(self.active, key=self._owned.__getitem__)
            self._owned[owner] += 1
            self.grid.put(bucket, owner, giver=giver)

    # --- repair, drain -----------------------------------------------------------------------------------------------

    def _others(self, owner: int) -> list[int]:
        """Candidates for a replica: pservers on other hosts if there are any."""
        rest = [number for number in self.active if number != owner]
        return [number for number in rest if self.machine[number] != self.machine.get(owner)] or rest

    def _other(self, owner: int) -> int:
        return min(self._others(owner), key=self._copied.__getitem__, default=NO_PSERVER)

    def _start(self, bucket: int, number: int, heir: bool = False, room: dict[int, int] | None = None) -> bool:
        """Start a replica if both pservers have capacity for it."""
        owner, room = self.grid.owner[bucket], self._room if room is None else room
        if room.get(owner, 0) <= 0 or room[number] <= 0:
            return False
        for one in (self._room, self._urgent):
            one[owner] -= 1
            one[number] -= 1
        self.moving += 1
        self.grid.join(bucket, number, heir)
        return True

    def _swap(self, bucket: int) -> bool:
        """Swap owner and backup, which needs no copy; immediate if the backup has all data."""
        owner, backup = self.grid.owner[bucket], self.grid.backup[bucket]
        if self._room.get(owner, 0) <= 0 or self._room.get(backup, 0) <= 0:
            return False
        self._room[owner] -= 1
        self._room[backup] -= 1
        self.moving += 1
        self._owned[owner] -= 1
        self._owned[backup] += 1
        self._copied[backup] -= 1
        self._copied[owner] += 1
        if self._lagging:
            self.grid.join(bucket, backup, heir=True)
        else:
            self.grid.hand_over(bucket, backup)
        return True

    def _repair(self) -> None:
        if not self.copies or len(self.machine) < 2:
            return
        for bucket in range(self.grid.buckets):
            owner, backup, joining, giver = self.grid.roles(bucket)
            if not owner or backup or joining or giver:
                continue
            target = self._other(owner)
            if target and self._start(bucket, target, room=self._urgent):
                self._copied[target] += 1

    def _drain(self) -> None:
        active = set(self.active)
        if not active or active.issuperset(self.machine):
            return
        for bucket in range(self.grid.buckets):
            owner, backup = self.grid.owner[bucket], self.grid.backup[bucket]
            if not owner or not self.grid.is_settled(bucket):
                continue
            if owner not in active:
                if backup in active:
                    self._swap(bucket)
                else:
                    heir = min((one for one in active if one != backup), key=self._owned.__getitem__)
                    if self._start(bucket, heir, heir=True):
                        self._owned[owner] -= 1
                        self._owned[heir] += 1
            elif backup and backup not in active:
                target = self._other(owner)
                if not target:
                    self.grid.put(bucket, owner)
                elif self._start(bucket, target):
                    self._copied[backup] -= 1
                    self._copied[target] += 1

    # --- balance -----------------------------------------------------------------------------------------------------

    def _balance_owners(self) -> None:
        """Move buckets from the fullest to the emptiest pserver until they differ by at most one; swap roles where
        possible."""
        if len(self.active) < 2 or not self._uneven(self._owned):
            return
        by_owner: dict[int, list[int]] = {}
        for bucket in range(self.grid.buckets):
            if self.grid.is_settled(bucket):
                by_owner.setdefault(self.grid.owner[bucket], []).append(bucket)
        while self._uneven(self._owned):
            most = max(self.active, key=self._owned.__getitem__)
            least = min(self.active, key=self._owned.__getitem__)
            mine = by_owner.get(most, [])
            bucket = next((one for one in mine if self.grid.backup[one] == least), -1)
            if bucket >= 0:
                moved = self._swap(bucket)
            else:
                bucket = mine[-1] if mine else -1
                moved = bucket >= 0 and self._start(bucket, least, heir=True)
                if moved:
                    self._owned[most] -= 1
                    self._owned[least] += 1
            if not moved:
                return
            mine.remove(bucket)

    def _uneven(self, counts: Mapping[int, int]) -> bool:
        held = [counts[number] for number in self.active]
        return max(held) - min(held) > 1

    def _balance_copies(self) -> None:
        """Move replicas to hosts other than their owner's and balance their number among the eligible pservers."""
        if len(self.active) < 2:
            return
        others = {owner: self._others(owner) for owner in self.active}
        for bucket in range(self.grid.buckets):
            owner, backup = self.grid.owner[bucket], self.grid.backup[bucket]
            if owner not in others or not backup or not self.grid.is_settled(bucket):
                continue
            target = min(others[owner], key=self._copied.__getitem__)
            wrong = backup not in others[owner]
            if target != backup and (wrong or self._copied[backup] - self._copied[target] > 1):
                if not self._start(bucket, target):
                    continue
                self._copied[backup] -= 1
                self._copied[target] += 1

    def _spread(self, heat: Mapping[int, float]) -> None:
        """Move the hottest suitable bucket to the coolest pserver; a cold one returns in exchange."""
        if len(self.active) < 2:
            return
        load = dict.fromkeys(self.active, 0.0)
        for bucket, keys in heat.items():
            if self.grid.owner[bucket] in load:
                load[self.grid.owner[bucket]] += keys
        most, least = max(load, key=load.__getitem__), min(load, key=load.__getitem__)
        gap = load[most] - load[least]
        if gap <= 0.25 * load[most]:
            return
        mine = sorted(
            (bucket for bucket in heat if self.grid.owner[bucket] == most), key=heat.__getitem__, reverse=True
        )
        for bucket in mine:
            if 0 < heat[bucket] < 0.9 * gap:
                if self.grid.backup[bucket] == least:
                    self._swap(bucket)
                else:
                    self._start(bucket, least, heir=True)
                self._give_back(most, least, heat)
                return

    def _give_back(self, most: int, least: int, heat: Mapping[int, float]) -> None:
        """Move a cold bucket in exchange, so that the counts stay balanced."""
        cold = [
            bucket
            for bucket in range(self.grid.buckets)
            if self.grid.owner[bucket] == least and heat.get(bucket, 0.0) == 0.0 and self.grid.is_settled(bucket)
        ]
        swaps = [bucket for bucket in cold if self.grid.backup[bucket] == most]
        if swaps:
            self._swap(swaps[0])
        elif cold:
            self._start(cold[0], most, heir=True)


def _room(busy: Mapping[int, int], most: int) -> dict[int, int]:
    """Remaining capacity per pserver; 0 until half is free, so that moves start in batches."""
    return {number: most - taken if 2 * taken <= most else 0 for number, taken in busy.items()}
