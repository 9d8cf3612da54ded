"""The job's launchers, as far as the Master sees them: they follow its orders after fixed times, and fail."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from edl.master import events as ev
from edl.master.state import MasterState
from edl.simulate.agenda import Agenda
from edl.simulate.history import SlowWindow, slowness
from edl.simulate.shape import ClusterShape, JobShape, PhaseTimes
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.messages import (
    AgentMessage,
    Attach,
    Boundary,
    Dismissed,
    Hold,
    Leaving,
    LoadState,
    Preparing,
    Prestart,
    Ready,
    StartRound,
    StopRound,
    Switch,
    Underway,
    WorkerFailed,
)
from edl.wire.purpose import Purpose
from edl.wire.records import NO_STATE, Failure, Holding, NodeInfo, Version, World

NS = 1_000_000_000
STORED = Version(1, 1)
"""The newest checkpoint in storage, whichever it is: older than every commit in memory."""
FIRST_COMMIT = 10
GRACE_S = 120.0
"""Notice that a drained node has."""
RETURN_S = 0.001
"""A node's next launcher registers after the lease of the last one has ended."""
PORTS = (9000, 9001, 9002)


@dataclass(slots=True)
class FleetNode:
    """One launcher, with its workers."""

    number: int
    info: NodeInfo
    up: bool = True
    orders: int = 0
    """Orders that it has received: an answer to an earlier one is void."""
    seen: Round = Round(0)
    running: bool = False
    parked: bool = False
    broken: bool = False
    """A worker of it has ended."""
    holdings: tuple[Holding, ...] = ()
    silent_s: float | None = None
    """When the Master heard that its stream broke; None: it has not."""
    gone_s: float | None = None
    """When the Master removed it; None: it has not."""
    away_s: float = 0.0
    """How long it stays away once it is down."""


Answer = tuple[float, Callable[[FleetNode], AgentMessage]]
"""Seconds after an order, and the message then."""


class Fleet:
    """All launchers of the simulated job."""

    def __init__(
        self, cluster: ClusterShape, job: JobShape, times: PhaseTimes, agenda: Agenda, slow: tuple[SlowWindow, ...]
    ) -> None:
        self.job, self.times = job, times
        self._agenda, self._slow = agenda, slow
        rack = cluster.rack_nodes if cluster.racks_known else 0
        self.nodes = [FleetNode(number, _info(number, rack)) for number in range(cluster.nodes)]
        self.by_id = {node.info.node: node for node in self.nodes}
        self.commit = FIRST_COMMIT
        self.trained = False
        """Whether there can be a checkpoint."""
        self.repair_ns = 0
        self._lives = cluster.nodes
        self._now_s = 0.0
        self._starting: list[tuple[FleetNode, int]] = []
        self._groups: dict[tuple[float, Callable[[FleetNode], AgentMessage]], list[tuple[FleetNode, int]]] = {}
        self._handlers: dict[type, Callable[[FleetNode, Any], Answer | None]] = {
            StopRound: self._stop,
            Prestart: self._prestart,
            Hold: self._hold,
            Switch: self._switch,
            LoadState: self._load,
        }

    # --- the Master's orders -----------------------------------------------------------------------------------------

    def follow_orders(self, effects: Iterable[ev.Effect], now_s: float) -> None:
        """Enter into the agenda what launchers answer to these messages."""
        self._now_s = now_s
        world: World | None = None
        for effect in effects:
            if not isinstance(effect, ev.TellNode):
                continue
            node = self.by_id[effect.node]
            if not node.up or node.info.incarnation != effect.incarnation:
                continue
            if isinstance(effect.message, StartRound):
                world = effect.message.world
                self._start(node, world)
            elif isinstance(effect.message, Dismissed):
                self._agenda.add(now_s, functools.partial(self._left, node, node.info.incarnation), heard=False)
            elif handler := self._handlers.get(type(effect.message)):
                self._answer(node, handler(node, effect.message))
        for (after_s, message), group in self._groups.items():
            self._agenda.add(now_s + after_s, functools.partial(self._say, group, message))
        self._groups.clear()
        if world is not None:
            self._begin(world)

    def _answer(self, node: FleetNode, answer: Answer | None) -> None:
        if answer is not None:
            node.orders += 1
            self._groups.setdefault(answer, []).append((node, node.orders))

    def _say(
        self, group: Sequence[tuple[FleetNode, int]], message: Callable[[FleetNode], AgentMessage], now_s: float
    ) -> list[ev.Event]:
        self._now_s = now_s
        return [_said(node, message(node)) for node, orders in group if node.up and node.orders == orders]

    def _start(self, node: FleetNode, world: World) -> None:
        node.orders += 1
        node.seen, node.running, node.broken = world.round, True, False
        self._starting.append((node, node.orders))

    def _begin(self, world: World) -> None:
        """All members of a world form their communicator and read the state."""
        group, self._starting = self._starting, []
        times, restore_s = self.times, 0.0
        if world.stored:
            restore_s = times.load_s * slowness(self._slow, round(self._now_s * NS))
        elif world.restore.commit:
            restore_s = times.restore_s
        start_s = 0.0 if all(node.parked for node, _ in group) else times.start_s
        under = Underway(world.round, "simulated", connect_s=times.connect_s, restore_s=restore_s)
        begun_s = self._now_s + start_s + times.connect_s + restore_s
        self._agenda.add(begun_s, functools.partial(self._underway, group, len(world.members), under))

    def _underway(
        self, group: Sequence[tuple[FleetNode, int]], size: int, message: Underway, now_s: float
    ) -> list[ev.Event]:
        """Without one of its members, a world has no communicator, and none of its workers trains."""
        there = [node for node, orders in group if node.up and node.orders == orders and not node.broken]
        if len(there) < size:
            return []
        self.trained = True
        return [_said(node, message) for node in there]

    def _stop(self, node: FleetNode, message: StopRound) -> Answer:
        if not node.running:
            return 0.0, self._ready
        kept = self.job.in_process and not node.broken
        return self.times.stop_s, (self._park if kept else self._prepare)

    def _switch(self, node: FleetNode, message: Switch) -> Answer | None:
        if not message.commit or message.purpose is Purpose.SAVE:
            return None
        return self.times.hold_s, (self._park if self.job.in_process else self._prepare)

    def _prestart(self, node: FleetNode, message: Prestart) -> Answer:
        return self.times.start_s, self._park

    def _hold(self, node: FleetNode, message: Hold) -> Answer:
        return self.times.stop_s, _boundary(message.round, message.hold, self.commit)

    def _load(self, node: FleetNode, message: LoadState) -> Answer:
        # Of a sharded checkpoint this node reads only the manifest; then all workers read their parts.
        if self.job.state_nodes != 1:
            return 0.0, self._ready
        return self.times.load_s * slowness(self._slow, round(self._now_s * NS)), self._loaded

    # --- what launchers say ------------------------------------------------------------------------------------------

    def _ready(self, node: FleetNode) -> Ready:
        node.running = node.broken = False
        stored = STORED if self.trained else NO_STATE
        sharded = self.job.state_nodes != 1
        return Ready(node.seen, PORTS, node.parked, node.holdings, stored, stored_sharded=sharded)

    def _park(self, node: FleetNode) -> Ready:
        node.parked = True
        return self._ready(node)

    def _loaded(self, node: FleetNode) -> Ready:
        node.holdings = (Holding(STORED),)
        return self._ready(node)

    def _prepare(self, node: FleetNode) -> Preparing:
        """Its workers' processes start again, and wait for their world."""
        node.running = node.broken = False
        node.orders += 1
        parks = functools.partial(self._say, [(node, node.orders)], self._park)
        self._agenda.add(self._now_s + self.times.start_s, parks)
        return Preparing(node.seen, "starting workers ahead of the next world", node.holdings)

    def cut(self, before: MasterState) -> None:
        """The training of a world has ended: its members hold a new commit, and copies of it."""
        world = before.record.world
        self.commit += 1
        for node in self.nodes:
            node.holdings = ()
        if world is None or not self.job.memory:
            return
        size = len(world.members)
        version, shards = Version(world.era, self.commit), min(self.job.state_nodes or size, size)
        held: dict[NodeId, dict[int, Holding]] = {}
        for position, member in enumerate(world.members):
            shard = position % shards
            holding = Holding(version, shard, shards)
            entry = before.nodes.get(member.node)
            holders = (member.node, entry.copy_holder if entry is not None else "")
            for holder in holders if shards > 1 or size == 1 else holders[:1]:
                if holder:
                    held.setdefault(NodeId(holder), {})[shard] = holding
        for name, parts in held.items():
            self.by_id[name].holdings = tuple(parts.values())

    # --- what happens to them ----------------------------------------------------------------------------------------

    def join_all(self, now_s: float) -> list[ev.Event]:
        """The job begins: all launchers register, and are ready once they have imported their framework."""
        return [event for node in self.nodes for event in self._join(node, now_s)]

    def _join(self, node: FleetNode, now_s: float) -> list[ev.Event]:
        group = [(node, node.orders)]
        self._agenda.add(now_s + self.times.boot_s, functools.partial(self._say, group, self._ready))
        if node.gone_s is not None:
            self.repair_ns += round(now_s * NS) - round(node.gone_s * NS)
        node.up, node.gone_s, node.silent_s = True, None, None
        return [ev.NodeRegistered(node.info), ev.NodeAttached(Attach(node.info, Round(0), Round(0), False))]

    def fail_worker(self, node: FleetNode, now_s: float) -> bool:
        """A worker of a node ends. False: none runs there."""
        if not node.up or not node.running or node.broken:
            return False
        node.broken = True
        rank = Rank(0)  # of the node's own numbers; the world's are not needed
        failure = Failure(node.info.node, node.seen, rank, 0, 1, "ended with exit status 1")
        said = functools.partial(self._say, [(node, node.orders)], lambda node: WorkerFailed(failure))
        self._agenda.add(now_s + self.times.noticed_worker_s, said)
        return True

    def fail_node(self, node: FleetNode, now_s: float, away_s: float) -> bool:
        """A node falls silent: its stream breaks halfway to the end of its lease. False: it is down already."""
        if not node.up:
            return False
        node.up, node.away_s = False, away_s
        life, noticed_s = node.info.incarnation, self.times.noticed_node_s
        self._agenda.add(now_s + noticed_s / 2, functools.partial(self._detached, node, life))
        self._agenda.add(now_s + noticed_s, functools.partial(self._expired, node, life, now_s))
        return True

    def drain(self, node: FleetNode, away_s: float) -> list[ev.Event]:
        """A node learns that it will be taken away; returns what it says."""
        if not node.up:
            return []
        node.away_s = away_s
        return [_said(node, Leaving("maintenance", GRACE_S))]

    def _left(self, node: FleetNode, life: Incarnation, now_s: float) -> list[ev.Event]:
        if node.up and node.info.incarnation == life:
            node.up = False
            self._agenda.add(now_s, functools.partial(self._expired, node, life, now_s))
        return []

    def _detached(self, node: FleetNode, life: Incarnation, now_s: float) -> list[ev.Event]:
        node.silent_s = now_s
        return [ev.NodeDetached(node.info.node, life)]

    def _expired(self, node: FleetNode, life: Incarnation, since_s: float, now_s: float) -> list[ev.Event]:
        node.gone_s = now_s
        self._agenda.add(max(now_s + RETURN_S, since_s + node.away_s), functools.partial(self._back, node))
        return [ev.NodeExpired(node.info.node, life)]

    def _back(self, node: FleetNode, now_s: float) -> list[ev.Event]:
        """A node returns from its repair with a new launcher, which holds nothing."""
        self._lives += 1
        node.info = dataclasses.replace(node.info, incarnation=Incarnation(self._lives))
        node.seen, node.running, node.parked, node.broken, node.holdings = Round(0), False, False, False, ()
        node.orders += 1
        return self._join(node, now_s)


def _info(number: int, rack_nodes: int) -> NodeInfo:
    name = f"node-{number}"
    rack = f"rack-{number // rack_nodes}" if rack_nodes else ""
    return NodeInfo(NodeId(name), Incarnation(number + 1), name, 9000, 1, state_port=9001, rack=rack)


def _said(node: FleetNode, message: AgentMessage) -> ev.NodeSaid:
    return ev.NodeSaid(node.info.node, node.info.incarnation, message)


@functools.lru_cache(maxsize=16)
def _boundary(number: Round, hold: int, commit: int) -> Callable[[FleetNode], Boundary]:
    """The same answer of all members, so that it is heard at once."""
    return lambda node: Boundary(number, hold, commit)
