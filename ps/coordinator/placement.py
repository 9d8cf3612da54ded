"""Who holds each bucket, and who should: the arithmetic of placement. Pure; knows nothing of words or time.

A bucket has an owner, at most one copy in step (``backup``) and at most one that is being made (``joining``). A new
owner is always somebody who has everything: the backup, or ``joining`` once it is in step (``heir``); it serves when
the old owner, the ``giver``, has released the bucket, and the old owner is its backup from then on. A backup that
pushes do not wait for (``lagging``) may lack some; to be the owner it is ``joining`` as well, until it has caught up.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ps.protocol.messages import NOBODY, RESTORE

REPAIR = 16
"""Of copies that are missing so many times more are made at once than buckets are moved: until they are there, one more
death loses rows. Streams make an image only when there is room for it, so that costs no memory; but a checkpoint waits
until all have been made that were begun."""


@dataclass(frozen=True, slots=True)
class Site:
    """A pserver, as somewhere to put buckets."""

    number: int
    machine: str
    active: bool
    """It may be given buckets: it is not leaving, and not above the most that hold buckets."""


class Grid:
    """Everybody's roles. ``touched`` gathers the buckets that were changed."""

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.owner = array("h", bytes(2 * buckets))
        self.backup = array("h", self.owner)
        self.joining = array("h", self.owner)
        self.giver = array("h", self.owner)
        self.heir = array("h", self.owner)
        """1 where ``joining`` is to be the owner."""
        self.since = array("i", bytes(4 * buckets))
        self.touched: set[int] = set()

    def clear(self) -> None:
        """Nobody holds anything."""
        for bucket in range(self.buckets):
            self.put(bucket)

    def put(
        self, bucket: int, owner: int = 0, backup: int = 0, joining: int = 0, giver: int = 0, heir: bool = False
    ) -> None:
        """Give a bucket these roles."""
        self.owner[bucket], self.backup[bucket], self.joining[bucket] = owner, backup, joining
        self.giver[bucket], self.heir[bucket] = giver, int(heir)
        self.touched.add(bucket)

    def join(self, bucket: int, number: int, heir: bool = False) -> None:
        """Have a copy made."""
        self.joining[bucket], self.heir[bucket] = number, int(heir)
        self.touched.add(bucket)

    def hand_over(self, bucket: int, heir: int) -> None:
        """Somebody who has everything is the owner now, and the old one its backup."""
        old = self.owner[bucket]
        self.put(bucket, heir, old, NOBODY if self.joining[bucket] == heir else self.joining[bucket], old)

    def stamp(self, version: int) -> None:
        """What was touched was changed in this version."""
        for bucket in self.touched:
            self.since[bucket] = version
        self.touched.clear()

    def is_settled(self, bucket: int) -> bool:
        """Nothing about the bucket is in motion."""
        return not self.joining[bucket] and not self.giver[bucket]

    def roles(self, bucket: int) -> tuple[int, int, int, int]:
        """Owner, backup, joining, giver."""
        return self.owner[bucket], self.backup[bucket], self.joining[bucket], self.giver[bucket]

    def in_motion(self) -> int:
        """How many buckets are."""
        return sum(1 for joining, giver in zip(self.joining, self.giver, strict=True) if joining or giver)

    def holders(self) -> set[int]:
        """Numbers with any role."""
        return (set(self.owner) | set(self.backup) | set(self.joining) | set(self.giver)) - {NOBODY, RESTORE}

    # --- what pservers say -------------------------------------------------------------------------------------------

    def _current(self, buckets: Iterable[int], version: int) -> Iterator[int]:
        """Those that have not been changed since ``version``."""
        return (bucket for bucket in buckets if version >= self.since[bucket] and bucket not in self.touched)

    def synced(self, owner: int, follower: int, version: int, buckets: Iterable[int], may_own: bool) -> None:
        """A copy is in step: it becomes the owner, if it was made for that, or the backup."""
        for bucket in self._current(buckets, version):
            if self.owner[bucket] != owner or self.joining[bucket] != follower or self.giver[bucket]:
                continue
            if self.heir[bucket] and may_own:
                self.hand_over(bucket, follower)
            else:
                self.put(bucket, owner, follower)

    def unsynced(self, teller: int, follower: int, version: int, buckets: Iterable[int], copies: bool) -> None:
        """A copy is in step no more; or a giver says that the new owner may not have heard of its release."""
        for bucket in self._current(buckets, version):
            owner, backup, joining, giver = self.roles(bucket)
            if owner == teller and giver == follower:
                continue  # it will see when it has been released
            if owner == teller and backup == follower:
                self.put(bucket, owner, NOBODY, joining or follower * copies, giver, bool(self.heir[bucket]))
            elif owner == teller and joining == follower:
                self.touched.add(bucket)
            elif giver == teller and owner == follower:
                self.put(bucket, owner, NOBODY if backup == giver else backup, joining or giver * copies)

    def took(self, owner: int, version: int, buckets: Iterable[int], copies: bool) -> None:
        """The owner serves what was given to it, or loaded."""
        for bucket in self._current(buckets, version):
            if self.owner[bucket] == owner and self.giver[bucket]:
                self.put(bucket, owner, self.backup[bucket] * copies, self.joining[bucket], 0, bool(self.heir[bucket]))

    def spares(self, number: int, others: Collection[int]) -> bool:
        """Whether some of the others hold buckets, and have everything that this one has."""
        if not others or not self.holders().intersection(others):
            return False
        owned = (bucket for bucket, owner in enumerate(self.owner) if owner == number)
        return all(self.backup[bucket] in others and self.giver[bucket] != RESTORE for bucket in owned)

    def bury(self, number: int) -> list[int]:
        """A pserver is dead: copies in step take over. Returns the buckets that are lost."""
        lost = []
        for bucket in range(self.buckets):
            owner, backup, joining, giver = self.roles(bucket)
            if number not in (owner, backup, joining, giver):
                continue
            left = joining if joining != number else NOBODY
            if owner == number and backup and giver != RESTORE:
                self.put(bucket, backup, NOBODY, left if left != backup else NOBODY)
            elif owner == number:
                lost.append(bucket)
                self.put(bucket)
            else:
                kept = backup if backup != number else NOBODY
                self.put(bucket, owner, kept, left, giver * (giver != number), bool(self.heir[bucket] and left))
        return lost


class Planner:
    """One look at the grid, and what to set in motion. Few moves: nothing moves that need not."""

    def __init__(self, grid: Grid, sites: Sequence[Site], copies: bool, motion: int, *, lagging: bool = False) -> None:
        """``lagging``: pushes do not wait for backups."""
        self.grid, self.copies, self._lagging = grid, copies, lagging
        self.machine = {site.number: site.machine for site in sites}
        self.active = sorted(site.number for site in sites if site.active)
        busy = dict.fromkeys(self.machine, 0)
        self._owned = dict.fromkeys(self.machine, 0)
        self._copied = dict.fromkeys(self.machine, 0)
        for bucket in range(grid.buckets):
            owner, backup, joining, giver = grid.roles(bucket)
            if joining or giver > NOBODY:
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
        """Of copies that are missing."""
        self.moving = grid.in_motion()

    def run(self, heat: Mapping[int, float] | None = None) -> None:
        """Replace copies that are missing, then empty who leaves, then even out."""
        self._repair()
        self._drain()
        self._balance_owners()
        if self.copies and not self.moving:
            self._balance_copies()
        if heat and not self.moving and not self.grid.touched:
            self._spread(heat)

    # --- beginning ---------------------------------------------------------------------------------------------------

    def place_all(self, giver: int = NOBODY) -> None:
        """Give every bucket an owner, in even ranges; and, when there is nothing to copy yet, have copies made."""
        count = len(self.active)
        for bucket in range(self.grid.buckets):
            owner = self.active[bucket * count // self.grid.buckets]
            self._owned[owner] += 1
            copy = self._other(owner) if self.copies and giver == NOBODY else NOBODY
            if copy:
                self._copied[copy] += 1
            self.grid.put(bucket, owner, NOBODY, copy, giver)

    def place(self, buckets: Iterable[int], giver: int) -> None:
        """Give buckets that nobody has, and that are empty or in the checkpoint, an owner."""
        for bucket in buckets:
            owner = min(self.active, key=self._owned.__getitem__)
            self._owned[owner] += 1
            self.grid.put(bucket, owner, giver=giver)

    # --- repair, drain -----------------------------------------------------------------------------------------------

    def _others(self, owner: int) -> list[int]:
        """Who may have a copy: somebody on another host, if there is one."""
        rest = [number for number in self.active if number != owner]
        return [number for number in rest if self.machine[number] != self.machine.get(owner)] or rest

    def _other(self, owner: int) -> int:
        return min(self._others(owner), key=self._copied.__getitem__, default=NOBODY)

    def _start(self, bucket: int, number: int, heir: bool = False, room: dict[int, int] | None = None) -> bool:
        """Have a copy made, if both have room for it."""
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
        """The backup and the owner change places, which costs no copy; at once if the backup has everything."""
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
        """Move from who has most to who has least, until they differ by one; by swaps where that is enough."""
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
        """Copies on other hosts than their owners, and no pserver with many more than another that could have them."""
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
        """Give the hottest bucket that is worth it to the coolest pserver; a cold one comes back by ``run``."""
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
        """A cold bucket in exchange, so that the counts stay even."""
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
    """For how many more there is room: in batches, not one by one as others come to rest."""
    return {number: most - taken if 2 * taken <= most else 0 for number, taken in busy.items()}
