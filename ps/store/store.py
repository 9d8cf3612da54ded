"""The in-memory rows of all tables of one pserver (or trainer).

Keys are hashed into 64 shards; each shard has one lock for all tables. Requests acquire locks in ascending order and
hold a few at a time; all methods are thread-safe. A push is applied shard by shard; its effect on a shard is passed to
``each`` while the lock is still held.

``snapshot(mark)`` marks all shards at one moment. Rows changed after a mark can be identified.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.errors import PsError
from edl.threads import ThreadLock, Threads
from ps.hashing import SHARDS, shard_of_bucket
from ps.intents import Intents
from ps.rows import BucketImage, Pushed, RowOp, Rows, ShardChange, TrainerPush, concat
from ps.spec import BUCKETS, TableSpec
from ps.store import push_plan
from ps.store.budget import Budget, Full
from ps.store.eviction import SAMPLE, ages, limit_age, oldest
from ps.store.ftrl import follow_weights
from ps.store.job_clock import JobClock
from ps.store.kernels import Kernels
from ps.store.kernels import kernels as pick
from ps.store.push_plan import PER_SHARD, SERVED, PartlyApplied, Work
from ps.store.rules import FTRL
from ps.store.shard_table import ShardTable, Slots, Split
from ps.store.snapshot import StoreSnapshot
from ps.store.table import Table

__all__ = ["SHARDS", "Full", "RowStore"]

WAYS = 2
"""Number of shard ranges of a large pull: few, so that rows are written almost sequentially; more than one, so that
several pulls can proceed in parallel."""
REMEMBERED = 256
"""Number of lost trainers (or more, if more were listed) whose applied pushes are still known by sequence number."""
SWEPT = 1 << 13
"""Rows evicted under one hold of a shard's lock."""
Allowed = NDArray[np.uint8] | bytes | bytearray | memoryview | None
Each = Callable[[ShardChange], None]


class RowStore:
    """Thread-safe storage of rows. ``most_bytes``: limit for rows and indexes together; 0: none."""

    def __init__(
        self, *, kernels: str | Kernels | None = None, most_bytes: int = 0, threads: Threads = SYSTEM_THREADS
    ) -> None:
        self._kernels: Kernels = pick(kernels or "") if kernels is None or isinstance(kernels, str) else kernels
        self._tables: Mapping[str, Table] = {}
        """Replaced, never modified, because other threads iterate over it."""
        self._locks = [threads.rlock() for _ in range(SHARDS)]
        self._defining = threads.lock()
        self._seqs: dict[int, NDArray[np.int64]] = {}
        self._gone: deque[int] = deque()
        self.intents = Intents()
        self._snapshot: StoreSnapshot | None = None
        self.budget = Budget(most_bytes)
        self.clock = JobClock(threads.now_s, threads.lock())
        self.mark = 0
        self.most_seen_step = 0
        """The highest step of a pull or push in this history. Changes under the lock of a shard that it used."""
        self.heat = np.zeros(BUCKETS, np.uint32)
        """Keys served by bucket; counted without locks, so approximate."""
        self.whole_since = np.full(BUCKETS, -1, np.int64)

    @property
    def tables(self) -> Mapping[str, Table]:
        """Tables by name. The mapping is never modified; a later call may return another one."""
        return self._tables

    def warm(self) -> None:
        """Compile the kernels now."""
        self._kernels.warm()

    @property
    def kernels(self) -> str:
        """Name of the kernels in use."""
        return self._kernels.NAME

    def take_kernels(self, name: str) -> None:
        """Switch to other, already compiled kernels; rows stay in place. Acquires all locks and holds them for about 30
        ms per million rows."""
        new = pick(name)
        with self._defining, self._held(0, SHARDS):
            for table in self._tables.values():
                table.shard_tables = new.adopt(table.shard_tables)
            self._kernels = new
        self.budget.recount(self.bytes())

    # --- tables -------------------------------------------------------------------------------------------------------

    def define(self, spec: TableSpec) -> None:
        """Define a table. Repeating the same definition is allowed; a different one raises ``PsError``."""
        with self._defining:
            known = self._tables.get(spec.name)
            if known is None:
                self._tables = {**self._tables, spec.name: Table(spec, self._kernels, self._forgotten)}
                return
        different = known.spec.difference(spec)
        if different:
            raise PsError(f"table {spec.name} is already defined differently: {different}")

    def rows(self, table: str) -> int:
        """Number of rows in a table. Raises ``PsError`` if there is no such table."""
        return self._table(table).rows

    def bytes(self) -> int:
        """Memory of rows (including free slots), indexes and sequence numbers of pushes, in bytes."""
        seqs = sum(one.nbytes for one in list(self._seqs.values()))
        return sum(table.bytes() for table in self._tables.values()) + seqs

    def cap(self, table: str, most: int, mine: NDArray[np.uint8] | None = None) -> None:
        """Set this store's share of the table's hard row cap; 0: none. New rows evict the oldest. ``mine``: nonzero, at
        any time, for buckets whose rows are not replicas."""
        found = self._table(table)
        found.most, found.mine = most, mine
        found.telling = found.telling or mine is not None

    def _table(self, name: str) -> Table:
        table = self._tables.get(name)
        if table is None:
            raise PsError(f"there is no table {name} here; define it first")
        return table

    # --- locks --------------------------------------------------------------------------------------------------------

    def lock(self, bucket: int | None = None, *, shard: int | None = None) -> ThreadLock:
        """The lock of a bucket's shard, or of a shard. Acquire several in ascending order of shards."""
        if shard is None:
            shard = shard_of_bucket(bucket or 0)
        return self._locks[shard]

    @contextmanager
    def _held(self, first: int, last: int) -> Iterator[None]:
        taken = 0
        try:
            for shard in range(first, last):
                self._locks[shard].acquire()
                taken += 1
            yield
        finally:
            for shard in reversed(range(first, first + taken)):
                self._locks[shard].release()

    def _in_turn(self, ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Iterate over ranges of shards in order, but postpone those that another thread seems to hold."""
        left = list(ranges)
        while left:
            mine = next((one for one in left if self._seems_free(one[0])), left[0])
            left.remove(mine)
            yield mine

    def _seems_free(self, shard: int) -> bool:
        free = self._locks[shard].acquire(blocking=False)
        if free:
            self._locks[shard].release()
        return free

    # --- pull ---------------------------------------------------------------------------------------------------------

    def pull(
        self, table: str, keys: NDArray[np.int64], out: NDArray[np.float32], *, step: int, insert: bool = True,
        allowed: Allowed = None, counts: NDArray[np.uint32] | None = None,
    ) -> int:  # fmt: skip
        """Copy the weights of ``keys`` (which may repeat) to ``out``, float32 ``(n, dim)``.

        With ``insert``, unknown keys get rows if admitted and if there is room, occurrences are counted (1 per key, or
        ``counts``), and ``step`` is recorded. Keys without a row yield initial weights. Returns the number of keys
        whose bucket is not ``allowed``; unless it is 0, ``out`` is incomplete, and the pull must be repeated. Raises
        ``PsError``.
        """
        found = self._table(table)
        wanted: NDArray[np.int64] = push_plan.aligned(keys, np.int64)  # type: ignore[assignment]
        push_plan.check_keys(found, wanted)
        if out.shape != (len(wanted), found.spec.dim) or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise PsError(
                f"table {table}: {len(wanted)} keys need a float32 array of shape ({len(wanted)}, {found.spec.dim})"
            )
        times: NDArray[np.uint32] | None = None
        if counts is not None:
            times = push_plan.aligned(counts, np.uint32)  # type: ignore[assignment]
        served = _served(allowed)
        parts = WAYS if len(wanted) > push_plan.GROUP else 1
        split = self._kernels.split(wanted, parts)
        if served is not None and (refused := push_plan.refused(split, served, 0, SHARDS)):
            return refused
        self.heat += split.counts
        seen = self._seen(found, step)
        shards = SHARDS // parts
        for first, last in self._in_turn([(first, first + shards) for first in range(0, SHARDS, shards)]):
            part = first // shards
            with self._held(first, last):
                if served is not None and (refused := push_plan.refused(split, served, first, last)):
                    return refused  # a bucket has left meanwhile, and its rows may be gone
                if insert:
                    self.most_seen_step = max(self.most_seen_step, step)
                missing = self._kernels.pull(found.shard_tables, split, part, out, seen if insert else -1, times)
                if missing and insert:  # they were answered with initial weights, which their rows will have
                    self._invite(found, split, part, seen, times)
        return 0

    def _seen(self, table: Table, step: int) -> int:
        """What is noted in rows of the table that are used in this step. In mode async a slow trainer's steps are lower
        than those of others: what it uses now must not look old."""
        return self.clock.now() if table.spec.eviction.unseen_s else max(step, self.most_seen_step)

    @property
    def timed(self) -> bool:
        """True if rows of some table get old by the job's clock."""
        return any(table.spec.eviction.unseen_s for table in self._tables.values())

    def _invite(self, table: Table, split: Split, part: int, step: int, times: NDArray[np.uint32] | None) -> None:
        using: dict[int, Slots] = {}
        if table.most:
            using = {shard: split.slots[places] for shard, places in split.by_shard(part)}
        for shard, places in split.by_shard(part, missing=True):
            invited = table.invited(shard, split.keys[places], None if times is None else times[split.order[places]])
            if not invited.all():
                places = places[invited]
            if len(places):
                try:
                    slots = self._add(table, shard, split.keys[places], step, using.get(shard, split.slots[:0]))
                except Full:
                    continue  # answered with initial weights; a push will report the error
                there = slots >= 0
                counts = None if times is None else times[split.order[places[there]]]
                table.shard_tables[shard].count(slots[there], counts, step)

    def _add(
        self, table: Table, shard: int, keys: NDArray[np.int64], step: int, using: Slots, promised: bool = False
    ) -> Slots:
        with self.budget.adding(table.shard_tables[shard], 0 if promised else len(keys)):
            return table.add(shard, keys, self.mark, step, using, lambda slots: self._keep(table, shard, slots))

    def _keep(self, table: Table, shard: int, slots: Slots) -> None:
        snapshot = self._snapshot
        if snapshot is not None:
            snapshot.keep(table.spec.name, shard, slots)

    # --- push ---------------------------------------------------------------------------------------------------------

    def push(
        self, pushes: Sequence[TrainerPush], *, step: int, lr: Mapping[str, float] = MappingProxyType({}),
        scale: float = 1.0, allowed: Allowed = None, each: Each | None = None,
        needed: Callable[[int, int], bool] | None = None,
    ) -> Pushed:  # fmt: skip
        """Apply the pushes of one or several trainers in one step: values of a key are summed first.

        ``lr`` by table (default: the table's own). ``scale`` multiplies gradients and added values, except gradients of
        tables with the rule ``ADD``. Keys are skipped if their bucket is not ``allowed``, or if this ``seq`` or a later
        one of the trainer has already been applied to it. Raises ``PsError`` for damaged or misshapen values, and
        ``Full`` (a ``PsError``), before anything is applied; ``PartlyApplied`` afterwards. ``needed`` is called under
        the locks of the shards ``first .. last-1`` and tells whether their pieces are needed; default: all are.
        """
        for table in self._tables.values():
            table.telling = each is not None
        works, touched = push_plan.works(self._tables, self._kernels, pushes, lr, scale)
        served = _served(allowed)
        result = Pushed()
        for work in works:
            self.heat += work.split.counts
        with self.budget.promise(self, works):
            for first, last in self._in_turn(push_plan.groups([work.split.starts for work in works])):
                with self._held(first, last):
                    self._push_group(works, pushes, touched, served, first, last, step, each, needed, result)
        return result

    def _push_group(
        self, works: Sequence[Work], pushes: Sequence[TrainerPush], touched: NDArray[np.bool_],
        served: NDArray[np.uint8] | None, first: int, last: int, step: int, each: Each | None,
        needed: Callable[[int, int], bool] | None, result: Pushed,
    ) -> None:  # fmt: skip
        mine = slice(first * PER_SHARD, last * PER_SHARD)
        taken, refused = touched[:, mine], 0
        here = None if served is None else served[mine] == SERVED  # under the locks, because it may have changed
        if here is not None and not here.all():
            refused = int(np.count_nonzero(taken.any(axis=0) & ~here))
            taken = taken & here
        late = np.zeros_like(taken)
        for number, push in enumerate(pushes):
            if push.trainer:
                late[number] = taken[number] & (self._seq(push.trainer)[mine] >= push.seq)
        result.refused += refused
        if taken.any():
            self.most_seen_step = max(self.most_seen_step, step)
        if refused or late.any():
            works = push_plan.remaining(works, first, last, touched[:, mine] & ~taken, late, result)
            taken = taken & ~late
        tells = each is not None and (needed is None or needed(first, last))
        pieces = (
            {shard: ShardChange(shard, (), np.zeros(0, np.uint16)) for shard in range(first, last)} if tells else {}
        )
        changing = False
        try:
            for work in works:
                self._find_rows(work, first, last, step, result)
                changing = True
                self._apply(work, first, last, step, pieces, result)
            self._applied(pushes, taken, first, last, pieces, each)
        except Exception as error:
            if changing:
                raise PartlyApplied(f"a push was applied in part, and cannot be completed: {error!r}") from error
            raise

    def _applied(
        self, pushes: Sequence[TrainerPush], taken: NDArray[np.bool_], first: int, last: int,
        pieces: Mapping[int, ShardChange], each: Each | None,
    ) -> None:  # fmt: skip
        """Record the sequence numbers, and pass on the effects."""
        mine = slice(first * PER_SHARD, last * PER_SHARD)
        for number, push in enumerate(pushes):
            if push.trainer:
                self._seq(push.trainer)[mine][taken[number]] = push.seq
        if each is None:
            return
        for piece in pieces.values():
            self._add_push_effects(piece, pushes, taken, first, each)
        for table in self._tables.values() if not pieces else ():
            for shard in range(first, last) if table.spec.eviction.any else ():
                table.unreported(shard)  # no replica needs them

    def _find_rows(self, work: Work, first: int, last: int, step: int, result: Pushed) -> None:
        """Find the rows to change, and add those that are missing. Changes no rows."""
        table, split = work.table, work.split
        step = self._seen(table, step)
        missing = self._kernels.find(table.shard_tables, split, first, last)
        low, high = split.starts[first], split.starts[last]
        result.fresh += int(high - low)
        there = split.slots[low:high] >= 0 if work.op == RowOp.FIRST else None
        for shard, places in push_plan.missing(split, first, last) if missing else ():
            if work.op in (RowOp.ASSIGN, RowOp.FIRST) or table.open:
                keys = split.keys[places]
                split.slots[places] = self._add(table, shard, keys, step, split.of(shard), promised=True)
            result.dropped += int(np.count_nonzero(split.slots[places] < 0))
        if there is not None:
            split.slots[low:high][there] = -1
        if self._snapshot is not None:
            for shard in range(first, last):
                self._keep(table, shard, split.of(shard))

    def _apply(
        self, work: Work, first: int, last: int, step: int, pieces: Mapping[int, ShardChange], result: Pushed
    ) -> None:
        table, split = work.table, work.split
        step = self._seen(table, step)
        changed, damaged = self._kernels.apply(
            table.shard_tables, split, first, last, work.values, work.rule, work.numbers,
            table.spec.optimizer.nesterov, step, self.mark,
        )  # fmt: skip
        if work.op != RowOp.GRAD and table.layout.rule == FTRL:
            for shard, slots in zip(range(first, last), changed, strict=True):
                follow_weights(table.shard_tables[shard], slots, table.spec.optimizer)
        result.damaged += damaged
        result.applied += sum(map(len, changed))
        for shard, slots in zip(pieces, changed, strict=False):  # all shards, or none if no pieces are needed
            if len(slots):
                rows = table.shard_tables[shard].gather(slots)
                known = pieces[shard].rows.get(table.spec.name)
                pieces[shard].rows[table.spec.name] = rows if known is None else concat([known, rows])

    def _add_push_effects(
        self, piece: ShardChange, pushes: Sequence[TrainerPush], taken: NDArray[np.bool_], first: int, each: Each
    ) -> None:
        begin = (piece.shard - first) * PER_SHARD
        mine = taken[:, begin : begin + PER_SHARD]

        def named(which: NDArray[np.bool_]) -> NDArray[np.uint16]:
            return (np.flatnonzero(which) + piece.shard * PER_SHARD).astype(np.uint16)

        if mine.any():
            piece.pushes = tuple(
                (push.trainer, push.seq, named(which))
                for push, which in zip(pushes, list(mine), strict=True)
                if push.trainer and which.any()
            )
            piece.buckets = named(np.asarray(mine.any(axis=0)))
        for table in self._tables.values():
            if table.spec.eviction.any and len(keys := table.unreported(piece.shard)):
                table.report(piece, keys)
        if len(piece.buckets) or piece.removed:
            each(piece)

    def missing(self, work: Work) -> list[tuple[ShardTable, int]]:
        """Number of new rows that a push needs, by shard table."""
        split, found = work.split, []
        for first, last in push_plan.groups([split.starts]):
            with self._held(first, last):
                self._kernels.find(work.table.shard_tables, split, first, last)
                for shard, places in push_plan.missing(split, first, last):
                    found.append((work.table.shard_tables[shard], len(np.unique(split.keys[places]))))
        return found

    def _seq(self, trainer: int) -> NDArray[np.int64]:
        """Sequence number of the trainer's last applied push, by bucket."""
        found = self._seqs.get(trainer)
        if found is None:
            fresh = np.full(BUCKETS, -1, np.int64)
            found = self._seqs.setdefault(trainer, fresh)
            if found is fresh:
                self.budget.charge(found.nbytes)
        return found

    def forget(self, trainer: int, most: int = REMEMBERED) -> None:
        """The trainer will not push any more. Another trainer may still repeat its last declared push, so the sequence
        numbers of the ``most`` latest lost trainers are kept."""
        if trainer not in self._gone:
            self._gone.append(trainer)
        while len(self._gone) > most:
            oldest = self._gone.popleft()
            found = self._seqs.pop(oldest, None)
            if found is not None:
                self.budget.charge(-found.nbytes)
            self.intents.forget(oldest)

    # --- buckets ------------------------------------------------------------------------------------------------------

    def image(self, bucket: int) -> BucketImage:
        """A copy of one bucket's content. Hold its ``lock`` to order it among pieces."""
        mask = _mask([bucket])
        image = BucketImage(bucket)
        with self.lock(bucket):
            for name, table in self._tables.items():
                shard_table = table.shard_tables[shard_of_bucket(bucket)]
                slots = shard_table.within(mask)
                if len(slots):
                    image.rows[name] = shard_table.gather(slots)
            for trainer, seqs in list(self._seqs.items()):
                if seqs[bucket] >= 0:
                    image.seqs[trainer] = int(seqs[bucket])
            image.intents = self.intents.of(bucket)
        return image

    def take_image(self, image: BucketImage) -> None:
        """Replace the content of a bucket. Never raises ``Full``: a replica must follow its owner."""
        shard = shard_of_bucket(image.bucket)
        for name in image.rows:
            self._table(name)
        with self.lock(image.bucket):
            self._drop(shard, _mask([image.bucket]))
            for name, rows in image.rows.items():
                self._put(self._tables[name], shard, rows)
            for trainer, seq in image.seqs.items():
                self._seq(trainer)[image.bucket] = seq
            self.intents.take(image.intents)

    def apply_piece(self, piece: ShardChange) -> None:
        """Apply the effect of an owner's push or eviction. Never raises ``Full``."""
        for name in (*piece.rows, *piece.removed):
            self._table(name)
        with self.lock(shard=piece.shard):
            for name, keys in piece.removed.items():
                table = self._tables[name]
                slots = table.shard_tables[piece.shard].find(keys)
                self._evict(table, piece.shard, np.unique(slots[slots >= 0]))
            for name, rows in piece.rows.items():
                self._put(self._tables[name], piece.shard, rows)
            for trainer, seq, buckets in piece.pushes:
                seqs = self._seq(trainer)
                seqs[buckets] = np.maximum(seqs[buckets], seq)
            self.intents.take(piece.intents)

    def _put(self, table: Table, shard: int, rows: Rows) -> None:
        shard_table = table.shard_tables[shard]
        if self._snapshot is not None:
            self._keep(table, shard, shard_table.find(rows.keys))
        if table.spec.eviction.unseen_s and len(rows):
            self.clock.at_least(int(rows.seen.max()))
        with self.budget.adding(shard_table, 0):
            shard_table.put(rows, self.mark)

    def begin_history(self) -> None:
        """The previous history's rows are gone; some of this one may be here. Steps and seconds count from these on."""
        self.most_seen_step = 0
        self.clock.restart()
        for table in self._tables.values():
            for shard in range(SHARDS) if table.spec.eviction.unseen_s else ():
                with self._locks[shard]:
                    self.clock.at_least(table.youngest(shard))

    def drop(self, buckets: Iterable[int]) -> None:
        """Discard all content of these buckets."""
        mask = _mask(list(buckets))
        for shard in np.flatnonzero(mask.reshape(SHARDS, PER_SHARD).any(axis=1)).tolist():
            with self._locks[shard]:
                self._drop(shard, mask)

    def _drop(self, shard: int, mask: NDArray[np.bool_]) -> None:
        for table in self._tables.values():
            shard_table = table.shard_tables[shard]
            slots = shard_table.within(mask)
            if len(slots):
                self._keep(table, shard, slots)
                shard_table.remove(slots)
        mine = np.zeros(BUCKETS, np.bool_)
        mine[shard * PER_SHARD : (shard + 1) * PER_SHARD] = mask[shard * PER_SHARD : (shard + 1) * PER_SHARD]
        for seqs in list(self._seqs.values()):
            seqs[mine] = -1
        self.intents.drop(mine)
        self.whole_since[mine] = self.mark

    def _forgotten(self, buckets: NDArray[np.uint16]) -> None:
        self.whole_since[buckets] = self.mark
        if self._snapshot is not None:
            self._snapshot.whole[buckets] = self.mark

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def snapshot(self, mark: int) -> StoreSnapshot:
        """Mark all shards: the snapshot is the store at this moment. Marks must increase; an open snapshot is closed.
        Raises ``PsError``.

        Waits only for pushes that hold locks.
        """
        with self._held(0, SHARDS):
            if mark <= self.mark:
                raise PsError(f"mark {mark} is not later than the last one, {self.mark}")
            if self._snapshot is not None:
                self._snapshot.close()
            self.mark = mark
            self._snapshot = StoreSnapshot(self, mark)
            return self._snapshot

    # --- eviction -----------------------------------------------------------------------------------------------------

    def sweep(self, table: str, *, step: int, most: int = 0, least: int = 0, each: Each | None = None) -> Rows:
        """Evict due rows of a table; return them, together with those evicted since the last sweep to make room (if
        exported).

        Rows unseen for long are evicted down to ``least``; then the oldest down to ``most`` (0: unlimited). Replicas
        are neither evicted nor counted; both limits are this store's shares. Holds a shard's lock for a few rows at a
        time. ``each`` receives the pieces for replicas.
        """
        found = self._table(table)
        if found.mine is None:
            found.most = most
        gone = [found.none(), found.made_room()]
        eviction = found.spec.eviction
        unseen, now = eviction.unseen_steps or eviction.unseen_s, self.clock.now() if eviction.unseen_s else step
        limit_due = (max(0, now - unseen if unseen else 0) << 32) - 1
        total, due = 0, 0
        samples = []
        stride = 1 + found.rows // SAMPLE
        for shard in range(SHARDS):
            with self._locks[shard]:
                age = ages(found.shard_tables[shard], found.own(shard))
            total += len(age)
            due += int(np.count_nonzero(age <= np.uint64(limit_due))) if limit_due >= 0 else 0
            samples.append(age[::stride])
        going = max(min(due, max(0, total - least)), total - most if most else 0)
        limit = limit_age(samples, going / total if total else 0)
        if going <= due:  # the limit of a sample may be above the age of those that are due, or miss a few old rows
            limit = limit_due if going == due else min(limit, limit_due)
        # Rows of exactly the limit age go last, because not all of them may have to.
        for shard, up_to in [(shard, age) for age in (limit - 1, limit) for shard in range(SHARDS)]:
            while going > 0 and up_to >= 0:
                rows = self._sweep_some(found, shard, up_to, min(going, SWEPT), each)
                going -= len(rows)
                gone.append(rows)
                if len(rows) < SWEPT:
                    break
        return concat(gone)

    def _sweep_some(self, table: Table, shard: int, limit: int, most: int, each: Each | None) -> Rows:
        with self._locks[shard]:
            shard_table, slots = table.shard_tables[shard], table.own(shard)
            due = slots[ages(shard_table, slots) <= np.uint64(limit)]
            rows = self._evict(table, shard, oldest(shard_table, due, most))
            if each is not None and len(rows):
                piece = ShardChange(shard, (), np.zeros(0, np.uint16))
                table.report(piece, np.concatenate([rows.keys, table.unreported(shard)]))
                each(piece)
        return rows

    def _evict(self, table: Table, shard: int, slots: Slots) -> Rows:
        return table.remove(shard, slots, self.mark, lambda going: self._keep(table, shard, going))


def _served(allowed: Allowed) -> NDArray[np.uint8] | None:
    """A live view: a bucket is stopped under its shard's lock."""
    return None if allowed is None else np.frombuffer(allowed, np.uint8)


def _mask(buckets: Sequence[int]) -> NDArray[np.bool_]:
    mask = np.zeros(BUCKETS, np.bool_)
    mask[buckets] = True
    return mask
