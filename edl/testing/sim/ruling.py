"""The Master's shell in virtual time: pop an event, step, write, and only then send. Mirrors ``edl.master.shell``."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from edl.errors import FencedOut, StoreError, StoreUnavailable
from edl.master import election as el
from edl.master import events as ev
from edl.master.machine import step_all, take_over
from edl.master.state import MasterState, Record
from edl.testing.sim.asking import Ask
from edl.testing.sim.network import End, Stream
from edl.testing.sim.process import FAREWELL_KEY, MASTER_KEY, NODES, RECORD_KEY, SCALE_KEY, SimProcess
from edl.testing.sim.store import SimStore, StoreChange, Watch
from edl.testing.sim.timeline import ScheduledCall
from edl.types import Incarnation, NodeId, Token
from edl.wire.messages import AgentMessage, Attach, Hold, NodeInfo, Switch
from edl.wire.wishes import Granted

Key = tuple[NodeId, Incarnation]


class RulingProcess(SimProcess):
    """What a rule needs of the process it lives in."""

    def elect(self, event: el.ElectionEvent) -> None:
        """Feed the election machine."""
        raise NotImplementedError

    def crash(self) -> None:
        """Die at once."""
        raise NotImplementedError

    def rule_concluded(self) -> None:
        """The Master has said goodbye."""
        raise NotImplementedError


class Line:
    """The Master's end of one agent's stream."""

    def __init__(self, ruling: Ruling, agent_end: End, network_of: Callable[[End, End], Stream]) -> None:
        self.ruling = ruling
        self.key: Key | None = None
        self.end = End(ruling.launcher, self._hear, self._broke)
        self.stream = network_of(agent_end, self.end)

    def _hear(self, message: AgentMessage) -> None:
        if isinstance(message, Attach):
            self._leave()
            self.key = (message.info.node, message.info.incarnation)
            before = self.ruling.lines.get(self.key)
            self.ruling.lines[self.key] = self
            if before is not None:  # which of the two the agent listens to is not known: it calls again if need be
                before.stream.close(before.end)
            self.ruling.feed(ev.NodeAttached(message))
        elif self.key is not None:
            self.ruling.feed(ev.NodeSaid(*self.key, message))

    def _broke(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.key is not None and self.ruling.lines.get(self.key) is self:
            del self.ruling.lines[self.key]
            self.ruling.feed(ev.NodeDetached(*self.key))


class Ruling:
    """One rule, from election to stepping down."""

    def __init__(self, launcher: RulingProcess, token: Token) -> None:
        self.launcher = launcher
        self.deps = launcher.deps
        self.token = token
        self.state: MasterState | None = None
        self.stored: Record | None = None
        self.lines: dict[Key, Line] = {}
        self.all_lines: list[Line] = []
        self.concluded = False
        self.over = False
        self._queue: deque[ev.Event | Ask] = deque()
        self._asking: Ask | None = None
        self._scaled = 0
        """Store revision of the size."""
        self._busy = True
        self._pumping = False
        self._timer: ScheduledCall | None = None
        self._watch: Watch | None = None
        self._known: dict[str, Incarnation] = {}
        self._decided_s = 0.0
        self._load()

    # --- taking over -------------------------------------------------------------------------------------------------

    def _load(self, error: StoreError | None = None) -> None:
        if not self.over:
            self.launcher.ask(self._read, self._take_over, lambda error: self.launcher.run(self._load, error))

    @staticmethod
    def _read(store: SimStore) -> tuple[Record | None, list[NodeInfo], int, int]:
        nodes = [entry.value for entry in store.read(NODES)]
        return store.value(RECORD_KEY), nodes, len(store.history), store.modified(SCALE_KEY)

    def _take_over(self, found: tuple[Record | None, list[NodeInfo], int, int]) -> None:
        if self.over:
            return
        record, nodes, position, self._scaled = found
        self.stored = record
        self._known = {info.node: info.incarnation for info in nodes}
        self._watch = self.launcher.watch(NODES, position, self._node_changed)
        empty = MasterState(self.deps.spec, record or Record())
        self._carry_out(empty, take_over(self.deps.spec, record, nodes, self.launcher.now_s))

    @property
    def serving(self) -> bool:
        """Whether agents can attach."""
        return not self.over and self.state is not None

    def accept(self, agent_end: End) -> Stream:
        """An agent opens its stream."""
        line = Line(self, agent_end, lambda one, other: Stream(self.deps.network, one, other))
        self.all_lines.append(line)
        return line.stream

    def stop(self) -> None:
        """The rule is lost or done: nothing more is decided or sent."""
        if self.over:
            return
        self.over = True
        self._set_timer(None)
        if self._watch is not None:
            self._watch.closed = True
        for line in self.all_lines:
            line.stream.close(line.end)

    # --- events in ---------------------------------------------------------------------------------------------------

    @property
    def scaled(self) -> int:
        """Store revision of the size, as far as this Master knows."""
        return self._scaled

    def feed(self, event: ev.Event | Ask) -> None:
        """Queue an event; they are taken strictly in order."""
        self._queue.append(event)
        self._pump()

    def _pump(self) -> None:
        if self._pumping:
            return  # the loop below goes on: a Master that was paused may have hundreds of events to take
        self._pumping = True
        try:
            self._take_all()
        finally:
            self._pumping = False

    def _take_all(self) -> None:
        while self._queue and not self._busy and not self.over and not self.concluded:
            events = self._together()
            assert self.state is not None  # noqa: S101 - not busy means taken over
            if self.deps.trace is not None:
                for event in events:
                    self.launcher.say(f"Master <- {event}")
            self._busy = True
            self._carry_out(self.state, step_all(self.state, events, self.launcher.now_s))

    def _together(self) -> list[ev.Event]:
        """What the shell takes at once: events up to the next wish, or a wish."""
        first = self._queue.popleft()
        if isinstance(first, Ask):
            self._asking = first
            return [ev.Wished(first.wish, self._scaled)]
        events = [first]
        while self._queue and not isinstance(following := self._queue[0], Ask):
            events.append(following)
            self._queue.popleft()
        return events

    def _node_changed(self, change: StoreChange) -> None:
        node = change.key[len(NODES) :]
        if change.entry is not None:
            self._known[node] = change.entry.value.incarnation
            self.feed(ev.NodeRegistered(change.entry.value))
        elif node in self._known:
            self.feed(ev.NodeExpired(NodeId(node), self._known.pop(node)))

    # --- effects out -------------------------------------------------------------------------------------------------

    def _carry_out(self, before: MasterState, decision: ev.Decision) -> None:
        self.deps.checks.master_stepped(before, decision, self.launcher.host)
        self._decided_s = self.deps.timeline.now_s
        noted = any(isinstance(effect, ev.Note) for effect in decision.effects)
        if decision.state.record != self.stored or noted:
            self._write(decision)
        else:
            self._send(decision)

    def _write(self, decision: ev.Decision) -> None:
        record, token, decided_s = decision.state.record, self.token, self._decided_s

        resized = not self._scaled or self.stored is None or record.sizing != self.stored.sizing

        def guarded(store: SimStore) -> int:
            if not fence_holds(store, token):
                raise FencedOut("another Master has been elected")
            store.put(RECORD_KEY, record)
            if resized:
                store.put(SCALE_KEY, record.sizing)
            revision = store.modified(SCALE_KEY)
            self.deps.checks.record_written(decision.state, decided_s, token, store.token(MASTER_KEY), revision)
            return revision

        def written(revision: int) -> None:
            self._scaled = revision
            self._written(decision)

        self.launcher.ask(guarded, written, lambda error: self._refused(error, decision))

    def _refused(self, error: StoreError, decision: ev.Decision) -> None:
        if self.over:
            return
        if isinstance(error, StoreUnavailable):
            self.launcher.after(0.1, lambda: None if self.over else self._write(decision))
        else:
            self.launcher.elect(el.FencedOff())

    def _written(self, decision: ev.Decision) -> None:
        if self.over:
            return
        deps = self.deps
        if deps.kill_on_write and decision.state.record != self.stored:
            deps.kill_on_write = False
            self.launcher.crash()
            return
        if deps.kill_on_switch and _tells(decision, Switch):
            deps.kill_on_switch = False
            self.launcher.crash()
            return
        self.stored = decision.state.record
        self._send(decision)

    def _send(self, decision: ev.Decision) -> None:
        self.state = decision.state
        if self.deps.kill_on_hold and _tells(decision, Hold):
            self.deps.kill_on_hold = False
            self.deps.timeline.after(self.deps.rng.uniform(0.0, 0.02), self.launcher.crash)
        wakes = []
        for effect in decision.effects:
            match effect:
                case ev.Tell(node, incarnation, message):
                    line = self.lines.get((node, incarnation))
                    if line is not None:
                        line.stream.send(line.end, message)
                case ev.Probe(info):
                    self._probe(info, self.launcher.now_s + 2 * self.deps.spec.timeouts.lease_ttl_s)
                case ev.Revoke(incarnation):
                    self._revoke(incarnation)
                case ev.WakeAt(at_s):
                    wakes.append(at_s)
                case ev.Grant(verdict, text):
                    asking, self._asking = self._asking, None
                    if asking is not None:
                        asking.answer(Granted(verdict, text, self._scaled, decision.state.record.sizing.generation))
                case ev.Note(text=text):
                    self.launcher.say(f"Master: {text}")
                case ev.Conclude():
                    self._conclude()
        self._set_timer(min(wakes, default=None))
        self._busy = False
        self._pump()

    def _set_timer(self, at_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at_s is None else self.launcher.at_local(at_s, self.feed, ev.Tick())

    def _probe(self, info: NodeInfo, until_s: float) -> None:
        if self.over or (info.node, info.incarnation) in self.lines or self.launcher.now_s > until_s:
            return
        host = self.launcher.host
        gone = (info.host, info.port) not in self.deps.listening
        if gone and self.deps.network.both(host, info.host):
            self.launcher.after(self.deps.network.delay_s(), self.feed, ev.NodeRefused(info.node, info.incarnation))
        else:
            self.launcher.after(0.1, self._probe, info, until_s)

    def _revoke(self, incarnation: Incarnation) -> None:
        self.launcher.ask(lambda store: store.revoke(incarnation), lambda _: None, lambda _: None)

    def _conclude(self) -> None:
        if self.concluded:
            return
        self.concluded = True
        assert self.state is not None  # noqa: S101 - a Master concludes in a step
        outcome, token = self.state.record.outcome, self.token

        def farewell(store: SimStore) -> None:
            if store.token(MASTER_KEY) == token:
                store.put(FAREWELL_KEY, outcome)

        self.launcher.ask(farewell, lambda _: self.launcher.rule_concluded(), lambda _: self.launcher.rule_concluded())


def _tells(decision: ev.Decision, kind: type) -> bool:
    return any(isinstance(effect, ev.Tell) and isinstance(effect.message, kind) for effect in decision.effects)


def fence_holds(store: SimStore, token: Token) -> bool:
    """The condition of every write of a Master."""
    return store.token(MASTER_KEY) == token


def describe(state: MasterState | None) -> str:
    """A Master's view in one line, for messages of failed checks."""
    if state is None:
        return "no state"
    nodes = ", ".join(
        f"{n}:{e.status.value}{'' if e.attached else ' away'}{'' if e.registered else ' unregistered'}"
        for n, e in state.nodes.items()
    )
    record = dataclasses.replace(state.record, failures=(), world=None)
    return f"{record} | {nodes} | {state.reason}"
