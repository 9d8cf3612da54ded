"""The prefetch thread of a loader: leases shards, reads them, and keeps some steps ready."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from data_service.formats import FormatReader
from data_service.loader.batching import Columns, Cursor, StepSizes, micro_batches, order_of, take
from data_service.loader.lease_client import LOOK_S, LeaseClient, PendingRequest
from data_service.loader.replay import LostTrainer, RecordRange, Replay, plan
from data_service.loader.window import ShardProgress, StepOffer, Supply
from data_service.manifest import ShardRef
from data_service.protocol.messages import DataRefused, Given, LeasesGranted
from edl.errors import DataError, EdlError, UnreachableData, UnsupportedData
from edl.threads import ThreadHandle

AHEAD_S = 1.0
"""Requests for shards aim at this many seconds of work."""
MOST_SHARDS = 1024
"""Most shards per request."""
MOST_AHEAD = 8
"""Number of upcoming shards that a reader is notified of."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A reader that can prefetch announced shards, such as a remote one, which reads several at once."""

    def expect(self, refs: Iterable[ShardRef]) -> None:
        """Announce the shards that will be read next, in order."""
        ...

    def interrupt(self) -> None:
        """Wake a read that waits for a reader to become available."""
        ...


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """The parameters that determine the order of records in an epoch."""

    seed: int
    epoch: int
    shuffle: bool
    mixed: int
    """Number of shards that are open at once, with their records mixed; 1: one after another."""
    short: bool
    """True if steps with fewer records than requested are produced at the end."""
    open_bytes: int = 0
    """No further shard is opened for mixing while the open ones take this many bytes; 0: unlimited."""


@dataclass(slots=True)
class ReadyStep:
    """One step of this worker, decoded."""

    parts: list[tuple[Any, int]]
    """Micro-batches as given to the script, each with its number of samples."""
    offer: StepOffer
    pieces: tuple[RecordRange, ...]
    """Origin of its records."""
    redo: Replay | None = None
    """The lost trainer's push that the step replays, if any."""


@dataclass(frozen=True, slots=True)
class EpochFiles:
    """The version of the file list for an epoch (``data_service.file_list``)."""

    version: int
    shards: int
    digest: str
    records: int


@dataclass
class LeasedShards:
    """The shards that a worker holds in an epoch. They outlive a prefetcher: the next one continues with them."""

    leases: dict[int, Given] = field(default_factory=dict)
    """Shards that have not been returned completely, with their progress."""
    complete: dict[int, int] = field(default_factory=dict)
    """Shards announced to their end and not reported yet, with their number of records."""
    reported: set[int] = field(default_factory=set)
    announced: set[int] = field(default_factory=set)
    """Shards announced in part or completely, and not returned completely."""
    failed: list[tuple[int, int, str]] = field(default_factory=list)
    """Failed shards that have not been reported yet: shard, progress, reason."""
    unreached: set[int] = field(default_factory=set)
    """Those of ``failed`` whose file was inaccessible, which says nothing about its content."""
    asked: PendingRequest | None = None
    """A pending request for more shards."""
    files: EpochFiles = EpochFiles(0, 0, "", -1)
    """File list of this epoch, as sent with the last shards."""

    def announce(self, segments: Iterable[ShardProgress]) -> None:
        """Note that all ranks know that these will be returned."""
        for segment in segments:
            self.announced.add(segment.shard)
            if segment.complete and segment.shard not in self.reported:
                self.complete[segment.shard] = segment.upto

    def hand_out(self, segments: Iterable[ShardProgress]) -> None:
        """Note that the script gets these."""
        for segment in segments:
            given = self.leases.get(segment.shard)
            if given is not None and segment.complete:
                del self.leases[segment.shard]
                self.announced.discard(segment.shard)
            elif given is not None:
                self.leases[segment.shard] = Given(given.shard, segment.upto)

    def report(self) -> tuple[list[tuple[int, int]], list[tuple[int, int, str]], set[int]]:
        """Complete, failed and inaccessible shards that have not been reported yet; each is returned once."""
        complete, self.complete = list(self.complete.items()), {}
        failed, self.failed = self.failed, []
        self.reported.update(shard for shard, _ in complete)
        unreached, self.unreached = self.unreached, set()
        return complete, failed, unreached


class Prefetcher:
    """Prefetches one epoch in one round. The thread ends when it is stopped, or when ``over`` returns true."""

    def __init__(
        self,
        client: LeaseClient,
        reader: FormatReader,
        order: ReadOrder,
        step_sizes: StepSizes,
        *,
        prefetch: int,
        columns: Callable[[Any], Columns],
        finish: Callable[[Columns], Any],
        over: Callable[[], bool],
        held: LeasedShards | None = None,
    ) -> None:
        """``columns``: converts a table to arrays. ``finish``: converts a micro-batch's arrays to what the script gets.
        ``held``: what a previous prefetcher left."""
        self.step_sizes = step_sizes
        self.held = held or LeasedShards()
        self.troubles: list[str] = []
        """Reasons why shards could not be read."""
        self._client = client
        self._clock = client.deps.clock
        self._reader = reader
        self._order = order
        self._prefetch = prefetch
        self._columns = columns
        self._finish = finish
        self._over = over
        self._changed = client.deps.threads.condition()
        self._steps: collections.deque[ReadyStep] = collections.deque()
        self._supply = Supply.MORE
        self._idle = False
        self._asked_again = 0
        self._error: BaseException | None = None
        self._stopped = False
        # Used by the thread only:
        self._unread: collections.deque[Given] = collections.deque(self.held.leases.values())
        self._open: list[Cursor] = []
        self._refs: dict[int, ShardRef] = {}
        self._loose: list[ShardProgress] = []
        self._shards_read = 0
        self._began_s = self._clock.now_s()
        self._threads = client.deps.threads
        self._thread: ThreadHandle | None = None

    # --- the training thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that reads."""
        self._thread = self._threads.start(self._run, name="edl-data")

    def stop(self, wait: bool = False) -> None:
        """Stop the thread and drop prepared steps. ``wait``: block until it has ended."""
        with self._changed:
            self._stopped = True
            self._steps.clear()
            self._changed.notify_all()
        while (thread := self._thread) is not None and thread.is_alive():
            if isinstance(self._reader, ReadsAhead):
                self._reader.interrupt()
            if not wait:
                return
            thread.join(LOOK_S)

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def known(self) -> EpochFiles:
        """The file list to which the leased shards belong."""
        return self.held.files

    def ready(self, check: Callable[[], None]) -> tuple[list[ReadyStep], Supply]:
        """Return the prepared steps without removing them, or none together with what the Master says may still
        come. Blocks until one of the two is known. ``check`` raises when the round is over; also raises the
        thread's error."""
        asked = False
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._steps:
                    return list(self._steps), self._supply
                if self._supply is Supply.FINISHED or (self._idle and asked):
                    return [], self._supply
                if self._idle:
                    # Its last information may be outdated: steps have been announced since.
                    asked, self._idle = True, False
                    self._asked_again += 1
                    self._changed.notify_all()
                    continue
                self._changed.wait(LOOK_S)
                check()

    def pop(self) -> ReadyStep:
        """Remove and return the next step."""
        with self._changed:
            step = self._steps.popleft()
            self.held.hand_out(step.offer.taken)
            self._changed.notify_all()
            return step

    def next_redo(self) -> Replay | None:
        """The push that the next step replays, if any."""
        with self._changed:
            return self._steps[0].redo if self._steps else None

    def first(self) -> Any:
        """The first micro-batch of the next step if ready, else None. It is not removed."""
        with self._changed:
            return self._steps[0].parts[0][0] if self._steps else None

    def announce(self, segments: Sequence[ShardProgress]) -> None:
        """Note that all ranks know that these steps will be returned."""
        with self._changed:
            self.held.announce(segments)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended():
                self._take_answer()
                self._ask_ahead()
                self._open_shards()
                if sum(cursor.left for cursor in self._open) >= self.step_sizes.total:
                    self._make_step(self.step_sizes.total)
                elif not self._unread:
                    self._run_out()
        except BaseException as error:  # noqa: BLE001 - raised on the training thread
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._open.clear()

    def _ended(self) -> bool:
        return self._stopped or self._over()

    def _take_answer(self) -> None:
        asked = self.held.asked
        if asked is None or not asked.done.is_set():
            return
        self.held.asked = None
        answer = asked.answer
        if isinstance(answer, DataRefused):
            raise DataError(f"data set {self._client.dataset}: {answer.text}")
        assert isinstance(answer, LeasesGranted), "the client matches answers with questions"  # noqa: S101
        leases: Sequence[Given] = answer.leases
        with self._changed:
            for given in leases:
                self.held.leases[given.shard.index] = given
            self._supply = Supply.MORE if leases else Supply(answer.state)
            if answer.version >= self.held.files.version:
                self.held.files = EpochFiles(answer.version, answer.shards, answer.digest, answer.records)
        if leases and answer.ended:
            leases = self._take_over(leases, answer.ended)
        self._unread.extend(leases)

    def _take_over(self, leases: Sequence[Given], trainers_gone: Sequence[int]) -> Sequence[Given]:
        """Plan the replay of lost trainers' pushes on these shards. Returns the leases left to read."""
        epoch, name = self._order.epoch, self._client.dataset
        found = plan(leases, self._client.deps.trainers.ended(trainers_gone, name, epoch))
        with self._changed:
            for given in found.leases:
                self.held.leases[given.shard.index] = given
            for shard, upto, complete in found.acks:
                if complete:
                    self.held.leases.pop(shard, None)
                elif shard in self.held.leases:
                    ref = self.held.leases[shard].shard
                    self.held.leases[shard] = Given(ref, max(upto, self.held.leases[shard].upto))
        if found.acks:
            self._client.ack(epoch, tuple(found.acks))
        # Replays with the same home shard are consecutive.
        given_up = {
            home
            for home, redos in itertools.groupby(found.redos, lambda ended: ended.home)
            if not self._make_redos(home, list(redos))
        }
        return [given for given in found.leases if given.shard.index not in given_up]

    def _make_redos(self, home: int, redos: Sequence[LostTrainer]) -> bool:
        """Make the steps that replay pushes with this home shard. Returns False if some of their records are
        unreadable: then the home shard counts as failed, and the next worker that gets it tries all of them again.
        Everything is read before the first step, because a part of a push must not be sent under its number."""
        pieces = [piece for ended in redos for batch in ended.batches for piece in batch]
        most = {piece.ref.index: piece for piece in sorted(pieces, key=lambda piece: piece.upto)}
        tables: dict[int, tuple[Columns, int]] = {}
        for piece in most.values():
            try:
                tables[piece.ref.index] = self._read(piece.ref, piece.upto)
            except (EdlError, OSError, ValueError, KeyError) as error:
                begin, _, _ = redos[0].span(home) or (0, 0, False)
                self._not_read(error, piece.ref, home, begin)
                return False
        for ended in redos:
            self._make_redo(ended, tables)
        return True

    def _make_redo(self, ended: LostTrainer, tables: Mapping[int, tuple[Columns, int]]) -> None:
        """Make the steps of one push from exactly the same records."""
        _, upto, complete = ended.span(ended.home) or (0, 0, False)
        for number, batch in enumerate(ended.batches, 1):
            cursors = []
            for piece in batch:
                columns, records = tables[piece.ref.index]
                cursor = Cursor(piece.ref.index, columns, records, piece.begin, self._order_of(piece.ref))
                cursor.records = piece.upto
                cursors.append(cursor)
            count = sum(cursor.left for cursor in cursors)
            columns, _ = take(cursors, count, False, 0, 0)
            last = number == len(ended.batches)
            taken = (ShardProgress(ended.home, upto, complete),) if last else ()
            redo = Replay(ended.trainer, ended.seq, last)
            self._put_step(ReadyStep([(self._finish(columns), count)], StepOffer(count, taken), batch, redo))

    def _ask_ahead(self) -> None:
        """Request more shards before the present ones run out."""
        want = self._enough()
        if self.held.asked is None and self._supply is Supply.MORE and len(self._unread) < max(1, want // 2):
            self._ask(want)

    def _enough(self) -> int:
        # The first ones fill the queue and say little about the training speed.
        elapsed_s = max(AHEAD_S, self._clock.now_s() - self._began_s)
        by_speed = math.ceil(AHEAD_S * self._shards_read / elapsed_s)
        return max(1, self._order.mixed, min(MOST_SHARDS, by_speed))

    def _ask(self, want: int) -> None:
        with self._changed:
            complete, failed, unreached = self.held.report()
        self.held.asked = self._client.lease(self._order.epoch, want, complete, failed, unreached)

    def _open_shards(self) -> None:
        while self._unread and self._mixes_more() and not self._ended():
            self._open_shard(self._unread.popleft())
        enough = self.step_sizes.total
        while self._unread and sum(one.left for one in self._open) < enough and not self._ended():
            self._open_shard(self._unread.popleft())

    def _mixes_more(self) -> bool:
        """True if another shard should be opened. Shards that cannot contribute their part of a step count as
        finished."""
        limit, mixed = self._order.open_bytes, self._order.mixed
        if mixed == 1:
            return not self._open
        full = limit and sum(cursor.nbytes for cursor in self._open) >= limit
        return not full and sum(cursor.left * mixed >= self.step_sizes.total for cursor in self._open) < mixed

    def _open_shard(self, given: Given) -> None:
        ref, upto = given.shard, given.upto
        try:
            if isinstance(self._reader, ReadsAhead):
                self._reader.expect([ref, *(one.shard for one in itertools.islice(self._unread, MOST_AHEAD))])
            columns, records = self._read(ref, upto)
        except (EdlError, OSError, ValueError, KeyError) as error:
            self._not_read(error, ref, ref.index, upto)
            return
        self._shards_read += 1
        if records == upto:
            self._nothing_left(ref.index, upto)
            return
        self._refs[ref.index] = ref
        self._open.append(Cursor(ref.index, columns, records, upto, self._order_of(ref)))

    def _read(self, ref: ShardRef, upto: int) -> tuple[Columns, int]:
        """Read a shard; return its columns and number of records, of which the first ``upto`` have been used. Raises
        ``DataError``."""
        table = self._reader.read(ref)
        columns, records = self._columns(table), int(table.num_rows)
        if upto > records:
            raise DataError(f"{ref.file}, shard {ref.index}: {records} records, of which {upto} are consumed")
        return columns, records

    def _not_read(self, error: Exception, ref: ShardRef, leased: int, upto: int) -> None:
        """Handle an unreadable shard: return the leased one (the same, or the home of a replayed push) with its
        progress. The Master counts attempts and finally skips it. Raises errors that are not due to the data."""
        reason = str(error)
        if ref.file not in reason:  # from a function of the user
            reason = f"{ref.file}, shard {ref.index}: {reason}"
        if isinstance(error, UnsupportedData):
            raise UnsupportedData(reason) from error
        if isinstance(error, EdlError) and not isinstance(error, DataError):
            raise error
        if self._ended():
            return  # interrupted; the next prefetcher keeps the lease
        if leased != ref.index:
            reason = f"cannot replay a push of shard {leased}: {reason}"
        self.troubles.append(reason)
        if leased in self.held.announced:
            # All workers know this shard already. The Master may count it as done, and would not grant it again.
            raise DataError(f"{reason}; it was already announced to all workers") from error
        with self._changed:
            self.held.leases.pop(leased, None)
            self.held.failed.append((leased, upto, reason))
            if isinstance(error, UnreachableData):
                self.held.unreached.add(leased)

    def _order_of(self, ref: ShardRef) -> int | None:
        return order_of(self._order.seed, self._order.epoch, ref.index) if self._order.shuffle else None

    def _nothing_left(self, shard: int, upto: int) -> None:
        """Finish a shard without remaining records; its end is announced with the next step, if any, or acknowledged at
        once in independent mode."""
        end = ShardProgress(shard, upto, True)
        if self._client.independent:
            with self._changed:
                self.held.hand_out([end])
            self._client.ack(self._order.epoch, ((shard, upto, True),))
            return
        self._loose.append(end)
        with self._changed:
            self.held.announce([end])
            self.held.hand_out([end])

    def _make_step(self, count: int) -> None:
        mixed = self._order.mixed > 1
        begins = {cursor.shard: cursor.upto for cursor in self._open}
        columns, segments = take(self._open, count, mixed, self._order.seed, self._order.epoch)
        pieces = tuple(
            RecordRange(self._refs[one.shard], begins[one.shard], one.upto, one.complete) for one in segments
        )
        self._open = [cursor for cursor in self._open if cursor.left]
        parts = []
        for part, samples in micro_batches(columns, count, self.step_sizes.sizes):
            parts.append((self._finish(part), samples))
        loose, self._loose = self._loose, []
        self._put_step(ReadyStep(parts, StepOffer(count, (*segments, *loose)), pieces))

    def _put_step(self, step: ReadyStep) -> None:
        with self._changed:
            while len(self._steps) >= self._prefetch and not self._ended():
                self._changed.wait(LOOK_S)
            if not self._stopped:
                self._steps.append(step)
                self._changed.notify_all()

    def _run_out(self) -> None:
        """Nothing left to read, and too few records for a whole step."""
        if self.held.asked is None and self._supply is Supply.MORE:
            self._ask(self._enough())
        if self.held.asked is not None:
            self.held.asked.done.wait(LOOK_S)
            return
        left = sum(cursor.left for cursor in self._open)
        if left and self._order.short:
            self._make_step(left)
            return
        with self._changed:
            seen = self._asked_again
            self._idle = True
            self._changed.notify_all()
            while seen == self._asked_again and not self._ended():
                self._changed.wait(LOOK_S)
        if not self._ended():
            self._ask(self._enough())
            self._wait_for_answer()

    def _wait_for_answer(self) -> None:
        while self.held.asked is not None and not self.held.asked.done.wait(LOOK_S):
            if self._ended():
                return
        self._take_answer()
