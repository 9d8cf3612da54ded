"""The prefetch thread of a loader: leases shards, reads them, makes steps and keeps some of them ready."""

from __future__ import annotations

import collections
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from data_service.formats import Reader
from data_service.loader.batching import Columns, Cursor, StepSizes, micro_batches, order_of, take
from data_service.loader.lease_client import LOOK_S, LeaseClient, PendingRequest
from data_service.loader.replay import LostTrainer, RecordRange, Replay, plan
from data_service.loader.trainers import trainers
from data_service.loader.window import ShardProgress, StepOffer, Supply
from data_service.manifest import ShardRef
from data_service.protocol.messages import Given, Granted, Refused
from edl.adapters.clock import SystemClock
from edl.errors import DataError, EdlError, UnreachableData, UnsupportedData

_CLOCK = SystemClock()
AHEAD_S = 1.0
"""So long should the shards last that are asked for at once."""
MOST_SHARDS = 1024
"""In one lease."""
MOST_AHEAD = 8
"""Shards that a reader is told of before they are read."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A reader that can be told ahead what to read next, such as a remote one, which reads several shards at once."""

    def expect(self, refs: Iterable[ShardRef]) -> None:
        """These will be read next, in this order."""
        ...

    def interrupt(self) -> None:
        """Wake a read that waits for a reader to become available."""
        ...


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """What determines the order of records in an epoch."""

    seed: int
    epoch: int
    shuffle: bool
    mixed: int
    """Shards that are open at once, their records mixed; 1 for one after the other."""
    short: bool
    """Steps with fewer records than asked for are handed out at the end."""
    open_bytes: int = 0
    """No further shard is opened to be mixed while those that are take so much; 0: whatever they take."""


@dataclass(slots=True)
class ReadyStep:
    """One step of this worker, decoded."""

    parts: list[tuple[Any, int]]
    """Micro-batches as the script gets them, each with its number of samples."""
    offer: StepOffer
    pieces: tuple[RecordRange, ...]
    """Where its records are from."""
    redo: Replay | None = None
    """The push of a trainer that is gone, if it is made once more of this."""


@dataclass(frozen=True, slots=True)
class EpochFiles:
    """The list of files an epoch consists of (``data_service.file_list``)."""

    version: int
    shards: int
    digest: str
    records: int


@dataclass
class LeasedShards:
    """The shards a worker holds in an epoch. They outlive a prefetcher: the next one goes on from here."""

    leases: dict[int, Given] = field(default_factory=dict)
    """Shards that have not been handed out to the end, and how far they have."""
    complete: dict[int, int] = field(default_factory=dict)
    """Announced to their end and not yet reported: records by shard."""
    reported: set[int] = field(default_factory=set)
    announced: set[int] = field(default_factory=set)
    """Announced in part or whole, and not handed out to the end."""
    failed: list[tuple[int, int, str]] = field(default_factory=list)
    """Not yet reported."""
    unreached: set[int] = field(default_factory=set)
    """Those of ``failed`` whose file could not be reached: nothing is known against it."""
    asked: PendingRequest | None = None
    """A request for more that is on its way."""

    def announce(self, segments: Iterable[ShardProgress]) -> None:
        """All ranks have been told that these will be handed out."""
        for segment in segments:
            self.announced.add(segment.shard)
            if segment.complete and segment.shard not in self.reported:
                self.complete[segment.shard] = segment.upto

    def hand_out(self, segments: Iterable[ShardProgress]) -> None:
        """The script gets these."""
        for segment in segments:
            given = self.leases.get(segment.shard)
            if given is not None and segment.complete:
                del self.leases[segment.shard]
                self.announced.discard(segment.shard)
            elif given is not None:
                self.leases[segment.shard] = Given(given.shard, segment.upto)

    def report(self) -> tuple[list[tuple[int, int]], list[tuple[int, int, str]], set[int]]:
        """What is complete, what has failed, and what of that was out of reach; each is said once."""
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
        reader: Reader,
        order: ReadOrder,
        step_sizes: StepSizes,
        *,
        prefetch: int,
        columns: Callable[[Any], Columns],
        finish: Callable[[Columns], Any],
        over: Callable[[], bool],
        held: LeasedShards | None = None,
    ) -> None:
        """``columns``: a table as arrays. ``finish``: makes of a micro-batch's arrays what the script gets.
        ``held``: what is left from a prefetcher before this one."""
        self.step_sizes = step_sizes
        self.held = held or LeasedShards()
        self.troubles: list[str] = []
        """Why shards could not be read."""
        self._client = client
        self._reader = reader
        self._order = order
        self._prefetch = prefetch
        self._columns = columns
        self._finish = finish
        self._over = over
        self._changed = threading.Condition()
        self._steps: collections.deque[ReadyStep] = collections.deque()
        self._supply = Supply.MORE
        self.known = EpochFiles(0, 0, "", -1)
        """The list of files of this epoch, as told with the last shards."""
        self._idle = False
        self._asked_again = 0
        self._error: BaseException | None = None
        self._stopped = False
        # Only the thread:
        self._unread: collections.deque[Given] = collections.deque(self.held.leases.values())
        self._open: list[Cursor] = []
        self._refs: dict[int, ShardRef] = {}
        self._loose: list[ShardProgress] = []
        self._shards_read = 0
        self._began_s = _CLOCK.now_s()
        self._thread = threading.Thread(target=self._run, name="edl-data", daemon=True)

    # --- the training thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self, wait: bool = False) -> None:
        """Let the thread end; what it has ready is dropped. ``wait`` until it has."""
        with self._changed:
            self._stopped = True
            self._steps.clear()
            self._changed.notify_all()
        while self._thread.is_alive():
            if isinstance(self._reader, ReadsAhead):
                self._reader.interrupt()
            if not wait:
                return
            self._thread.join(LOOK_S)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def ready(self, check: Callable[[], None]) -> tuple[list[ReadyStep], Supply]:
        """The steps that are ready, at least one, and they stay here; or none, and what may still come, as the Master
        says now. Blocks until one of the two is known. ``check`` raises when the round is over; raises what the
        thread has raised."""
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
                    # What it has heard last may be old: since then steps have been announced.
                    asked, self._idle = True, False
                    self._asked_again += 1
                    self._changed.notify_all()
                    continue
                self._changed.wait(LOOK_S)
                check()

    def pop(self) -> ReadyStep:
        """The next step."""
        with self._changed:
            step = self._steps.popleft()
            self.held.hand_out(step.offer.taken)
            self._changed.notify_all()
            return step

    def next_redo(self) -> Replay | None:
        """Of the next step."""
        with self._changed:
            return self._steps[0].redo if self._steps else None

    def first(self) -> Any:
        """What the next step's first micro-batch holds, if it is ready; else None. It stays here."""
        with self._changed:
            return self._steps[0].parts[0][0] if self._steps else None

    def announce(self, segments: Sequence[ShardProgress]) -> None:
        """All ranks know now that these steps will be handed out."""
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
        except BaseException as error:  # noqa: BLE001 - handed to the thread that trains
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
        if isinstance(answer, Refused):
            raise DataError(f"data set {self._client.dataset}: {answer.text}")
        assert isinstance(answer, Granted), "the client matches answers with questions"  # noqa: S101
        leases: Sequence[Given] = answer.leases
        with self._changed:
            for given in leases:
                self.held.leases[given.shard.index] = given
            self._supply = Supply.MORE if leases else Supply(answer.state)
            if answer.version >= self.known.version:
                self.known = EpochFiles(answer.version, answer.shards, answer.digest, answer.records)
        if leases and answer.ended:
            leases = self._take_over(leases, answer.ended)
        self._unread.extend(leases)

    def _take_over(self, leases: Sequence[Given], trainers_gone: Sequence[int]) -> Sequence[Given]:
        """What trainers that are gone had begun with these shards comes first. Returns what is left to read."""
        epoch, name = self._order.epoch, self._client.dataset
        found = plan(leases, trainers.ended(trainers_gone, name, epoch))
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
        # Those that one shard is home to follow one another.
        given_up = {
            home
            for home, redos in itertools.groupby(found.redos, lambda ended: ended.home)
            if not self._make_redos(home, list(redos))
        }
        return [given for given in found.leases if given.shard.index not in given_up]

    def _make_redos(self, home: int, redos: Sequence[LostTrainer]) -> bool:
        """Make steps of the pushes that this shard is home to. False when some of their records cannot be read: then
        the shard has failed, as if it were the one that cannot be read, and whoever gets it next tries all of them
        again. Everything is read before the first step: a part of a push must not go out under its number."""
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
        """The batches of a push, of the very same records."""
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
        """Ask for more while there is still some left."""
        want = self._enough()
        if self.held.asked is None and self._supply is Supply.MORE and len(self._unread) < max(1, want // 2):
            self._ask(want)

    def _enough(self) -> int:
        # The first ones fill the queue, and say little about the speed of training.
        elapsed_s = max(AHEAD_S, _CLOCK.now_s() - self._began_s)
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
        """Whether one more is to be opened. Those that cannot give their part of a step are as good as read."""
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
        """A shard, and its number of records, of which the first ``upto`` have been used."""
        table = self._reader.read(ref)
        columns, records = self._columns(table), int(table.num_rows)
        if upto > records:
            raise DataError(f"{ref.file}, shard {ref.index}: {records} records, of which {upto} are consumed")
        return columns, records

    def _not_read(self, error: Exception, ref: ShardRef, leased: int, upto: int) -> None:
        """This shard cannot be read, so the leased one, the same or one whose push is made of it, is given back, used
        up to there: the Master counts attempts, and leaves it out in the end. Raises what is not the data's fault."""
        if isinstance(error, UnsupportedData):
            text = str(error)
            raise UnsupportedData(text if ref.file in text else f"{ref.file}, shard {ref.index}: {text}") from error
        if isinstance(error, EdlError) and not isinstance(error, DataError):
            raise error
        if self._ended():
            return  # it has been interrupted; the lease is kept for the prefetcher after this one
        reason = str(error) if isinstance(error, EdlError) else f"{ref.file}, shard {ref.index}: {error}"
        if leased != ref.index:
            reason = f"a push of shard {leased} cannot be made again: {reason}"
        self.troubles.append(reason)
        if leased in self.held.announced:
            # It is cut again, and was read before. The Master may count it as done, and would give it to nobody.
            raise DataError(f"{reason}; and it has been announced to all workers") from error
        with self._changed:
            self.held.leases.pop(leased, None)
            self.held.failed.append((leased, upto, reason))
            if isinstance(error, UnreachableData):
                self.held.unreached.add(leased)

    def _order_of(self, ref: ShardRef) -> int | None:
        return order_of(self._order.seed, self._order.epoch, ref.index) if self._order.shuffle else None

    def _nothing_left(self, shard: int, upto: int) -> None:
        """There is no record to announce its end with: that goes along with the next step, if there is one."""
        end = ShardProgress(shard, upto, True)
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
        """Nothing to read. What is open is too little for a whole step."""
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
