"""The reading half of a client: pull, prefetch and scan."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.job_records import Mode
from ps import hashing
from ps.background import Background
from ps.client import dedup, routing
from ps.client.arguments import as_keys, as_out
from ps.client.cache import RowCache
from ps.client.core import AHEAD, PULL, Core
from ps.client.dedup import DistinctKeys
from ps.client.prefetch import FetchedRows, PrefetchedRows, PulledRows
from ps.client.requests import Pull, Scan, TablePull
from ps.protocol.half_precision import wire_of
from ps.rows import RowOp, Rows, TablePush
from ps.spec import BUCKETS, TableSpec

SCANNED = 64
"""Buckets per request of a scan."""
Keys = NDArray[np.int64]
Weights = NDArray[np.float32]


class RowReader:
    """Reads rows from the pservers, the cache and the prefetched batches."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.RLock()
        self._caches: dict[str, RowCache] = {}
        oldest = 0 if core.mode is Mode.SYNC else 1
        self._ahead = PrefetchedRows(Background("ps-prefetch"), oldest, lambda: core.stand())
        self._pulled_step = -1

    def pull(self, wanted: Mapping[str, Any], outs: Mapping[str, Weights | None], insert: bool) -> dict[str, Weights]:
        """Pull rows of several tables, with one request to each pserver."""
        given = {table: as_keys(table, keys) for table, keys in wanted.items()}
        found = {table: as_out(self._core.spec(table), keys.shape, outs.get(table)) for table, keys in given.items()}
        for table, (united, rows) in self.pull_distinct(given, insert).items():
            dedup.spread(rows, united, found[table].reshape(-1, rows.shape[1]))
        return found

    def pull_distinct(self, wanted: Mapping[str, Any], insert: bool) -> dict[str, tuple[DistinctKeys, Weights]]:
        """Pull the rows of the distinct keys of several tables, with one request to each pserver."""
        core = self._core
        found, missing = {}, {}
        bases: list[Mapping[int, int]] = []
        for table, some in wanted.items():
            keys = as_keys(table, some).reshape(-1)
            ready = self._ahead.take(table, keys, core.step) if insert else None
            if ready is None:
                missing[table] = keys
            else:
                found[table], applied = ready
                bases.append(applied)
                core.tally.add(prefetched=keys.size)
        with self._lock:
            fetched, applied = self.fetch(missing, insert)
            self._pulled_step = core.step
        found |= fetched
        for one in (*bases, applied):
            core.bases.pulled(one, trains=insert)
        return found

    def prefetch(self, table: str, keys: Any) -> None:
        """Fetch the rows of these keys in the background, for a following pull of exactly the same keys, in any
        shape."""
        core, given = self._core, as_keys(table, keys).reshape(-1).copy()

        def fetch() -> FetchedRows:
            found, applied = self.fetch({table: given}, True, AHEAD)
            return found[table], applied

        # In mode sync the rows must include the previous step's push; if this step has already pulled, the next one is
        # meant.
        self._ahead.ask(table, given, fetch, core.step, core.mode is Mode.SYNC and self._pulled_step == core.step)

    def scan(self, table: str) -> Iterator[Rows]:
        """Iterate over all rows with their state, a few buckets at a time."""
        self._core.spec(table)
        some = np.arange(1 << 17, dtype=np.int64)
        buckets, first = np.unique(hashing.buckets_of(some), return_index=True)
        assert len(buckets) == BUCKETS, "every bucket has a key among so many"  # noqa: S101
        for begin in range(0, BUCKETS, SCANNED):
            keys = some[first[begin : begin + SCANNED]]
            request = Scan(table, dict(zip(keys.tolist(), range(begin, begin + SCANNED), strict=True)), [keys])
            with self._lock:
                route = self._core.session.route
                owner = route.owner[begin : begin + SCANNED].tolist()
                sub_requests = [routing.SubRequest(one, [(0, np.array([at]))]) for at, one in enumerate(owner)]
                self._core.fan_out(request, sub_requests, route, PULL, f"the rows of table {table}", stands=False)
            yield from request.found

    def written(self, part: TablePush) -> None:
        """Drop cached rows that this trainer has pushed, and prefetched ones of a table in which it has set rows."""
        cache = self._caches.get(part.table)
        if cache is not None:
            cache.forget(part.keys)
        if part.op != RowOp.GRAD:  # prefetched rows may lack the gradients of a step
            self._ahead.drop(part.table)

    def stepped(self) -> None:
        """A step has ended: start the fetches that were waiting for it."""
        self._ahead.stepped(self._core.step)

    def close(self) -> None:
        """Stop prefetching and drop the prefetched rows."""
        self._ahead.close()

    def fetch(
        self, wanted: Mapping[str, Keys], insert: bool, purpose: str = PULL
    ) -> tuple[dict[str, PulledRows], dict[int, int]]:
        """Deduplicate flat keys and fetch their rows. Also returns how many pushes each pserver had applied when it
        sent them. Not reentrant for one purpose."""
        core, found, fetches, parts, late = self._core, dict[str, PulledRows](), [], [], []
        applied: dict[int, int] = {}
        route, step = core.session.route, core.step
        for table, keys in wanted.items():
            spec, one = core.spec(table), route.unite(keys)
            rows = np.empty((len(one.keys), spec.dim), np.float32)
            found[table] = one, rows
            core.tally.add(pulls=1, keys=len(keys), distinct=len(one.keys))
            cache, part, place = self._cache(spec) if insert else None, one, rows
            if cache is not None:
                written, missing = cache.writes, cache.lookup(one.keys, rows, step)
                part = dedup.only(one, missing)
                place = np.empty((len(part.keys), spec.dim), np.float32)
                core.tally.add(cached=len(one.keys) - len(part.keys))
                late.append((cache, written, part, rows, missing, place))
            if len(part.keys):
                counts = part.counts if len(one.keys) < len(keys) else None
                fetches.append(TablePull(spec, part.keys, place, counts, wire_of(spec, core.options.wire)))
                parts.append(part)
        if fetches:
            core.tally.add(fetched=sum(len(one.keys) for one in fetches))
            request = Pull(fetches, step, core.session.joined.epoch, insert, applied)
            # Per key: key and count in the request, the row in the answer.
            sub_requests = routing.first_split(route, parts, [12 + 4 * one.spec.dim for one in fetches])
            core.fan_out(request, sub_requests, route, purpose, f"rows of {', '.join(wanted)}", stands=purpose == PULL)
        for cache, written, part, rows, missing, place in late:
            rows[missing] = place
            cache.keep(part.keys, part.counts, place, step, written)
        return found, applied

    def _cache(self, spec: TableSpec) -> RowCache | None:
        options = self._core.options
        if not (options.cache_rows and options.cache_steps) or spec.dense:
            return None
        if spec.name not in self._caches:
            self._caches[spec.name] = RowCache(options.cache_rows, spec.dim, options.cache_steps)
        return self._caches[spec.name]
