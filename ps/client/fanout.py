"""One logical request to several pservers: split by the placement map, sent in parallel, and retried until all is done.

A sub-request is never in flight twice: it is sent again only after its connection has ended.
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
from ps.client.pool import ConnectionPool, PserverAnswer, PserverCall
from ps.client.routing import RoutingTable, SubRequest, some_buckets, split_again
from ps.errors import Denied, RolledBack, Unreachable
from ps.protocol import messages
from ps.protocol.frames import FrameOp
from ps.protocol.messages import NO_PSERVER
from ps.wait import BoundedWait

LOOK_S = 0.25
WAIT_S = 2.0
"""A pserver that waits for other trainers answers after this many seconds at most; this bounds how long a trainer that
should stop for a checkpoint is held up."""
LATE_S = 3.0
"""A pserver whose answer is overdue by this many seconds is reported to the Master as suspect."""
LEAST_S, MOST_S = 0.02, 0.5
"""First and longest pause between two attempts, in seconds."""
MOST_BUSY_S = 5.0
_now_s = SystemClock().now_s


class PserverRequest(Protocol):
    """A request that is split over pservers: builds each sub-request and handles its answer."""

    keys: Sequence[NDArray[np.int64]]
    """The keys of each part."""
    clocked: bool
    """If true, every pserver that owns a bucket gets the request, even without keys."""

    def call(self, sub_request: SubRequest, route: RoutingTable) -> PserverCall:
        """Build the call for a sub-request."""
        ...

    def landed(self, sub_request: SubRequest, head: Mapping[str, Any], body: memoryview) -> None:
        """Handle the answer to a sub-request. Called concurrently from any thread; ``body`` is invalid after the
        return."""
        ...


@dataclass(slots=True)
class _RequestAttempt:
    """A sub-request that is in flight, or held back until its next attempt."""

    sub_request: SubRequest
    version: int
    """Version of the placement map that it was made with."""
    why: str = "no answer yet"
    tries: int = 0
    ready_s: float = 0.0
    sent_s: float = 0.0
    awaits_placement: bool = False
    """A newer placement map ends the wait."""
    others: bool = False
    """The pserver waits for other trainers."""
    late: bool = False
    call: PserverCall | None = None
    """The call of the latest attempt."""


@dataclass(slots=True)
class ClockSeen:
    """The latest second of the job's clock that pservers have answered with; passed on to the others."""

    second: int = 0

    def saw(self, head: Mapping[str, Any]) -> None:
        """Note the second in an answer's head, if there is one."""
        self.second = max(self.second, int(head.get("clock", 0)))

    def head(self) -> dict[str, int]:
        """The entry for a request's head; none in jobs without tables that need it."""
        return {"clock": self.second} if self.second else {}


@dataclass
class FanOut:
    """Runs one logical request. Single use."""

    pool: ConnectionPool
    session: MasterSession
    request: PserverRequest
    purpose: str
    wait: BoundedWait
    stand: Callable[[], None] | None = None
    """Called when the Master wants this trainer to stop and the remaining sub-requests all wait for stopped
    trainers."""
    clock: ClockSeen = field(default_factory=ClockSeen)
    wait_s: float = WAIT_S
    _flying: dict[int, _RequestAttempt] = field(default_factory=dict)
    _held: list[_RequestAttempt] = field(default_factory=list)
    _acknowledged: set[int] = field(default_factory=set)
    _suspected: set[int] = field(default_factory=set)
    _landings: queue.SimpleQueue[tuple[int, PserverAnswer] | None] = field(default_factory=queue.SimpleQueue)
    _count: int = 0
    _began: bool = False
    """Every sub-request has been sent once."""
    _version: int = -1
    """Version of the newest placement map whose owners have all received the request."""

    def run(self, sub_requests: Sequence[SubRequest], route: RoutingTable) -> None:
        """Run to completion. Raises ``PsError`` when refused or at the deadline, and ``RolledBack``."""
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
            self.wait.over()
        finally:
            end()
            self._give_up()

    def _give_up(self) -> None:
        """Cancel what is in flight, so that no answer is written to our memory and nothing is applied after we
        return."""
        for attempt in self._flying.values():
            if attempt.call is not None:
                attempt.call.given_up = True
        if self._flying:
            self.pool.interrupt(self.purpose, [attempt.sub_request.server for attempt in self._flying.values()])
        while self._flying:
            try:
                landing = self._landings.get(timeout=1.0)
            except queue.Empty:
                return  # still connecting or queued for the connection; it will not be sent
            if landing is not None:
                self._flying.pop(landing[0], None)

    # --- sending -----------------------------------------------------------------------------------------------------

    def _tell_all(self, route: RoutingTable) -> None:
        """Send the request also to pservers that have become owners meanwhile: other trainers may wait for this one
        there."""
        if not self.request.clocked or route.version == self._version:
            return
        self._version = route.version
        busy = {attempt.sub_request.server for attempt in (*self._flying.values(), *self._held)}
        for number in route.clocked:
            if number not in busy and number not in self._acknowledged:
                self._send(_RequestAttempt(SubRequest(number), route.version), route)

    def _send(self, attempt: _RequestAttempt, route: RoutingTable) -> None:
        server = route.servers.get(attempt.sub_request.server)
        if server is None:
            attempt.why, attempt.awaits_placement = "the Master has not assigned these buckets to a pserver yet", True
            self._hold(attempt, MOST_S)
            return
        call = self.request.call(attempt.sub_request, route)
        call.head = {**call.head, **self.clock.head()}
        if self.request.clocked and self._began and self._acknowledged:
            call.head = {**call.head, "complete": True}  # applied somewhere: no need to wait for others
        call.deadline_s = max(0.5, min(self.wait.left_s, 1e6))
        call.wait_s = min(self.wait_s, call.deadline_s)
        self._count += 1
        number = self._count
        attempt.sent_s, attempt.late, attempt.call = _now_s(), False, call
        self._flying[number] = attempt
        try:
            self.pool.ask(self.purpose, server, call, lambda answer: self._landed(number, attempt.sub_request, answer))
        except BaseException:
            del self._flying[number]
            raise

    def _landed(self, number: int, sub_request: SubRequest, answer: PserverAnswer) -> None:
        """Handle an answer on the connection's thread; the body is valid until this returns."""
        if answer.frame is not None and answer.frame.op is FrameOp.OK:
            try:
                self.request.landed(sub_request, answer.head, answer.frame.body)
            except Exception as error:  # noqa: BLE001 - re-raised by the thread that waits for the answer
                answer.error = error
        self._landings.put((number, answer))

    def _hold(self, attempt: _RequestAttempt, seconds: float) -> None:
        attempt.ready_s = _now_s() + seconds
        self._held.append(attempt)

    def _launch(self) -> None:
        """Send sub-requests whose pause is over, and split them again if the placement map has changed."""
        if not self._held or self._stands():
            return
        route, now_s, held = self.session.route, _now_s(), self._held
        self._held = []
        for attempt in held:
            if attempt.ready_s > now_s and not (attempt.awaits_placement and route.version > attempt.version):
                self._held.append(attempt)
            elif route.version == attempt.version and attempt.sub_request.server != NO_PSERVER:
                self._send(attempt, route)
            elif attempt.sub_request.items:
                self._version = -1  # the pserver may own other buckets and must then still get the request
                for sub_request in split_again(route, self.request.keys, attempt.sub_request.items):
                    self._send(_RequestAttempt(sub_request, route.version, attempt.why, attempt.tries), route)
            elif attempt.sub_request.server in route.clocked:
                self._send(_RequestAttempt(attempt.sub_request, route.version, attempt.why, attempt.tries), route)

    def _stands(self) -> bool:
        """Stop for a checkpoint once nothing is in flight. Returns True while answers are still awaited."""
        halted = self.stand is not None and self.session.halted
        # Once a pserver has applied the request, the others must too before we stop.
        if (
            not halted
            or (self.request.clocked and self._acknowledged)
            or not all(attempt.others for attempt in self._held)
        ):
            return False
        if self._flying:
            return True
        assert self.stand is not None  # noqa: S101
        self.stand()
        self.wait.moved()
        return False

    # --- events ------------------------------------------------------------------------------------------------------

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
            self.wait.look(self._why)

    def _answered(self, attempt: _RequestAttempt, op: FrameOp, head: Mapping[str, Any]) -> None:
        placement_update = head.get("placement")
        if placement_update:
            self.session.update_placement(messages.decode(placement_update))
        text = str(head.get("text", ""))
        attempt.others = attempt.awaits_placement = False
        where = self._name(attempt)
        match op:
            case FrameOp.OK:
                self.clock.saw(head)
                self._acknowledged.add(attempt.sub_request.server)
                self.wait.moved()
            case FrameOp.MOVED:
                attempt.why, attempt.awaits_placement = (
                    f"{where} does not serve all of these buckets: {text or 'buckets have moved'}",
                    True,
                )
                self._pause(attempt)
                if self.session.route.version <= attempt.version:
                    self.session.newer(attempt.version)
            case FrameOp.WAIT:
                attempt.others = head.get("for", "trainers") == "trainers"
                attempt.why = f"{where} waits: {text or 'other trainers have not pushed yet'}"
                if attempt.others and not self.session.without_master:
                    self.wait.moved()  # the Master decides how long other trainers may take
                self._hold(attempt, 0.0 if _now_s() - attempt.sent_s > self.wait_s / 2 else LEAST_S)
            case FrameOp.BUSY:
                attempt.why = f"{where} is busy: {text}"
                self._hold(attempt, min(max(float(head.get("after_s", LEAST_S)), LEAST_S), MOST_BUSY_S))
            case FrameOp.STALE | FrameOp.ROLLED_BACK:
                raise RolledBack(f"{where}: {text}. This process must restart; its launcher does that")
            case FrameOp.REFUSED:
                raise PsError(f"{where} refused the request: {text}")
            case _:
                raise PsError(f"unexpected answer {op.name} from {where}: it runs another version of edl")

    def _failed(self, attempt: _RequestAttempt, error: Exception) -> None:
        if isinstance(error, Denied) and error.kind != "token":
            raise RolledBack(f"{error}. This process must restart; its launcher does that") from error
        # In a job, another process may have taken the port of a dead pserver; a newer placement map resolves that.
        gone = isinstance(error, Unreachable) or (isinstance(error, Denied) and not self.session.without_master)
        if not gone:
            if isinstance(error, EdlError) and not isinstance(error, PsError):
                raise PsError(f"{self._name(attempt)}: {error}") from error
            raise error
        attempt.why, attempt.awaits_placement, attempt.others = str(error), True, False
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
        """Called when no answer has come for a moment: report overdue pservers, ask for a newer placement map."""
        now_s = _now_s()
        for attempt in self._flying.values():
            if now_s - attempt.sent_s > self.wait_s + LATE_S and not attempt.late:
                attempt.late = True
                attempt.why = f"{self._name(attempt)} has not answered for {now_s - attempt.sent_s:.0f} s"
                self._suspect(attempt)
        if any(attempt.awaits_placement for attempt in self._held):
            self.session.newer(min(attempt.version for attempt in self._held))
        self.wait.look(self._why)

    def _why(self) -> str:
        attempts = [*self._held, *self._flying.values()]
        shown = [
            f"{attempt.why} ({some_buckets(self.request.keys, attempt.sub_request.items)})" for attempt in attempts[:4]
        ]
        more = f"; and {len(attempts) - 4} more requests" if len(attempts) > 4 else ""
        return "; ".join(shown) + more

    def _name(self, attempt: _RequestAttempt) -> str:
        return f"parameter server {self.session.route.name(attempt.sub_request.server)}"
