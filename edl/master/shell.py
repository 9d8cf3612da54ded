"""The shell of the elected Master: takes an event, steps the machine, writes, and only then sends.

One queue, one consumer. While the store is unavailable, the consumer waits for its write and sends nothing; training
is not affected. A write that is refused because of the fencing token ends this Master.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from edl.config import JobSpec
from edl.errors import FencedOut, StoreError
from edl.master import events as ev
from edl.master import service as sv
from edl.master.chronicle import WrittenStep
from edl.master.companions import OVER, ChangeNotifier, Companions, PendingScaleRequest, UnwrittenRequests
from edl.master.farewell import just_ended, say_farewell
from edl.master.gathered_reports import GatheredReports
from edl.master.goodput.goodput import Goodput
from edl.master.goodput.slot_times import SlotTimes
from edl.master.guarded import GuardedStore
from edl.master.history import KEPT, JobHistory, folded
from edl.master.hosting import Gathered, HelperEvents, Hosted, Hosting
from edl.master.machine import absent, step, step_all, take_over
from edl.master.probing import Probing, Refuses
from edl.master.service import Service
from edl.master.sizing import Sizing
from edl.master.state import MasterState, Phase, Record
from edl.master.stored import (
    history_operations,
    readable,
    record_in,
    record_operations,
    service_operations,
    transactions,
)
from edl.master.streams import AgentStreams
from edl.master.totals import HistoryTally
from edl.master.view import job_status, reply
from edl.master.watches import watch_helpers, watch_nodes
from edl.metrics.facts import HistoryTotals
from edl.ports import (
    Clock,
    Guard,
    HelperConnections,
    HelperListener,
    Put,
    Store,
)
from edl.tasks import BackgroundTasks, Timer
from edl.types import FencingToken, Incarnation, NodeId
from edl.watched_master import WatchedMaster
from edl.wire import plain
from edl.wire.alarm import Alarm
from edl.wire.denylist import DenylistEntry
from edl.wire.keys import JobKeys
from edl.wire.messages import AgentMessage, Asked, Finish, MasterMessage, ServiceToWorker
from edl.wire.records import NodeInfo
from edl.wire.scale_requests import Granted, ScaleRequest
from edl.wire.status import Answer, EventsRequest, HistoryEntry, JobStatus

T = TypeVar("T")
_Incoming = ev.Event | Hosted | PendingScaleRequest | Exception

MOST_TOGETHER = 500
"""Limit on the events that are processed together; this many take some hundredths of a second."""
RESTS = 4.0
SHORTEST_REST_S, LONGEST_REST_S = 0.002, 0.05
"""Pause before a decision, in durations of the last decision, and its bounds in seconds; shorter pauses are skipped."""
TURN_S = 0.02
"""Seconds of event processing after which other tasks on the event loop get a turn."""
READ_AT_ONCE = 100
"""Number of keys decoded in a take-over after which other tasks on the event loop get a turn."""
STORE_ANSWER_S = 5.0
"""Seconds after which a store that does not answer a read counts as unreachable."""
COMPANIONS_S = 15.0
"""Seconds that companions may take to finish at the end of a job."""
_order_numbers = itertools.count(1)
MOST_GATHERED = 256
"""Limit on the effects of services that are collected for one write."""


@dataclass(frozen=True, slots=True)
class MasterDeps:
    """What a Master gets from its launcher."""

    store: Store
    clock: Clock
    keys: JobKeys
    spec: JobSpec
    node: NodeId
    refuses: Refuses
    log: Callable[[str], None]
    wall_clock_s: Callable[[], float]
    checkpoint_dir: str | None = None
    """Empty: the job has none. None: not known on this node."""
    services: Callable[[], Sequence[Service]] = tuple
    """Creates the hosted services for one Master."""
    helper_connections: Callable[[FencingToken, HelperListener], HelperConnections] | None = None
    """Creates the connections to helper processes for one Master; None: the job's services need none."""
    companions: Callable[[WatchedMaster], Sequence[Coroutine[Any, Any, None]]] = lambda master: ()
    """Creates coroutines that run beside the Master; see ``ElectedMaster`` and ``WatchedMaster``."""
    decided: Callable[[MasterState | None, Sequence[ev.Event], ev.Decision], None] = lambda *step: None
    """Called with each decision and its events before it is carried out; a take-over has no events."""
    written: Callable[[WrittenStep], None] = lambda written: None
    """Called with each step after its changes are in the store. Must not block."""


class MasterShell:
    """One term of a Master, from its election until it steps down or the job has ended."""

    def __init__(self, deps: MasterDeps, token: FencingToken, before: NodeId | None = None) -> None:
        """``before``: the previous Master's node, as far as this launcher knows."""
        self._deps, self.token = deps, token
        self._guard = Guard(deps.keys.master, token)
        self._store = GuardedStore(deps.store, self._guard, deps.keys.last_write, deps.clock, deps.log)
        self._events: asyncio.Queue[_Incoming] = asyncio.Queue()
        self._held: _Incoming | None = None
        """Taken from the queue already, to be processed after the current events."""
        self._streams = AgentStreams(self._events.put_nowait, self._is_current, deps.log)
        self._probing = Probing(deps.refuses, deps.clock, before)
        self._background = BackgroundTasks(self._events.put_nowait)
        self._timer = Timer(deps.clock.now_s, lambda: self._events.put_nowait(ev.Tick()))
        self._state: MasterState | None = None
        self._stored: Record | None = None
        self._hosting = Hosting(deps.services())
        self._services_timer = Timer(deps.clock.now_s, lambda: self._events.put_nowait(Hosted(None, sv.Tick())))
        listener = HelperEvents(self._events.put_nowait)
        self._connections = (
            deps.helper_connections(token, listener) if deps.helper_connections is not None and self._hosting else None
        )
        self.history = JobHistory()
        self._goodput = Goodput(deps.wall_clock_s)
        self._tally = HistoryTally()
        self._notifier = ChangeNotifier()
        self._companions = Companions(deps.log)
        self._took_s = 0.0
        """Duration of the last decision."""
        self._reports = GatheredReports(deps.clock.now_s, lambda: self._events.put_nowait(ev.Tick()))
        self._size_revision = 0
        """Store revision of the requested size; 0: not written yet."""
        self._asking: PendingScaleRequest | None = None
        """The request that the current step decides about."""
        self._unwritten = UnwrittenRequests()
        self._orders: dict[int, asyncio.Future[Answer]] = {}
        """Futures for the answers of services, by order number."""
        self._explanation = ""
        """A companion's explanation for the status."""
        self._over = False
        """Whether this Master has stepped down."""
        self.announced = asyncio.Event()
        """Set once an ended job's outcome is in the store."""
        self.concluded = asyncio.Event()
        """Set once the companions have finished after that."""

    @property
    def state(self) -> MasterState | None:
        """The state of the machine; None until the take-over is done."""
        return self._state

    @property
    def slot_times(self) -> SlotTimes:
        """What the slots have spent their time on, as of the last decision."""
        return self._goodput.times

    # --- the loop --------------------------------------------------------------------------------------------------

    async def run(self) -> Finish:
        """Act as Master until the job has concluded; returns its outcome. Raises ``FencedOut`` if another Master has
        been elected, ``StoreError`` if a watch is lost."""
        try:
            await self._take_over()
            self._companions.begin(self._deps.companions(self))
            let_others_s = self._deps.clock.now_s()
            while not self.concluded.is_set():
                if self._deps.clock.now_s() - let_others_s > TURN_S:
                    await asyncio.sleep(0)  # a non-empty queue never yields, and the lease must be renewed
                    let_others_s = self._deps.clock.now_s()
                held, self._held = self._held, None
                event = held if held is not None else await self._events.get()
                if isinstance(event, Exception):
                    raise event
                changed = True
                if isinstance(event, Hosted):
                    self._hosting.take(event, self._deps.clock.now_s())
                    if not self._events.empty() and self._hosting.pending < MOST_GATHERED:
                        continue  # one write for several events
                elif self._reports.keep(event, self._took_s):
                    changed = self._hosting.pending > 0
                else:
                    await self._rest()
                    await self._carry_out(*self._decide(event))
                await self._serve()
                if changed:
                    self._notifier.notify()
            assert self._stored is not None and self._stored.outcome is not None  # noqa: S101 - concluded
            return self._stored.outcome
        finally:
            self._close()

    def _decide(self, event: ev.Event | PendingScaleRequest) -> tuple[Sequence[ev.Event], ev.Decision]:
        """Decide about this event together with those queued since: one decision and one write suffice, because nothing
        is sent in between. A request is the last of its batch: its answer contains the revision of its own write."""
        assert self._state is not None  # noqa: S101 - set by _take_over
        events = [*self._reports.take(), self._as_event(event)]
        while self._asking is None and len(events) < MOST_TOGETHER and not self._events.empty():
            following = self._events.get_nowait()
            if isinstance(following, (Hosted, PendingScaleRequest, Exception)):
                self._held = following
                break
            events.append(following)
        began_s = self._deps.clock.now_s()
        decision = step_all(self._state, events, began_s)
        self._took_s = self._deps.clock.now_s() - began_s
        return events, decision

    async def _rest(self) -> None:
        """Let events accumulate while decisions are slow, such as when a thousand nodes join at once."""
        rest_s = RESTS * self._took_s
        if rest_s >= SHORTEST_REST_S:
            await asyncio.sleep(min(rest_s, LONGEST_REST_S))

    def _as_event(self, event: ev.Event | PendingScaleRequest) -> ev.Event:
        """Turn a request into an event with the stored size's revision; other events stay as they are."""
        if not isinstance(event, PendingScaleRequest):
            return event
        self._asking = event
        return ev.ScaleRequested(event.request, self._size_revision, saves=self._deps.checkpoint_dir != "")

    async def _take_over(self) -> None:
        keys = self._deps.keys
        snapshot = await self._store.read(keys.prefix)
        values = {entry.key: entry.value for entry in snapshot.entries}
        record = record_in(values, keys) or await just_ended(self._store, keys)
        nodes = await self._readable(NodeInfo, values, keys.nodes)
        self.history.load(await self._readable(HistoryEntry, values, keys.history))
        self._tally.take_over(self.history.last(KEPT), record)
        self._stored = record
        self._size_revision = next((entry.mod_revision for entry in snapshot.entries if entry.key == keys.scale), 0)
        helpers = _below(keys.helpers, values)
        put, store = self._events.put_nowait, self._deps.store
        self._background.begin(watch_nodes(store, keys.nodes, snapshot.revision, nodes, put, self._deps.log))
        if self._hosting:
            self._background.begin(watch_helpers(store, keys.helpers, snapshot.revision, put, self._connections))
        now_s = self._deps.clock.now_s()
        self._hosting.load(_below(keys.services, values), helpers, now_s)
        self._companions.load(_below(keys.companions, values))
        if self._connections is not None:
            for name, value in helpers.items():
                self._connections.put(name, value)
        self._hosting.follow(record or Record(), now_s, taken_over=True)
        decision = take_over(self._deps.spec, record, nodes, now_s)
        self._goodput.load(values.get(keys.goodput), decision.state, now_s, self._deps.log)
        await self._carry_out((), decision)
        await self._serve()

    async def _readable(self, kind: type[T], values: Mapping[str, bytes], prefix: str) -> list[T]:
        """Decode values like ``readable``, in pieces: a thousand keys at once would block the event loop too long."""
        found: list[T] = []
        below = iter([(key, value) for key, value in values.items() if key.startswith(prefix)])
        while piece := dict(itertools.islice(below, READ_AT_ONCE)):
            found += readable(kind, piece, prefix, self._deps.log)
            await asyncio.sleep(0)
        return found

    async def _carry_out(self, events: Sequence[ev.Event], decision: ev.Decision) -> None:
        """Write what has changed, then run the effects in order. Raises ``FencedOut``."""
        self._deps.decided(self._state, events, decision)
        decision = self._goodput.follow(self._state, events, decision, self._deps.clock.now_s())
        record = decision.state.record
        notes = folded([effect for effect in decision.effects if isinstance(effect, ev.HistoryNote)])
        wall_s = self._deps.wall_clock_s()
        added = [self.history.make(note, record.round, wall_s) for note in notes]
        if record != self._stored or added or self._goodput.due:
            await self._write(record, added)
        before, self._state = self._state, decision.state
        self._stored = record
        self._publish(before, decision.state, added, wall_s)
        self._unwritten.written(events)
        self._streams.decided(events)
        wakes = []
        for effect in decision.effects:
            if isinstance(effect, ev.WakeAt):
                wakes.append(effect.at_s)
            else:
                await self._run(effect, record)
        self._timer.set(min(wakes, default=None))
        self._hosting.follow(record, self._deps.clock.now_s())

    def _publish(
        self, before: MasterState | None, state: MasterState, added: Sequence[HistoryEntry], wall_s: float
    ) -> None:
        """Show what is in the store now."""
        kept = self.history.last(KEPT) if before is None else ()
        self.history.publish(added)
        now_s = self._deps.clock.now_s()
        self._tally.stepped(state.record, added, now_s)
        self._deps.written(WrittenStep(self.token, before, state, tuple(added), now_s, wall_s, kept))

    async def _run(self, effect: ev.Effect, record: Record) -> None:
        match effect:
            case ev.TellNode(node, incarnation, message):
                self._streams.tell(node, incarnation, message)
            case ev.Probe(info):
                self._background.begin(self._probe(info))
            case ev.Revoke(incarnation):
                self._background.begin(self._revoke(incarnation))
            case ev.Grant(verdict, text):
                if self._asking is not None:
                    self._asking.settle(Granted(verdict, text, self._size_revision, record.sizing.generation))
                    self._asking = None
            case ev.HistoryNote(text=text):
                self._deps.log(text)
            case ev.Conclude():
                await self._conclude()

    async def _serve(self) -> None:
        """Carry out what the services want, also what they want because of that. Raises ``FencedOut``."""
        while self._hosting.pending and not self.concluded.is_set():  # an ended job's keys are gone
            await self._serve_gathered(self._hosting.gathered())
        self._services_timer.set(self._hosting.due_s)

    async def _serve_gathered(self, gathered: Gathered) -> None:
        """Write what the services keep, then send their messages. Raises ``FencedOut``."""
        for flaw in gathered.flaws:
            await self._step(ev.Flawed(flaw.name, flaw.text))
        if self.concluded.is_set():
            return
        assert self._stored is not None  # noqa: S101 - as above
        wall_s, number = self._deps.wall_clock_s(), self._stored.round
        notes = [ev.HistoryNote(ev.Kind.SERVICE, note.text) for note in gathered.notes]
        added = [self.history.make(note, number, wall_s) for note in notes]
        keys = self._deps.keys
        history = history_operations(keys, self.history, added)
        for operations in transactions([*history, *service_operations(keys, gathered.kept)]):
            await self._store.write(operations)
        if added:
            assert self._state is not None  # noqa: S101 - as above
            self._publish(self._state, self._state, added, wall_s)
        for note in notes:
            self._deps.log(note.text)
        for service, word in gathered.to_workers:
            assert self._state is not None  # noqa: S101 - as above
            entry = self._state.nodes.get(word.caller.node)
            if entry is not None:
                self._streams.forward(entry.info, ServiceToWorker(service, word.caller.slot, word.body))
        for answer in gathered.answers:
            waiting = self._orders.pop(answer.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(Answer(answer.text, ok=answer.ok))
        if self._connections is not None:
            for service, sent in gathered.sent:
                self._connections.send(f"{service}/{sent.name}", sent.body)
        for failure in gathered.failures:
            await self._step(ev.Failed(failure.text))

    async def _step(self, event: ev.Event) -> None:
        assert self._state is not None  # noqa: S101 - set by _take_over
        await self._carry_out((event,), step(self._state, event, self._deps.clock.now_s()))

    async def _write(self, record: Record, added: list[HistoryEntry]) -> None:
        keys = self._deps.keys
        *earlier, last = list(transactions(history_operations(keys, self.history, added))) or [[]]
        for operations in earlier:  # the history may be written before the changes that it describes
            await self._store.write(operations)
        last += record_operations(keys, self._stored, record)
        last.append(Put(keys.goodput, self._goodput.stored()))
        before = self._stored.sizing if self._stored is not None else Sizing()
        resized = record.sizing != before or not self._size_revision
        if resized:
            last.append(Put(keys.scale, plain.dumps(record.sizing)))
        revision = await self._store.write(last)
        if resized:
            self._size_revision = revision

    async def _conclude(self) -> None:
        """End the job in the store, and let the companions finish."""
        assert self._stored is not None and self._stored.outcome is not None  # noqa: S101 - an ended job has a record
        with contextlib.suppress(StoreError):
            await say_farewell(self._deps.store, self._deps.keys, self._guard, self._stored.outcome)
        self._notifier.notify()
        self.announced.set()
        await self._companions.settled(COMPANIONS_S)
        self.concluded.set()

    # --- sources of events -----------------------------------------------------------------------------------------

    async def _probe(self, info: NodeInfo) -> None:
        key = info.node, info.incarnation
        limit_s = 2 * info.lease_within(self._deps.spec.timeouts.lease_ttl_s)
        if await self._probing.proves_gone(info, lambda: key not in self._streams, limit_s):
            self._events.put_nowait(ev.NodeRefused(*key))

    async def _revoke(self, incarnation: Incarnation) -> None:
        with contextlib.suppress(StoreError):  # otherwise the lease expires by itself
            await self._deps.store.revoke_lease(incarnation)

    # --- calls from servers and companions -------------------------------------------------------------------------

    def join(self, said: AsyncIterator[AgentMessage]) -> AsyncIterator[MasterMessage]:
        """Serve one agent's stream until either side ends it. Yields the Master's messages."""
        return self._streams.join(said)

    def _is_current(self, info: NodeInfo) -> bool:
        """Whether no other incarnation of this node is known."""
        entry = self._state.nodes.get(info.node) if self._state is not None else None
        return entry is None or entry.info.incarnation == info.incarnation

    def status(self) -> JobStatus:
        """The current status of the job."""
        assert self._state is not None  # noqa: S101 - the launcher serves only after the take-over
        now_s = self._deps.clock.now_s()
        status = job_status(self._state, self._deps.node, self.history.last(KEPT), self._size_revision, now_s)
        waiting = "; ".join(part for part in (status.scale.waiting, self._explanation) if part)
        scale = dataclasses.replace(status.scale, waiting=waiting)
        warnings = [text for text in (self._store.trouble(),) if text]
        return dataclasses.replace(
            status,
            services=self._hosting.views(),
            scale=scale,
            warnings=(*warnings, *status.warnings),
            goodput=self._goodput.counts(now_s),
        )

    @property
    def totals(self) -> HistoryTotals:
        """What this Master has counted since it took over."""
        return self._tally.totals

    async def submit(self, request: ScaleRequest) -> Granted:
        """Decide about a request, in order with all other events; returns once an accepted request is in the store.

        Raises ``FencedOut`` if this Master steps down first; then the next Master knows whether the request is stored.
        """
        asking = PendingScaleRequest(request, asyncio.get_running_loop().create_future())
        if self._over:
            asking.fail()
        self._events.put_nowait(asking)
        return await asking.answer

    async def changed(self) -> None:
        """Wait for the next change of the status; see ``ElectedMaster``. Raises ``FencedOut`` after stepping down."""
        await self._notifier.changed()

    async def ended_within(self, limit_s: float) -> bool:
        """Wait for the end of the job, but no longer than this; see ``WatchedMaster``."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.announced.wait(), limit_s)
        return self.announced.is_set()

    def explain(self, text: str) -> None:
        """Set the explanation in the status why the size is not reached; see ``ElectedMaster``."""
        self._explanation = text

    def watched(self, alarms: Sequence[Alarm]) -> None:
        """Queue the alarms of the watchdogs for the whole job; see ``WatchedMaster``."""
        self._events.put_nowait(ev.JobAlarms(tuple(alarms)))

    def denylist(self, entries: Sequence[DenylistEntry]) -> None:
        """Queue the entries of the denylist; see ``WatchedMaster``."""
        self._events.put_nowait(ev.DenylistChanged(tuple(entries)))

    async def store_trouble(self) -> str:
        """Why the store does not answer or takes no writes; see ``WatchedMaster``."""
        if self._store.trouble():
            return self._store.trouble()
        try:
            await asyncio.wait_for(self._deps.store.read(self._deps.keys.over), STORE_ANSWER_S)
        except StoreError as error:
            return str(error)
        except asyncio.TimeoutError:
            return f"no answer for {STORE_ANSWER_S:g} s"
        return ""

    def kept(self, name: str) -> str:
        """A value that a companion has stored; see ``WatchedMaster``."""
        return self._companions.values.get(name, "")

    async def keep(self, name: str, value: str) -> None:
        """Store a companion's value under the fencing token; see ``WatchedMaster``."""
        await self._store.write_once([Put(self._deps.keys.companion(name), value.encode())])
        self._companions.values[name] = value

    def answer_with(self, name: str, answer: Callable[[Asked], Awaitable[Answer]]) -> None:
        """Let a companion answer requests of a purpose; see ``WatchedMaster``."""
        self._companions.answers[name] = answer

    async def ask(self, asked: Asked) -> Answer:
        """Answer a request for a checkpoint, the end of the job, or other settings; returns once an accepted request is
        in the store. The outcome is in the history. Raises ``FencedOut`` if this Master steps down first."""
        assert self._state is not None  # noqa: S101 - as above
        if self._over:
            raise FencedOut(OVER)
        answer = reply(self._state, asked.purpose, self._deps.checkpoint_dir, asked.argument)
        if answer.ok:
            self._events.put_nowait(request := ev.OperatorRequest(asked))
            await self._unwritten.add(request)
        return answer

    async def order(self, asked: Asked) -> Answer:
        """Pass a request to a service (``Purpose.DATA``) or a companion (``Purpose.NOTIFY``); returns its answer, a
        service's once its result is in the store. Raises ``FencedOut`` if this Master steps down first."""
        assert self._state is not None  # noqa: S101 - as above
        if asked.purpose.value in self._companions.answers:
            return await self._companions.answers[asked.purpose.value](asked)
        if self._over or self.ended:
            return Answer(f"the job has ended: {self._state.record.reason}", ok=False)
        if asked.purpose.value not in self._hosting.names:
            return Answer(f"this job has no service for {asked.purpose.value}", ok=False)
        number = next(_order_numbers)
        self._orders[number] = asyncio.get_running_loop().create_future()
        self._events.put_nowait(Hosted(asked.purpose.value, sv.Ordered(number, asked.by, asked.argument)))
        return await self._orders[number]

    @property
    def ended(self) -> bool:
        """Whether the job's outcome is decided."""
        return self._state is not None and self._state.record.phase is Phase.ENDED

    @property
    def misses_nodes(self) -> bool:
        """Whether a node that has a lease is not attached."""
        return self._state is not None and bool(absent(self._state, self._streams))

    @property
    def serving(self) -> bool:
        """Whether this Master accepts streams and calls: it has taken over, and has not stepped down."""
        return self._state is not None and not self._over

    def events(self, request: EventsRequest) -> AsyncIterator[HistoryEntry]:
        """The entries of the history; with ``follow`` also those that are added later."""
        return self.history.read(request.after, request.follow)

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._over = True
        self._timer.set(None)
        self._services_timer.set(None)
        self._background.drop()
        self._companions.drop()
        self._notifier.close()
        waiting = [self._asking] if self._asking is not None else []
        waiting += [self._held] if isinstance(self._held, PendingScaleRequest) else []
        while not self._events.empty():
            event = self._events.get_nowait()
            waiting += [event] if isinstance(event, PendingScaleRequest) else []
        for asking in waiting:
            asking.fail()
        for answer in self._orders.values():
            if not answer.done():
                answer.set_exception(FencedOut(OVER))
        self._unwritten.fail()
        if self._connections is not None:
            self._connections.close()
        self._reports.take()
        self._streams.close()
        self.history.close()


def _below(prefix: str, values: Mapping[str, bytes]) -> dict[str, bytes]:
    return {key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix)}
