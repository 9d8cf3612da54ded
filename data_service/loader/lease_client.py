"""The lease machine's client for a worker, data set and round: one request at a time, all repeated after a failover."""

from __future__ import annotations

import collections
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from data_service.loader.trainers import trainers
from data_service.loader.transport import MasterTransport
from data_service.protocol import messages
from data_service.protocol.messages import (
    Ack,
    Commit,
    Done,
    Gone,
    Granted,
    Lease,
    NextEpoch,
    Open,
    Opened,
    Refused,
    Register,
    Rollback,
)
from edl.errors import DataError

LOOK_S = 0.05
"""Whoever waits looks so often whether the round is over."""
_Answer = TypeVar("_Answer")


class PendingRequest:
    """A request on its way, and its answer once it has arrived."""

    def __init__(self, message: Any, *, again: bool = False) -> None:
        self.message = message
        self.again = again
        """A repetition after a failover; no thread waits for its answer."""
        self.answer: Any = None
        self.done = threading.Event()


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
    ) -> None:
        """``number``: of the round. ``position``: what is announced to all ranks, which rank 0 has to say. ``where``:
        for a worker that goes on while rounds change, the round and its rank as they are now."""
        self.dataset = dataset
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
        self.ended = threading.Event()
        """It is closed, or its round is over."""
        self._register: Register | None = None
        self._open: Open | None = None
        self._granted: set[int] = set()
        self._finished: set[int] = set()
        self._returned: dict[int, int] = {}
        self._acked: dict[int, int] = {}
        """Independent mode: acknowledged records of shards that are begun."""
        self._unkept: list[tuple[int, Ack]] = []
        """Independent mode: acknowledgements that may not be stored yet, with their numbers; 0 until it is known."""
        self._uncounted: dict[int, tuple[int, bool]] = {}
        """Independent mode: acknowledgements of this epoch that the Master refused; the records are used anyway."""
        self._acks_due: list[PendingRequest] = []
        """Independent mode: acknowledgements that nobody has answered yet."""
        self._fence = 0
        self.on_news: Callable[[Any], None] | None = None
        """Takes what is told without having been asked for. Must not block."""
        transport.listen(dataset, self._heard)

    # --- asking ------------------------------------------------------------------------------------------------------

    def register(self, manifest: bytes, options: messages.Options) -> PendingRequest:
        """Rank 0: these are the shards."""
        self._register = Register(0, self.dataset, manifest, options)
        return self._ask(self._register)

    def open(self, epoch: int, digest: str) -> PendingRequest:
        """Take part in this round."""
        position = self._position() if self._rank == 0 else ""
        with self._lock:
            trainer = trainers.number if self._lasting else 0
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
        """Ask for more shards, and say what became of earlier ones."""
        message = Lease(0, self.dataset, epoch, want, tuple(finished), tuple(failed), messages.ranges(unreached))
        with self._lock:
            if self._current(epoch):  # else it comes late, from a thread that reads for the epoch before
                for shard, upto, _ in message.failed:
                    self._granted.discard(shard)
                    self._returned[shard] = upto
                self._finished.update(shard for shard, _ in message.finished)
        return self._ask(message)

    def next_epoch(self, epoch: int, dropped: int, tell: bool) -> PendingRequest | None:
        """From here on it is about this epoch. ``tell``: rank 0 says so to the machine."""
        with self._lock:
            self._granted.clear()
            self._finished.clear()
            self._returned.clear()
            self._acked.clear()
            self._uncounted.clear()
            if self._open is not None:
                self._open = replace(self._open, epoch=epoch)
        return self._ask(NextEpoch(0, self.dataset, epoch, dropped)) if tell else None

    def rollback(self, name: str, ledger: str, history: int) -> PendingRequest:
        """Independent mode: back to a position, once for each history. It has to be opened again then."""
        return self._ask(Rollback(0, self.dataset, name, ledger, history))

    def commit(self, name: str) -> PendingRequest:
        """Independent mode: give the present position a name."""
        return self._ask(Commit(0, self.dataset, name))

    def gone(self) -> PendingRequest:
        """Independent mode: it takes no more part; what it has in hand goes to others."""
        with self._lock:
            self._granted.clear()
            self._acked.clear()
        return self._ask(Gone(0, self.dataset))

    def ask(self, message: Any) -> PendingRequest:
        """Anything else that has an answer."""
        return self._ask(message)

    def withdraw(self, asked: PendingRequest) -> None:
        """Do not wait for this answer any more."""
        with self._lock:
            if self._sent is asked:
                self._sent = None
            elif asked in self._queue:
                self._queue.remove(asked)

    def ack(self, epoch: int, shards: tuple[tuple[int, int, bool], ...]) -> None:
        """Independent mode: these are consumed."""
        message = Ack(0, self.dataset, epoch, shards)
        with self._lock:
            for shard, upto, complete in shards:
                if complete:
                    self._granted.discard(shard)
                    self._acked.pop(shard, None)
                else:
                    self._acked[shard] = upto
            self._unkept.append((0, message))
        asked = self._ask(message)
        with self._lock:
            self._acks_due = [one for one in self._acks_due if not one.done.is_set()]
            self._acks_due.append(asked)

    def unkept(self) -> tuple[tuple[int, int, bool], ...]:
        """Independent mode: records used in this epoch that may not be in the store yet, or never will be."""
        with self._lock:
            found = {shard: (shard, upto, complete) for shard, upto, complete in self._acks()}
            for shard, one in self._uncounted.items():
                found[shard] = max(found.get(shard, (shard, 0, False)), (shard, *one))
            return tuple(found.values())

    def all_counted(self, check: Callable[[], None]) -> None:
        """Wait until every acknowledgement has been answered, or has gone along with a later ``Open`` that has."""
        while True:
            with self._lock:
                due = [one for one in self._acks_due if not one.done.is_set()]
                self._acks_due = due
            if not due:
                return
            due[-1].done.wait(LOOK_S)
            check()

    def tell(self, message: Any) -> None:
        """What has no answer."""
        if not self._closed:
            self._transport.say(messages.encode(message), self._where()[0])

    @property
    def heard(self) -> bool:
        """Whether answers still come here: nobody else listens for the same data set."""
        return self._transport.listens(self.dataset, self._heard)

    def wait(self, asked: PendingRequest, check: Callable[[], None], kind: type[_Answer]) -> _Answer:
        """The answer. ``check`` is called again and again, and raises when the round is over. Raises ``DataError`` for
        a refusal."""
        while not asked.done.wait(LOOK_S):
            check()
        if isinstance(asked.answer, kind):
            return asked.answer
        if isinstance(asked.answer, Refused):
            raise DataError(f"data set {self.dataset}: {asked.answer.text}")
        raise DataError(
            f"data set {self.dataset}: {asked.answer!r:.200} is no answer to {type(asked.message).__name__}"
        )

    def close(self) -> None:
        """Say no more. Nothing is answered any more."""
        with self._lock:
            self._closed = True
            self.ended.set()
            self._queue.clear()
        self._transport.forget(self.dataset, self._heard)

    # --- how ---------------------------------------------------------------------------------------------------------

    def _ask(self, message: Any) -> PendingRequest:
        asked = PendingRequest(message)
        with self._lock:
            self._queue.append(asked)
        self._go_on()
        return asked

    def _go_on(self) -> None:
        """Say the next thing, unless an answer is due."""
        with self._lock:
            if self._sent is not None or not self._queue or self._closed:
                return
            asked = self._sent = self._queue.popleft()
            self._number, self._rank = self._where()
            asked.message = replace(asked.message, id=_numbers.next())
            if isinstance(asked.message, Open):
                asked.message = replace(asked.message, rank=self._rank)
            text, number = messages.encode(asked.message), self._number
        self._transport.say(text, number)

    def _heard(self, message: Any) -> None:
        if message is None:
            self._say_again()
        elif getattr(message, "id", None) is None:
            if self.on_news is not None:
                self.on_news(message)
        else:
            self._answered(message)
        self._go_on()

    def _answered(self, message: Any) -> None:
        with self._lock:
            asked = self._sent
            if asked is None or asked.message.id != message.id:
                return  # to a question that has been asked again since
            stale = isinstance(message, Refused) and message.kind == "stale"
            if stale and self._lasting and self._where()[0] == self._number:
                return  # the news of the next round is on its way, and all is said again then
            if not (stale and self._lasting):
                self._sent = None
            if isinstance(message, Refused) and message.kind == "old":
                _numbers.rise_above(message.last)
                self._queue.appendleft(asked)
                return
            if stale and not self._lasting:
                self._closed = True  # the news of the end of this round is on its way
                return
            unknown = isinstance(message, Refused) and message.kind == "unopened" and self._open is not None
            if unknown:
                self._queue.appendleft(asked)
        if unknown or stale:
            self._say_again()  # another Master, and the news of it is on its way
            return
        with self._lock:
            if isinstance(message, Granted) and isinstance(asked.message, Lease) and self._current(asked.message.epoch):
                for given in message.leases:
                    self._granted.add(given.shard.index)
                    self._returned.pop(given.shard.index, None)
                    if self._lasting and given.upto:  # another Master wants to hear how far it was
                        self._acked[given.shard.index] = given.upto
            self._remember(asked.message, message)
        asked.answer = message
        asked.done.set()
        if asked.again and isinstance(message, Refused):
            # Whoever asks next is told why.
            with self._lock:
                waiting, self._queue = list(self._queue), collections.deque()
            for one in waiting:
                one.answer = message
                one.done.set()

    def _remember(self, said: Any, message: Any) -> None:
        if isinstance(message, Opened):
            self._fence = message.fence
            fresh = not (self._granted or self._acked or self._unkept)
            if self._lasting and self._open is not None and fresh:
                self._open = replace(self._open, epoch=message.epoch)  # it begins where the others are
            lost = {shard for shard, _ in message.refused}
            self._keep_refused(lost, self._acks())
            for shard in lost:
                self._acked.pop(shard, None)
            self._granted -= lost
            for one in self._acks_due:
                if one is not self._sent and one not in self._queue:
                    one.done.set()  # it has gone along
        if isinstance(said, NextEpoch) and self._lasting and self._open is not None:
            self._open = replace(self._open, epoch=getattr(message, "epoch", self._open.epoch))
        if isinstance(said, Ack):
            number = getattr(message, "number", -1)  # -1: refused, so there is nothing to keep
            lost = (
                {shard for shard, _ in message.refused}
                if isinstance(message, Done)
                else {one[0] for one in said.shards}
            )
            if self._current(said.epoch):
                self._keep_refused(lost, said.shards)
            self._unkept = [(number if ack.shards == said.shards else old, ack) for old, ack in self._unkept]
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
                found.update({shard: (upto, complete) for shard, upto, complete in ack.shards})
        return tuple((shard, upto, complete) for shard, (upto, complete) in found.items())

    def _current(self, epoch: int) -> bool:
        return self._open is None or self._open.epoch == epoch

    def _say_again(self) -> None:
        """Another Master, or another stream to the same one: what was said may be lost."""
        position = self._position() if self._open is not None and self._rank == 0 else ""
        with self._lock:
            if self._closed:
                return
            pending = [asked for asked in (self._sent, *self._queue) if asked is not None and not asked.again]
            pending = [asked for asked in pending if not isinstance(asked.message, Ack)]  # goes along with Open
            kinds = {type(asked.message) for asked in pending}
            again: list[PendingRequest] = []
            if self._register is not None and Register not in kinds:
                again.append(PendingRequest(self._register, again=True))
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
                again.append(PendingRequest(message, again=True))
            self._sent = None
            self._queue = collections.deque(again + pending)


class _Numbers:
    """Rise over the whole life of the process, over all rounds and data sets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> int:
        """A number that has not been used, by a process before this one neither: what it asked may still be waiting
        for its answer. Drawn when it is needed, since processes may be forked from one that has loaded this."""
        with self._lock:
            self._last = (self._last or secrets.randbits(40)) + 1
            return self._last

    def rise_above(self, number: int) -> None:
        """A process in this place before has used those up to here."""
        with self._lock:
            self._last = max(self._last, number)


_numbers = _Numbers()
