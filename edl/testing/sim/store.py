"""A store with etcd's promises: one history, leases, and watches that show every change in order, if late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from edl.errors import LeaseLost
from edl.testing.sim.timeline import Timeline
from edl.types import Token


@dataclass(frozen=True, slots=True)
class Entry:
    """One key as it stands. Values are plain objects: how they are written down is tested elsewhere."""

    key: str
    value: Any
    create_revision: int
    lease: int
    mod_revision: int = 0


@dataclass(frozen=True, slots=True)
class StoreChange:
    """One line of the history; ``entry`` None when the key went away."""

    revision: int
    key: str
    entry: Entry | None


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    deadline_s: float
    keys: set[str] = field(default_factory=set)


class Watch:
    """Shows the changes of a prefix to one launcher, in order, as soon as they can reach it."""

    def __init__(self, prefix: str, position: int, show: Callable[[StoreChange], None]) -> None:
        self.prefix = prefix
        self.position = position
        """Lines of the history it has been shown."""
        self.show = show
        self.under_way = False
        """News are on their way."""
        self.closed = False


class SimStore:
    """Answers at once; ``Launcher.ask`` puts the network in between."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.revision = 1
        self.entries: dict[str, Entry] = {}
        self.history: list[StoreChange] = []
        self.away = False
        """Nobody is answered. Leases do not end meanwhile, as in etcd without a leader."""
        self.changed: Callable[[], None] = lambda: None
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 100

    # --- keys --------------------------------------------------------------------------------------------------------

    def read(self, prefix: str) -> list[Entry]:
        """What lies under a prefix, by name."""
        return [self.entries[key] for key in sorted(self.entries) if key.startswith(prefix)]

    def value(self, key: str) -> Any:
        """A key's value, None when it does not exist."""
        entry = self.entries.get(key)
        return entry.value if entry else None

    def token(self, key: str) -> Token:
        """Create revision of a key, 0 when it does not exist."""
        entry = self.entries.get(key)
        return Token(entry.create_revision if entry else 0)

    def modified(self, key: str) -> int:
        """Revision of the last write of a key, 0 when it does not exist."""
        entry = self.entries.get(key)
        return entry.mod_revision if entry else 0

    def put(self, key: str, value: Any, lease: int = 0) -> None:
        """Write a key. Raises ``LeaseLost`` when the lease is gone."""
        if lease:
            self._lease(lease).keys.add(key)
        self.revision += 1
        before = self.entries.get(key)
        created = before.create_revision if before else self.revision
        self._record(key, Entry(key, value, created, lease, self.revision))

    def create(self, key: str, value: Any, lease: int) -> Token:
        """Write a key that does not exist yet; returns its create revision, or 0 when it does."""
        if key in self.entries:
            return Token(0)
        self.put(key, value, lease)
        return Token(self.revision)

    def delete(self, key: str) -> None:
        """Remove a key if it exists."""
        entry = self.entries.get(key)
        if entry is None:
            return
        self.revision += 1
        if entry.lease in self._leases:
            self._leases[entry.lease].keys.discard(key)
        self._record(key, None)

    def _record(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            del self.entries[key]
        else:
            self.entries[key] = entry
        self.history.append(StoreChange(self.revision, key, entry))
        self.changed()

    # --- leases ------------------------------------------------------------------------------------------------------

    def grant(self, ttl_s: float) -> int:
        """A new lease."""
        self._next_lease += 1
        self._leases[self._next_lease] = _Lease(ttl_s, self.timeline.now_s + ttl_s)
        self.timeline.after(ttl_s, self._look, self._next_lease)
        return self._next_lease

    def renew(self, lease: int) -> None:
        """Begin its time anew. Raises ``LeaseLost``."""
        found = self._lease(lease)
        found.deadline_s = self.timeline.now_s + found.ttl_s

    def revoke(self, lease: int) -> None:
        """End a lease and all keys on it; one that is gone is no error."""
        found = self._leases.pop(lease, None)
        for key in sorted(found.keys) if found else ():
            self.delete(key)

    def lives(self, lease: int) -> bool:
        """Whether the lease has not ended."""
        return lease in self._leases

    def come_back(self) -> None:
        """End an outage: every lease starts its time anew."""
        self.away = False
        for lease in self._leases.values():
            lease.deadline_s = self.timeline.now_s + lease.ttl_s
        self.changed()

    def _lease(self, lease: int) -> _Lease:
        found = self._leases.get(lease)
        if found is None:
            raise LeaseLost(f"lease {lease} has ended")
        return found

    def _look(self, lease: int) -> None:
        found = self._leases.get(lease)
        if found is None:
            return
        if self.away or self.timeline.now_s < found.deadline_s:
            again_s = max(found.deadline_s, self.timeline.now_s + 0.1)
            self.timeline.at(again_s, self._look, lease)
        else:
            self.revoke(lease)
