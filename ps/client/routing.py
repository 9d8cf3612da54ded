"""Routing of keys to pservers: a placement map as arrays, and splitting of batches of keys by it.

Pure: no sockets, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edl.errors import PsError, SettingError
from ps import hashing
from ps.client.dedup import DistinctKeys, unite
from ps.protocol.messages import NO_PSERVER, PlacementMap, PserverAddress, pack, unpack
from ps.spec import BUCKETS

Where = slice | NDArray[np.intp]
"""A selection of a part's keys: a range, or their indices."""


class RoutingTable:
    """A placement map prepared for lookups."""

    def __init__(self, placement: PlacementMap) -> None:
        self.version, self.history = placement.version, placement.history
        self.servers: Mapping[int, PserverAddress] = {one.number: one for one in placement.servers}
        owner = np.frombuffer(unpack(placement.owner), np.int16) if placement.owner else np.zeros(BUCKETS, np.int16)
        # A pserver that is not listed is dead, even if buckets still name it.
        alive = np.isin(owner, np.array([NO_PSERVER, *self.servers], np.int64))
        self.owner: NDArray[np.int16] = np.where(alive, owner, np.int16(NO_PSERVER)).astype(np.int16)
        numbers, places = np.unique(self.owner, return_inverse=True)
        self.owners: tuple[int, ...] = tuple(numbers.tolist())
        """Sorted numbers of all owners, including ``NO_PSERVER`` if some buckets have no owner."""
        self._place = places.astype(np.int16)

    @property
    def clocked(self) -> tuple[int, ...]:
        """The pservers that must receive every step: all owners."""
        return tuple(one for one in self.owners if one != NO_PSERVER)

    def unite(self, keys: NDArray[np.int64]) -> DistinctKeys:
        """Deduplicate keys; those of ``owners[i]`` lie between ``bounds[i]`` and ``bounds[i + 1]``."""
        return unite(keys, self._place, len(self.owners))

    def name(self, number: int) -> str:
        """A pserver for messages: ``ps-a-0 (10.0.0.3:4711)``."""
        server = self.servers.get(number)
        if server is None:
            return "not assigned yet" if number == NO_PSERVER else f"pserver {number}, which is gone"
        return f"{server.name} ({server.host}:{server.port})"


@dataclass(slots=True)
class SubRequest:
    """The part of a request for one pserver: (index of a part of the request, selection of its keys)."""

    server: int
    items: list[tuple[int, Where]] = field(default_factory=list)


def first_split(
    route: RoutingTable, united: Sequence[DistinctKeys], key_bytes: Sequence[int] = (), most_bytes: int = 1 << 28
) -> list[SubRequest]:
    """Split a request by owner, using the result of ``route.unite``. With ``key_bytes`` (bytes per key of each part) no
    sub-request exceeds ``most_bytes``."""
    sub_requests = []
    for place, number in enumerate(route.owners):
        sub_request, size = SubRequest(number), 0
        for part, one in enumerate(united):
            begin, end = one.bounds[place], one.bounds[place + 1]
            each = key_bytes[part] if key_bytes else 0
            while begin < end:
                if size and size + each > most_bytes:
                    sub_requests.append(sub_request)
                    sub_request, size = SubRequest(number), 0
                room = max(1, (most_bytes - size) // each) if each else end - begin
                upto = min(end, begin + room)
                sub_request.items.append((part, slice(begin, upto)))
                size += each * (upto - begin)
                begin = upto
        if sub_request.items:
            sub_requests.append(sub_request)
    return sub_requests


def split_again(
    route: RoutingTable, keys: Sequence[NDArray[np.int64]], items: Iterable[tuple[int, Where]]
) -> list[SubRequest]:
    """Split what was not applied by a newer placement map. ``keys``: all keys of each part."""
    sub_requests: dict[int, SubRequest] = {}
    for part, where in items:
        places = np.arange(len(keys[part]))[where]
        owner = route.owner[hashing.buckets_of(keys[part][places])]
        for number in np.unique(owner).tolist():
            sub_requests.setdefault(number, SubRequest(number)).items.append((part, places[owner == number]))
    return [sub_requests[number] for number in sorted(sub_requests)]


def some_buckets(keys: Sequence[NDArray[np.int64]], items: Iterable[tuple[int, Where]], most: int = 4) -> str:
    """Buckets for messages: ``buckets 3, 17, 1200 and 41 more``."""
    found = sorted({int(one) for part, where in items for one in np.unique(hashing.buckets_of(keys[part][where]))})
    if not found:
        return "no bucket"
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"bucket{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:most]))}{more}"


def fixed_placement(servers: Sequence[PserverAddress | tuple[str, int]]) -> PlacementMap:
    """A placement map that distributes buckets evenly, for use without a Master. Raises ``PsError`` and
    ``SettingError``."""
    if not servers:
        raise PsError("no parameter servers given; at least one is needed")
    given = [
        one if isinstance(one, PserverAddress) else PserverAddress(number, f"ps-{number}", one[0], one[1])
        for number, one in enumerate(servers, 1)
    ]
    numbers = [one.number for one in given]
    if len(set(numbers)) < len(numbers) or min(numbers) < 1:
        raise SettingError("servers", numbers, "numbers must be distinct and at least 1")
    owner = [numbers[bucket * len(numbers) // BUCKETS] for bucket in range(BUCKETS)]
    return PlacementMap(version=1, history=1, servers=tuple(given), owner=pack(owner))
