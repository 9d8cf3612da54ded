"""The thread behind a loader: leases shards, reads them, cuts steps and keeps some of them ready."""

from __future__ import annotations

import collections
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from data_service.client import LOOK_S, Asked, Client
from data_service.cutting import Columns, Cursor, Cut, micro_batches, order_of, take
from data_service.manifest import ShardRef
from data_service.readers import Reader
from data_service.window import Ready, Segment, Supply
from data_service.wire import Given, Granted, Refused
from edl.adapters.clock import SystemClock
from edl.errors import DataError, EdlError

_CLOCK = SystemClock()
AHEAD_S = 1.0
"""So long should the shards last that are asked for at once."""
MOST_SHARDS = 1024
"""In one lease."""
MOST_AHEAD = 8
"""Shards that a reader is told of before they are read."""


@runtime_checkable
class Ahead(Protocol):
    """A reader that reads elsewhere, and several shards at once."""

    def expect(self, refs: Iterable[ShardRef]) -> None:
        """These will be read next, in this order."""
        ...

    def interrupt(self) -> None:
        """Whoever waits until somebody can read need not wait any more."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """What decides which records come when."""

    seed: int
    epoch: int
    shuffle: bool
    mixed: int
    """Shards that are open at once, their records mixed; 1 for one after the other."""
    short: bool
    """Steps with fewer records than asked for are handed out at the end."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some records of a shard, in its order of the epoch."""

    ref: ShardRef
    begin: int
    upto: int


@dataclass(slots=True)
class ReadyStep:
    """One step of this worker, decoded."""

    parts: list[tuple[Any, int]]
    """Micro-batches as the script gets them, each with its number of samples."""
    offer: Ready
    pieces: tuple[Piece, ...]
    """Where its records are from."""


@dataclass
class Held:
    """What a worker has of an epoch: it begins again from there when its steps are to be cut in another way."""

    leases: dict[int, Given] = field(default_factory=dict)
    """Shards that have not been handed out to the end, and how far they have."""
    complete: dict[int, int] = field(default_factory=dict)
    """Announced to their end and not yet reported: records by shard."""
    reported: set[int] = field(default_factory=set)
    announced: set[int] = field(default_factory=set)
    """Announced in part or whole, and not handed out to the end."""
    failed: list[tuple[int, int, str]] = field(default_factory=list)
    """Not yet reported."""
    asked: Asked | None = None
    """A request for more that is on its way."""

    def announce(self, segments: Iterable[Segment]) -> None:
        """All ranks have been told that these will be handed out."""
        for segment in segments:
            self.announced.add(segment.shard)
            if segment.complete and segment.shard not in self.reported:
                self.complete[segment.shard] = segment.upto

    def hand_out(self, segments: Iterable[Segment]) -> None:
        """The script gets these."""
        for segment in segments:
            given = self.leases.get(segment.shard)
            if given is not None and segment.complete:
                del self.leases[segment.shard]
                self.announced.discard(segment.shard)
            elif given is not None:
                self.leases[segment.shard] = Given(given.shard, segment.upto)

    def report(self) -> tuple[list[tuple[int, int]], list[tuple[int, int, str]]]:
        """What is complete and what has failed; each is said once."""
        complete, self.complete = list(self.complete.items()), {}
        failed, self.failed = self.failed, []
        self.reported.update(shard for shard, _ in complete)
        return complete, failed


class Feed:
    """One epoch of one round. The thread ends by itself when it is stopped, or when ``over`` says so."""

    def __init__(
        self,
        client: Client,
        reader: Reader,
        order: Order,
        cut: Cut,
        *,
        prefetch: int,
        columns: Callable[[Any], Columns],
        finish: Callable[[Columns], Any],
        over: Callable[[], bool],
        held: Held | None = None,
    ) -> None:
        """``columns``: a table as arrays. ``finish``: makes of a micro-batch's arrays what the script gets.
        ``held``: what is left from a feed before this one."""
        self.cut = cut
        self.held = held or Held()
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
        self._idle = False
        self._asked_again = 0
        self._error: BaseException | None = None
        self._stopped = False
        # Only the thread:
        self._unread: collections.deque[Given] = collections.deque(self.held.leases.values())
        self._open: list[Cursor] = []
        self._refs: dict[int, ShardRef] = {}
        self._loose: list[Segment] = []
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
            if isinstance(self._reader, Ahead):
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

    def first(self) -> Any:
        """What the next step's first micro-batch holds, if it is ready; else None. It stays here."""
        with self._changed:
            return self._steps[0].parts[0][0] if self._steps else None

    def announce(self, segments: Sequence[Segment]) -> None:
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
                if sum(cursor.left for cursor in self._open) >= self.cut.total:
                    self._make_step(self.cut.total)
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
        with self._changed:
            for given in answer.leases:
                self.held.leases[given.shard.index] = given
            self._supply = Supply.MORE if answer.leases else Supply(answer.state)
        self._unread.extend(answer.leases)

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
            complete, failed = self.held.report()
        self.held.asked = self._client.lease(self._order.epoch, want, complete, failed)

    def _open_shards(self) -> None:
        while self._unread and len(self._open) < self._order.mixed and not self._ended():
            self._open_shard(self._unread.popleft())
        enough = self.cut.total
        while self._unread and sum(one.left for one in self._open) < enough and not self._ended():
            self._open_shard(self._unread.popleft())

    def _open_shard(self, given: Given) -> None:
        ref, upto = given.shard, given.upto
        try:
            if isinstance(self._reader, Ahead):
                self._reader.expect([ref, *(one.shard for one in itertools.islice(self._unread, MOST_AHEAD))])
            table = self._reader.read(ref)
            columns, records = self._columns(table), int(table.num_rows)
            if upto > records:
                raise DataError(f"{ref.file}, shard {ref.index}: {records} records, of which {upto} are consumed")
        except (EdlError, OSError, ValueError, KeyError) as error:
            if isinstance(error, EdlError) and not isinstance(error, DataError):
                raise
            if self._ended():
                return  # it has been interrupted; the lease is kept for the feed after this one
            reason = str(error) if isinstance(error, EdlError) else f"{ref.file}, shard {ref.index}: {error}"
            self.troubles.append(reason)
            if ref.index in self.held.announced:
                # It is cut again, and was read before. The Master may count it as done, and would give it to nobody.
                raise DataError(f"{reason}; and it has been announced to all workers") from error
            with self._changed:
                self.held.leases.pop(ref.index, None)
                self.held.failed.append((ref.index, upto, reason))
            return
        self._shards_read += 1
        if records == upto:
            self._nothing_left(ref.index, upto)
            return
        order = order_of(self._order.seed, self._order.epoch, ref.index) if self._order.shuffle else None
        self._refs[ref.index] = ref
        self._open.append(Cursor(ref.index, columns, records, upto, order))

    def _nothing_left(self, shard: int, upto: int) -> None:
        """There is no record to announce its end with: that goes along with the next step, if there is one."""
        end = Segment(shard, upto, True)
        self._loose.append(end)
        with self._changed:
            self.held.announce([end])
            self.held.hand_out([end])

    def _make_step(self, count: int) -> None:
        mixed = self._order.mixed > 1
        begins = {cursor.shard: cursor.upto for cursor in self._open}
        columns, segments = take(self._open, count, mixed, self._order.seed, self._order.epoch)
        pieces = tuple(Piece(self._refs[one.shard], begins[one.shard], one.upto) for one in segments)
        self._open = [cursor for cursor in self._open if cursor.left]
        parts = []
        for part, samples in micro_batches(columns, count, self.cut.sizes):
            parts.append((self._finish(part), samples))
        loose, self._loose = self._loose, []
        step = ReadyStep(parts, Ready(count, (*segments, *loose)), pieces)
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
