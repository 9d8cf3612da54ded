"""The client of the lease machine, per worker, data set and round. Sends one request at a time; repeats all after a
failover."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from data_service.loader.deps import PROCESS, LoaderDeps
from data_service.loader.transport import MasterTransport
from data_service.protocol import messages
from data_service.protocol.messages import (
    Ack,
    Commit,
    DataRefused,
    Done,
    Gone,
    Lease,
    LeasesGranted,
    NextEpoch,
    Open,
    Opened,
    RegisterFiles,
    Rollback,
)
from edl.errors import DataError
from edl.threads import ThreadEvent

LOOK_S = 0.05
"""Waiting threads check at this interval, in seconds, whether the round is over."""
_Answer = TypeVar("_Answer")


class PendingRequest:
    """A request on its way, and its answer once it has arrived."""

    def __init__(self, message: Any, done: ThreadEvent, *, again: bool = False) -> None:
        self.message = message
        self.again = again
        """A repetition after a failover; no thread waits for its answer."""
        self.only_asks = False
        """A question for the present epoch: that this is still the one begins nothing."""
        self.answer: Any = None
        self.done = done


class LeaseClient:
    """Sends one request at a time and queues the others until its answer arrives. Thread-safe."""

    def __init__(
        self,
        transport: MasterTransport,
        dataset: str,
        number: int,
        rank: int,
        position: Callable[[], str],
        where: Callable[[], tuple[int, int]] | None = None,
        deps: LoaderDeps = PROCESS,
        *,
        independent: bool = False,
    ) -> None:
        """``number``: of the round. ``position``: returns what was announced to all ranks, which rank 0 sends.
        ``where``: for a worker that outlives rounds, returns the current round and rank."""
        self.dataset = dataset
        self.deps = deps
        self.independent = independent
        self._transport = transport
        self._where = where or (lambda: (number, rank))
        self._lasting = where is not None
        self._number = number
        self._rank = rank
        self._position = position
        self._lock = threading.Lock()
        self._queue: collections.deque[PendingRequest] = collections.deque()
        self._sent: PendingRequest | None = None
        self._closed = False
        self.ended = deps.threads.event()
        """Set when the client is closed or its round is over."""
        self._register: RegisterFiles | None = None
        self._open: Open | None = None
        self._granted: set[int] = set()
        self._finished: set[int] = set()
        self._returned: dict[int, int] = {}
        self._acked: dict[int, int] = {}
        """Independent mode: acknowledged records of begun shards."""
        self._unkept: list[tuple[int, Ack]] = []
        """Independent mode: acknowledgements that may not be in the store yet, with their numbers (0: not known
        yet)."""
        self._uncounted: dict[int, tuple[int, bool]] = {}
        """Independent mode: acknowledgements of this epoch that the Master refused, although the records have been
        used."""
        self._acks_due: list[PendingRequest] = []
        """Independent mode: unanswered acknowledgements."""
        self._fence = 0
        self.on_message: Callable[[Any], None] | None = None
        """Receives unsolicited messages. Must not block."""
        transport.listen(dataset, self._heard)

    # --- requests ----------------------------------------------------------------------------------------------------

    def register(self, manifest: bytes, options: messages.DataSetOptions) -> PendingRequest:
        """Rank 0: register the shards."""
        self._register = RegisterFiles(0, self.dataset, manifest, options)
        return self._ask(self._register)

    def open(self, epoch: int, digest: str) -> PendingRequest:
        """Open the data set in this round."""
        position = self._position() if self._rank == 0 else ""
        with self._lock:
            trainer = self.deps.trainers.number if self._lasting else 0
            self._open = Open(0, self.dataset, self._rank, epoch, digest=digest, fence=self._fence, trainer=trainer)
        return self._ask(replace(self._open, ledger=position))

    def lease(
        self,
        epoch: int,
        want: int,
        finished: Iterable[tuple[int, int]] = (),
        failed: Iterable[tuple[int, int, str]] = (),
        unreached: Iterable[int] = (),
    ) -> PendingRequest:
        """Request more shards and report on earlier ones."""
        message = Lease(0, self.dataset, epoch, want, tuple(finished), tuple(failed), messages.ranges(unreached))
        with self._lock:
            if self._current(epoch):  # otherwise it is late, from a thread that reads for the previous epoch
                for shard, upto, _ in message.failed:
                    self._granted.discard(shard)
                    self._returned[shard] = upto
                self._finished.update(shard for shard, _ in message.finished)
        return self._ask(message)

    def next_epoch(self, epoch: int, dropped: int, tell: bool) -> PendingRequest | None:
        """Switch to another epoch. ``tell``: also request it from the Master (rank 0). In independent mode the switch
        takes place with the Master's answer: until then a new Master needs the acknowledgements of the old epoch."""
        if not self.independent:
            with self._lock:
                self._enter(epoch)
        return self._ask(NextEpoch(0, self.dataset, epoch, dropped)) if tell else None

    def begun_epoch(self, epoch: int) -> PendingRequest:
        """Independent mode: switch to the epoch that others have begun, if that is not ``epoch``, the present one."""
        return self._ask(NextEpoch(0, self.dataset, epoch, 0), only_asks=True)

    def _enter(self, epoch: int) -> None:
        self._granted.clear()
        self._finished.clear()
        self._returned.clear()
        self._acked.clear()
        self._uncounted.clear()
        if self._open is not None:
            self._open = replace(self._open, epoch=epoch)

    def rollback(self, name: str, ledger: str, history: int) -> PendingRequest:
        """Independent mode: return to a position, once per history. Afterwards the data set must be opened again."""
        return self._ask(Rollback(0, self.dataset, name, ledger, history))

    def commit(self, name: str) -> PendingRequest:
        """Independent mode: store the present position under a name."""
        return self._ask(Commit(0, self.dataset, name))

    def gone(self) -> PendingRequest:
        """Independent mode: leave; leased shards go to other workers."""
        with self._lock:
            self._granted.clear()
            self._acked.clear()
        return self._ask(Gone(0, self.dataset))

    def leave(self) -> None:
        """Mode "steps": the data set is closed on this worker, so others must execute orders to add files. Ignores the
        answer."""
        self.tell(Gone(self.deps.numbers.next(), self.dataset))

    def ask(self, message: Any) -> PendingRequest:
        """Send any other request, such as those about the file list."""
        return self._ask(message)

    def withdraw(self, asked: PendingRequest) -> None:
        """Stop waiting for an answer."""
        with self._lock:
            if self._sent is asked:
                self._sent = None
            elif asked in self._queue:
                self._queue.remove(asked)

    def ack(self, epoch: int, shards: tuple[tuple[int, int, bool], ...]) -> None:
        """Independent mode: acknowledge consumed records."""
        message = Ack(0, self.dataset, epoch, shards)
        with self._lock:
            for shard, upto, complete in shards:
                if complete:
                    self._granted.discard(shard)
                    self._acked.pop(shard, None)
                else:
                    self._acked[shard] = upto
            self._unkept.append((0, message))
            asked = self._pending(message)
            self._queue.append(asked)
            self._acks_due = [*(one for one in self._acks_due if not one.done.is_set()), asked]
        self._go_on()

    def unkept(self) -> tuple[tuple[int, int, bool], ...]:
        """Independent mode: used records of this epoch that may not be in the store yet, or never will be."""
        with self._lock:
            found = {shard: (shard, upto, complete) for shard, upto, complete in self._acks()}
            for shard, one in self._uncounted.items():
                found[shard] = max(found.get(shard, (shard, 0, False)), (shard, *one))
            return tuple(found.values())

    def all_counted(self, check: Callable[[], None]) -> None:
        """Wait until every acknowledgement has been answered, or was included in a later ``Open`` that has."""
        while True:
            with self._lock:
                due = [one for one in self._acks_due if not one.done.is_set()]
                self._acks_due = due
            if not due:
                return
            due[-1].done.wait(LOOK_S)
            check()

    def tell(self, message: Any) -> None:
        """Send a message that has no answer."""
        if not self._closed:
            self._transport.say(messages.encode(message), self._where()[0])

    @property
    def heard(self) -> bool:
        """True while answers arrive here, that is, no other client listens for the same data set."""
        return self._transport.listens(self.dataset, self._heard)

    def wait(self, asked: PendingRequest, check: Callable[[], None], kind: type[_Answer]) -> _Answer:
        """Wait for an answer of type ``kind``. ``check`` is called periodically and raises when the round is over.
        Raises ``DataError`` if the request is refused."""
        while not asked.done.wait(LOOK_S):
            check()
        if isinstance(asked.answer, kind):
            return asked.answer
        if isinstance(asked.answer, DataRefused):
            raise DataError(f"data set {self.dataset}: {asked.answer.text}")
        raise DataError(
            f"data set {self.dataset}: {asked.answer!r:.200} is not an answer to {type(asked.message).__name__}"
        )

    def epoch_after(self, asked: PendingRequest, check: Callable[[], None]) -> int:
        """Independent mode: wait for the answer of ``next_epoch``, and return the epoch in which to read. That is the
        present one if the Master knows of records that have not been counted. Raises ``DataError``."""
        while not asked.done.wait(LOOK_S):
            check()
        if isinstance(asked.answer, DataRefused) and asked.answer.kind == "unfinished":
            return int(asked.message.epoch) - 1
        return self.wait(asked, check, Done).epoch

    def close(self) -> None:
        """Send no more, and drop waiting requests."""
        with self._lock:
            self._closed = True
            self.ended.set()
            self._queue.clear()
        self._transport.forget(self.dataset, self._heard)

    # --- implementation ----------------------------------------------------------------------------------------------

    def _pending(self, message: Any, *, again: bool = False) -> PendingRequest:
        return PendingRequest(message, self.deps.threads.event(), again=again)

    def _ask(self, message: Any, *, only_asks: bool = False) -> PendingRequest:
        asked = self._pending(message)
        asked.only_asks = only_asks
        with self._lock:
            self._queue.append(asked)
        self._go_on()
        return asked

    def _go_on(self) -> None:
        """Send the next request unless an answer is pending."""
        with self._lock:
            if self._sent is not None or not self._queue or self._closed:
                return
            asked = self._sent = self._queue.popleft()
            self._number, self._rank = self._where()
            asked.message = replace(asked.message, id=self.deps.numbers.next())
            if isinstance(asked.message, Open):
                asked.message = replace(asked.message, rank=self._rank)
            text, number = messages.encode(asked.message), self._number
        self._transport.say(text, number)

    def _heard(self, message: Any) -> None:
        if message is None:
            self._say_again()
        elif getattr(message, "id", None) is None:
            if self.on_message is not None:
                self.on_message(message)
        else:
            self._answered(message)
        self._go_on()

    def _answered(self, message: Any) -> None:
        with self._lock:
            asked = self._sent
            if asked is None or asked.message.id != message.id:
                return  # a late answer to a request that was sent again
            stale = isinstance(message, DataRefused) and message.kind == "stale"
            if stale and self._lasting and self._where()[0] == self._number:
                return  # the next round will be announced, and everything is sent again
            if not (stale and self._lasting):
                self._sent = None
            if isinstance(message, DataRefused) and message.kind == "old":
                self.deps.numbers.rise_above(message.last)
                self._queue.appendleft(asked)
                return
            if stale and not self._lasting:
                self._closed = True  # the end of this round will be announced
                return
            unknown = isinstance(message, DataRefused) and message.kind == "unopened" and self._open is not None
            if unknown:
                self._queue.appendleft(asked)
        if unknown or stale:
            self._say_again()  # there is a new Master, which will be announced
            return
        with self._lock:
            if (
                isinstance(message, LeasesGranted)
                and isinstance(asked.message, Lease)
                and self._current(asked.message.epoch)
            ):
                for given in message.leases:
                    self._granted.add(given.shard.index)
                    self._returned.pop(given.shard.index, None)
                    if self.independent and given.upto:  # a new Master needs to know its progress
                        self._acked[given.shard.index] = given.upto
            self._remember(asked, message)
        asked.answer = message
        asked.done.set()
        if asked.again and isinstance(message, DataRefused):
            # Pass the refusal on to the waiting requests.
            with self._lock:
                waiting, self._queue = list(self._queue), collections.deque()
            for one in waiting:
                one.answer = message
                one.done.set()

    def _remember(self, asked: PendingRequest, message: Any) -> None:
        request = asked.message
        if isinstance(message, Opened):
            self._fence = message.fence
            fresh = not (self._granted or self._acked or self._unkept)
            if self.independent and self._open is not None and fresh:
                self._open = replace(self._open, epoch=message.epoch)  # starts in the others' epoch
            lost = {shard for shard, _ in message.refused}
            self._keep_refused(lost, self._acks())
            for shard in lost:
                self._acked.pop(shard, None)
            self._granted -= lost
            # This Open repeated all but queued ones, and another Master counts from the last number that was stored.
            queued = {one.message.shards for one in self._queue if isinstance(one.message, Ack)}
            self._unkept = [(0 if ack.shards in queued else message.number, ack) for _, ack in self._unkept]
            for one in self._acks_due:
                if one is not self._sent and one not in self._queue:
                    one.done.set()  # it was included in the Open
        if isinstance(request, NextEpoch) and isinstance(message, Done) and self.independent:
            stays = asked.only_asks and message.epoch == request.epoch
            if not stays:
                self._enter(message.epoch)
        if isinstance(request, Ack):
            number = getattr(message, "number", -1)  # -1: refused, nothing to be stored
            lost = (
                {shard for shard, _ in message.refused}
                if isinstance(message, Done)
                else {one[0] for one in request.shards}
            )
            if self._current(request.epoch):
                self._keep_refused(lost, request.shards)
            self._unkept = [(number if ack.shards == request.shards else old, ack) for old, ack in self._unkept]
        kept = getattr(message, "kept", 0)
        self._unkept = [(number, ack) for number, ack in self._unkept if not number or number > kept]

    def _keep_refused(self, shards: set[int], acks: Iterable[tuple[int, int, bool]]) -> None:
        for shard, upto, complete in acks:
            if shard in shards:
                self._uncounted[shard] = max(self._uncounted.get(shard, (0, False)), (upto, complete))

    def _acks(self) -> tuple[tuple[int, int, bool], ...]:
        found = {shard: (upto, False) for shard, upto in self._acked.items()}
        for _, ack in self._unkept:
            if self._current(ack.epoch):
                for shard, upto, complete in ack.shards:
                    found[shard] = max(found.get(shard, (0, False)), (upto, complete))
        return tuple((shard, upto, complete) for shard, (upto, complete) in found.items())

    def _current(self, epoch: int) -> bool:
        return self._open is None or self._open.epoch == epoch

    def _say_again(self) -> None:
        """There is a new Master or a new stream: messages may have been lost, so send all that matters again."""
        position = self._position() if self._open is not None and self._rank == 0 else ""
        with self._lock:
            if self._closed:
                return
            pending = [asked for asked in (self._sent, *self._queue) if asked is not None and not asked.again]
            pending = [asked for asked in pending if not isinstance(asked.message, Ack)]  # included in Open
            kinds = {type(asked.message) for asked in pending}
            again: list[PendingRequest] = []
            if self._register is not None and RegisterFiles not in kinds:
                again.append(self._pending(self._register, again=True))
            if self._open is not None and Open not in kinds:
                granted = self._granted
                message = replace(
                    self._open,
                    ledger=position,
                    granted=messages.ranges(granted),
                    finished=messages.ranges(self._finished & granted),
                    returned=tuple(sorted(self._returned.items())),
                    acks=self._acks(),
                    fence=self._fence,
                )
                again.append(self._pending(message, again=True))
            self._sent = None
            self._queue = collections.deque(again + pending)
