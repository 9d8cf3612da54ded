"""A request to several pservers, until all of it is done: sent where the chart says, and repeated where that failed.

Nothing is asked twice at the same time: what has not been answered is repeated only when its connection has ended.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edl.adapters.clock import SystemClock
from edl.errors import EdlError, PsError
from ps.client.master_session import MasterSession
from ps.client.pool import Answer, Call, ConnectionPool
from ps.client.routing import Route, SubRequest, some_buckets, split_again
from ps.errors import Denied, RolledBack, Unreachable
from ps.protocol import messages
from ps.protocol.frames import Op
from ps.protocol.messages import NOBODY
from ps.wait import BoundedWait

LOOK_S = 0.25
PATIENCE_S = 2.0
"""A pserver that has to wait for somebody says so after this: a trainer that is to stop for a cut is held up so long
at most."""
LATE_S = 3.0
"""An answer that is later than that by so much makes the pserver suspect."""
LEAST_S, MOST_S = 0.02, 0.5
"""Between two tries: the first pause, and the longest."""
MOST_BUSY_S = 5.0
_now_s = SystemClock().now_s


class PserverRequest(Protocol):
    """A request that is split over pservers: what to send to each, and what to do with the answers."""

    keys: Sequence[NDArray[np.int64]]
    """Of each part."""
    clocked: bool
    """Every pserver that owns a bucket has to hear of it, also without keys."""

    def call(self, sub_request: SubRequest, route: Route) -> Call:
        """The request."""
        ...

    def landed(self, sub_request: SubRequest, head: Mapping[str, Any], body: memoryview) -> None:
        """It is done. Called on any thread, several at a time; the body is void afterwards."""
        ...


@dataclass(slots=True)
class _RequestAttempt:
    """One sub-request under way, or held back until it is sent again."""

    sub_request: SubRequest
    version: int
    """Of the chart by which it was made."""
    why: str = "no answer yet"
    tries: int = 0
    ready_s: float = 0.0
    sent_s: float = 0.0
    chart: bool = False
    """A newer chart ends the waiting."""
    others: bool = False
    """It waits for other trainers."""
    late: bool = False
    call: Call | None = None
    """The last one by which it was sent."""


@dataclass
class FanOut:
    """One request, split over pservers. For one use."""

    pool: ConnectionPool
    session: MasterSession
    request: PserverRequest
    purpose: str
    patience: BoundedWait
    stand: Callable[[], None] | None = None
    """Called when the Master wants this trainer to stop, and all there is to do waits for trainers that have."""
    patience_s: float = PATIENCE_S
    _flying: dict[int, _RequestAttempt] = field(default_factory=dict)
    _held: list[_RequestAttempt] = field(default_factory=list)
    _told: set[int] = field(default_factory=set)
    _suspected: set[int] = field(default_factory=set)
    _landings: queue.SimpleQueue[tuple[int, Answer] | None] = field(default_factory=queue.SimpleQueue)
    _count: int = 0
    _began: bool = False
    """All that there was to send has been sent once."""
    _version: int = -1
    """Of the newest chart of which every owner has been told of the step."""

    def run(self, sub_requests: Sequence[SubRequest], route: Route) -> None:
        """Returns when all is done. Raises ``PsError`` for a refusal and at the deadline, ``RolledBack``."""
        end = self.session.listen(lambda: self._landings.put(None))
        try:
            for sub_request in sub_requests:
                self._send(_RequestAttempt(sub_request, route.version), route)
            self._tell_all(route)
            self._began = True
            while self._flying or self._held:
                self._launch()
                self._land()
                self._tell_all(self.session.route)
            self.patience.over()
        finally:
            end()
            self._give_up()

    def _give_up(self) -> None:
        """Nobody may write into our memory, or apply anything, once we have left."""
        for attempt in self._flying.values():
            if attempt.call is not None:
                attempt.call.given_up = True
        if self._flying:
            self.pool.interrupt(self.purpose, [attempt.sub_request.server for attempt in self._flying.values()])
        while self._flying:
            try:
                landing = self._landings.get(timeout=1.0)
            except queue.Empty:
                return  # it is stuck in connecting, or waits its turn, and will send nothing
            if landing is not None:
                self._flying.pop(landing[0], None)

    # --- sending -----------------------------------------------------------------------------------------------------

    def _tell_all(self, route: Route) -> None:
        """Also those that have come to own buckets meanwhile: others may wait for this trainer there."""
        if not self.request.clocked or route.version == self._version:
            return
        self._version = route.version
        busy = {attempt.sub_request.server for attempt in (*self._flying.values(), *self._held)}
        for number in route.clocked:
            if number not in busy and number not in self._told:
                self._send(_RequestAttempt(SubRequest(number), route.version), route)

    def _send(self, attempt: _RequestAttempt, route: Route) -> None:
        server = route.servers.get(attempt.sub_request.server)
        if server is None:
            attempt.why, attempt.chart = "the Master has given no pserver these buckets yet", True
            self._hold(attempt, MOST_S)
            return
        call = self.request.call(attempt.sub_request, route)
        if self.request.clocked and self._began and self._told:
            call.head = {**call.head, "complete": True}  # it was applied somewhere: nobody has to be waited for
        call.deadline_s = max(0.5, min(self.patience.left_s, 1e6))
        call.patience_s = min(self.patience_s, call.deadline_s)
        self._count += 1
        number = self._count
        attempt.sent_s, attempt.late, attempt.call = _now_s(), False, call
        self._flying[number] = attempt
        try:
            self.pool.ask(self.purpose, server, call, lambda answer: self._landed(number, attempt.sub_request, answer))
        except BaseException:
            del self._flying[number]
            raise

    def _landed(self, number: int, sub_request: SubRequest, answer: Answer) -> None:
        """On the connection's thread: the body is there until this returns."""
        if answer.frame is not None and answer.frame.op is Op.OK:
            try:
                self.request.landed(sub_request, answer.head, answer.frame.body)
            except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
                answer.error = error
        self._landings.put((number, answer))

    def _hold(self, attempt: _RequestAttempt, seconds: float) -> None:
        attempt.ready_s = _now_s() + seconds
        self._held.append(attempt)

    def _launch(self) -> None:
        """Send what has been held back long enough."""
        if not self._held or self._stands():
            return
        route, now_s, held = self.session.route, _now_s(), self._held
        self._held = []
        for attempt in held:
            if attempt.ready_s > now_s and not (attempt.chart and route.version > attempt.version):
                self._held.append(attempt)
            elif route.version == attempt.version and attempt.sub_request.server != NOBODY:
                self._send(attempt, route)
            elif attempt.sub_request.items:
                self._version = -1  # it may have kept other buckets, and then still has to hear of the step
                for sub_request in split_again(route, self.request.keys, attempt.sub_request.items):
                    self._send(_RequestAttempt(sub_request, route.version, attempt.why, attempt.tries), route)
            elif attempt.sub_request.server in route.clocked:
                self._send(_RequestAttempt(attempt.sub_request, route.version, attempt.why, attempt.tries), route)

    def _stands(self) -> bool:
        """Whether to wait until all that is under way has come back, to stand; and stand then."""
        halted = self.stand is not None and self.session.halted
        # What one pserver has applied the others have to follow with.
        if not halted or (self.request.clocked and self._told) or not all(attempt.others for attempt in self._held):
            return False
        if self._flying:
            return True
        assert self.stand is not None  # noqa: S101
        self.stand()
        self.patience.moved()
        return False

    # --- what comes --------------------------------------------------------------------------------------------------

    def _land(self) -> None:
        self.session.check()
        now_s = _now_s()
        wait_s = min([LOOK_S, *(max(attempt.ready_s - now_s, 0.001) for attempt in self._held)])
        try:
            landing = self._landings.get(timeout=wait_s)
        except queue.Empty:
            self._look()
            return
        if landing is None:
            return
        attempt = self._flying.pop(landing[0])
        answer = landing[1]
        if answer.error is not None:
            self._failed(attempt, answer.error)
        elif answer.frame is not None:
            self._answered(attempt, answer.frame.op, answer.head)
        if self._held:
            self.patience.look(self._why)

    def _answered(self, attempt: _RequestAttempt, op: Op, head: Mapping[str, Any]) -> None:
        charted = head.get("charted")
        if charted:
            self.session.charted(messages.decode(charted))
        text = str(head.get("text", ""))
        attempt.others = attempt.chart = False
        where = self._name(attempt)
        match op:
            case Op.OK:
                self._told.add(attempt.sub_request.server)
                self.patience.moved()
            case Op.MOVED:
                attempt.why, attempt.chart = f"{where} does not serve all of this: {text or 'buckets have moved'}", True
                self._pause(attempt)
                if self.session.route.version <= attempt.version:
                    self.session.newer(attempt.version)
            case Op.WAIT:
                attempt.others = head.get("for", "trainers") == "trainers"
                attempt.why = f"{where} waits: {text or 'other trainers are not there yet'}"
                if attempt.others and not self.session.lone:
                    self.patience.moved()  # how long they may take is the Master's to decide
                self._hold(attempt, 0.0 if _now_s() - attempt.sent_s > self.patience_s / 2 else LEAST_S)
            case Op.BUSY:
                attempt.why = f"{where} is busy: {text}"
                self._hold(attempt, min(max(float(head.get("after_s", LEAST_S)), LEAST_S), MOST_BUSY_S))
            case Op.STALE | Op.ROLLED_BACK:
                raise RolledBack(f"{where}: {text}. This process has to begin anew; the launcher restarts it")
            case Op.REFUSED:
                raise PsError(f"{where} refuses: {text}")
            case _:
                raise PsError(f"{where} answers {op.name}: it runs another version")

    def _failed(self, attempt: _RequestAttempt, error: Exception) -> None:
        if isinstance(error, Denied) and error.kind != "token":
            raise RolledBack(f"{error}. This process has to begin anew; the launcher restarts it") from error
        # In a job another process may have got the port of a pserver that has died; a newer chart tells of that.
        gone = isinstance(error, Unreachable) or (isinstance(error, Denied) and not self.session.lone)
        if not gone:
            if isinstance(error, EdlError) and not isinstance(error, PsError):
                raise PsError(f"{self._name(attempt)}: {error}") from error
            raise error
        attempt.why, attempt.chart, attempt.others = str(error), True, False
        self._suspect(attempt)
        self._pause(attempt)
        self.session.newer(attempt.version)

    def _pause(self, attempt: _RequestAttempt) -> None:
        attempt.tries += 1
        self._hold(attempt, min(LEAST_S * 2 ** min(attempt.tries - 1, 10), MOST_S))

    def _suspect(self, attempt: _RequestAttempt) -> None:
        if (
            attempt.sub_request.server not in self._suspected
            and attempt.sub_request.server in self.session.route.servers
        ):
            self._suspected.add(attempt.sub_request.server)
            self.session.suspect(attempt.sub_request.server, attempt.why)

    def _look(self) -> None:
        """Nothing has come for a moment."""
        now_s = _now_s()
        for attempt in self._flying.values():
            if now_s - attempt.sent_s > self.patience_s + LATE_S and not attempt.late:
                attempt.late = True
                attempt.why = f"{self._name(attempt)} has not answered for {now_s - attempt.sent_s:.0f} s"
                self._suspect(attempt)
        if any(attempt.chart for attempt in self._held):
            self.session.newer(min(attempt.version for attempt in self._held))
        self.patience.look(self._why)

    def _why(self) -> str:
        attempts = [*self._held, *self._flying.values()]
        shown = [
            f"{attempt.why} ({some_buckets(self.request.keys, attempt.sub_request.items)})" for attempt in attempts[:4]
        ]
        more = f"; and {len(attempts) - 4} more requests" if len(attempts) > 4 else ""
        return "; ".join(shown) + more

    def _name(self, attempt: _RequestAttempt) -> str:
        return f"parameter server {self.session.route.name(attempt.sub_request.server)}"
