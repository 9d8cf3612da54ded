"""One step of the Master in progress: the state as changed so far, and the effects collected so far.

Mutable, but never visible outside one ``step``. Each rule sees the changes of the rules before it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from edl.config import NodeRange
from edl.job_records import HealthMode
from edl.master.events import Conclude, Decision, Effect, HistoryNote, Kind, Probe, Revoke, TellNode, WakeAt
from edl.master.policies.health import KnownHealth
from edl.master.policies.slots import KnownDrops
from edl.master.sizing import Departing
from edl.master.state import MasterState, NodeEntry, NodeStatus, Phase, Record
from edl.rendezvous.rules import NextSize, next_size
from edl.types import Incarnation, NodeId
from edl.wire.messages import MasterMessage
from edl.wire.records import Member, NodeInfo, Version, World
from edl.wire.scale_requests import DrainMode


class MasterTurn:
    """The working copy of a ``MasterState`` during one step."""

    def __init__(self, state: MasterState, now_s: float) -> None:
        self.spec = state.spec
        self.now_s = now_s
        self.record: Record = state.record
        self.nodes: dict[NodeId, NodeEntry] = dict(state.nodes)
        self.dead = state.dead
        self.arrivals = state.arrivals
        self.began_s = state.began_s
        self.away_s = state.away_s
        self.forming_since_s = state.forming_since_s
        self.grace_until_s = state.grace_until_s
        self.ended_at_s = state.ended_at_s
        self.agreement = state.agreement
        self.agreements = state.agreements
        self.planned = state.planned
        self.formed_at_s = state.formed_at_s
        self.trained_s = state.trained_s
        self.quick = state.quick
        self.held = state.held
        self.held_until_s = state.held_until_s
        self.dropped_s = state.dropped_s
        self.denylist = state.denylist
        self.settings_failed = state.settings_failed
        self.resizing = state.resizing
        self.cooling_until_s = state.cooling_until_s
        self.saving = state.saving
        self.save_s = state.save_s
        self.unwritten, self.failed_writes = state.unwritten, state.failed_writes
        self.scaling = state.scaling
        self.straggling = state.straggling
        self.health = state.health
        self.reason = state.reason
        self.effects: list[Effect] = []
        self._excluding: Record | None = None
        """The record from which ``_departing`` and ``_cordoned`` were computed."""
        self._departing: dict[tuple[NodeId, Incarnation], Departing] = {}
        self._cordoned: set[NodeId] = set()
        self._known_health: KnownHealth | None = None
        self._known_drops: KnownDrops | None = None
        self._lagging: NodeId | None = None
        """The last member that was not underway when ``underway`` looked; most likely it still is not."""

    def decision(self) -> Decision:
        """The result of this step."""
        state = MasterState(
            spec=self.spec,
            record=self.record,
            nodes=self.nodes,
            dead=self.dead,
            arrivals=self.arrivals,
            began_s=self.began_s,
            away_s=self.away_s,
            forming_since_s=self.forming_since_s,
            grace_until_s=self.grace_until_s,
            ended_at_s=self.ended_at_s,
            agreement=self.agreement,
            agreements=self.agreements,
            planned=self.planned,
            formed_at_s=self.formed_at_s,
            trained_s=self.trained_s,
            quick=self.quick,
            held=self.held,
            held_until_s=self.held_until_s,
            dropped_s=self.dropped_s,
            denylist=self.denylist,
            settings_failed=self.settings_failed,
            resizing=self.resizing,
            cooling_until_s=self.cooling_until_s,
            saving=self.saving,
            save_s=self.save_s,
            unwritten=self.unwritten,
            failed_writes=self.failed_writes,
            scaling=self.scaling,
            straggling=self.straggling,
            health=self.health,
            reason=self.reason,
        )
        return Decision(state, tuple(self.effects), self.reason)

    # --- queries ---------------------------------------------------------------------------------------------------

    def lease_s(self, info: NodeInfo) -> float:
        """Duration of a node's lease in seconds."""
        return info.lease_within(self.spec.timeouts.lease_ttl_s)

    def absence_s(self, info: NodeInfo) -> float:
        """Seconds that a node may be absent before others continue without it, unless it is proven dead before. A node
        that is cut off has stopped its workers by then (decision 0007)."""
        return 2 * self.lease_s(info)

    def member(self, entry: NodeEntry) -> Member | None:
        """The node's place in the recorded world; None: this incarnation has none."""
        world = self.record.world
        if world is None:
            return None
        member = world.member(entry.info.node)
        return member if member is not None and member.incarnation == entry.info.incarnation else None

    def current(self, node: NodeId, incarnation: Incarnation) -> NodeEntry | None:
        """The entry of a node; None: it is gone, or another incarnation has taken its place."""
        entry = self.nodes.get(node)
        return entry if entry is not None and entry.info.incarnation == incarnation else None

    @property
    def bounds(self) -> NodeRange:
        """The allowed numbers of nodes of a world: those of the spec, unless a request has changed them."""
        return self.record.sizing.bounds(self.spec.nodes)

    def next_size(self, available: int) -> NextSize:
        """The size of the next world if ``available`` nodes can be in it."""
        world = self.record.world
        previous = len(world.members) if world is not None else 0
        wanted = self.record.sizing.requested(self.spec.nodes)
        return next_size(self.bounds, self.spec.fault_tolerance, previous, available, wanted)

    def free(self) -> list[NodeEntry]:
        """Nodes that run no worker and do not leave."""
        return [
            entry
            for entry in self.nodes.values()
            if entry.status is NodeStatus.READY and entry.attached and entry.registered and not entry.draining
        ]

    def ready(self) -> list[NodeEntry]:
        """Nodes that the next world can have now."""
        return [entry for entry in self.free() if not (self.excluded(entry) or self.must_be_checked(entry))]

    def unchecked(self) -> list[NodeEntry]:
        """Nodes that the next world can have once their health has been checked."""
        if not self.checks_health:
            return []
        return [entry for entry in self.free() if self.must_be_checked(entry) and not self.excluded(entry)]

    def must_be_checked(self, entry: NodeEntry) -> bool:
        """Whether a node's health must be checked before it is in a world again."""
        if not self.checks_health:
            return False
        return bool(self.known_health.why_due(entry.info, self.spec.health, member=self.member(entry) is not None))

    @property
    def checks_health(self) -> bool:
        """Whether a node may have to be checked: checks are on, or one was requested."""
        return self.spec.health.mode is not HealthMode.OFF or not self.known_health.empty

    @property
    def known_health(self) -> KnownHealth:
        """What is known about the nodes' health."""
        known = self._known_health
        if known is None or known.record is not self.record.health:
            known = self._known_health = KnownHealth(self.record.health)
        return known

    def places(self, entry: NodeEntry) -> tuple[int, ...]:
        """The slots of a node that the next world's workers use; empty: all are dropped."""
        known = self._known_drops
        if known is None or known.dropped is not self.record.dropped:
            known = self._known_drops = KnownDrops(self.record.dropped)
        return known.places(entry.info, self.spec.replicas)

    def excluded(self, entry: NodeEntry) -> bool:
        """Whether a node is kept out of the next world: cordoned, departing, faulty, or without a usable slot."""
        return self._departure(entry) is not None or self._is_kept_out(entry)

    def staying(self) -> list[NodeEntry]:
        """Departing nodes that must not leave before a checkpoint is complete, and that the next world can have until
        then, if there is none without them."""
        return [entry for entry in self.free() if self._stays(entry) and not self._is_kept_out(entry)]

    def is_saved(self, one: Departing) -> bool:
        """Whether the checkpoint that a departing node waits for is complete."""
        wanted, saved = Version(one.era, one.commit), self.record.saved
        return bool(one.commit) and (saved >= wanted or any(entry.stored >= wanted for entry in self.nodes.values()))

    def able(self) -> list[NodeEntry]:
        """Living nodes that can be in a world, now or once they are ready."""
        left = {(one.node, one.incarnation) for one in self.record.away}  # they take their time to exit
        return [
            entry
            for entry in self.nodes.values()
            if entry.registered
            and entry.status is not NodeStatus.LEAVING
            and not entry.draining
            and (entry.info.node, entry.info.incarnation) not in left
            and not self.excluded(entry)
        ]

    def _stays(self, entry: NodeEntry) -> bool:
        one = self._departure(entry)
        must_wait = one is not None and one.mode is DrainMode.MUST and not self.is_saved(one)
        return must_wait and not entry.orders.depart and not self.must_be_checked(entry)

    def _departure(self, entry: NodeEntry) -> Departing | None:
        self._read_exclusions()
        return self._departing.get((entry.info.node, entry.info.incarnation))

    def _is_kept_out(self, entry: NodeEntry) -> bool:
        """Whether a node is kept out for another reason than a departure."""
        self._read_exclusions()
        cordoned = entry.info.node in self._cordoned
        return cordoned or not self.places(entry) or self.known_health.is_kept_out(entry.info)

    def _read_exclusions(self) -> None:
        if self._excluding is not self.record:  # computed once per record: there may be hundreds of both
            self._excluding = self.record
            self._departing = {(one.node, one.incarnation): one for one in self.record.departing}
            self._cordoned = {one.node for one in self.record.sizing.cordoned}

    def members(self) -> list[NodeEntry]:
        """The entries of the recorded world's members that still exist, in the world's order."""
        world = self.record.world
        places = world.members if world is not None else ()
        found = [self.current(place.node, place.incarnation) for place in places]
        return [entry for entry in found if entry is not None]

    @property
    def finished(self) -> frozenset[NodeId]:
        """Nodes of the running world whose workers have succeeded and whose saves are written."""
        return frozenset(self.record.done) - frozenset(self.record.saving)

    @property
    def at_boundary(self) -> bool:
        """Whether the last world is being left at a step boundary; any problem turns that into an interruption."""
        return self.record.switch is not None

    @property
    def underway(self) -> bool:
        """Whether all members of the running world train and can be held at a step boundary."""
        world = self.record.world
        if self.record.phase is not Phase.RUNNING or world is None:
            return False
        # A thousand reports come in one step: looking at all members after each would be quadratic.
        if self._lagging is not None and world.member(self._lagging) is not None and self._lags(world, self._lagging):
            return False
        lagging = (member.node for member in reversed(world.members) if self._lags(world, member.node))
        self._lagging = next(lagging, None)
        return self._lagging is None

    def _lags(self, world: World, node: NodeId) -> bool:
        """Whether this member is gone or not underway."""
        place, entry = world.member(node), self.nodes.get(node)
        return place is None or entry is None or entry.info.incarnation != place.incarnation or not entry.underway

    # --- changes and effects ---------------------------------------------------------------------------------------

    def update(self, entry: NodeEntry, **changes: Any) -> NodeEntry:
        """Replace fields of a node's entry; returns the new entry, or this one if they have these values already."""
        node = entry.info.node
        if self.nodes.get(node) is entry and all(getattr(entry, name) == value for name, value in changes.items()):
            return entry
        changed = entry._replace(**changes)
        self.nodes[node] = changed
        return changed

    def ordered(self, entry: NodeEntry, **changes: Any) -> NodeEntry:
        """Replace fields of ``NodeEntry.orders``; returns the new entry."""
        return self.update(entry, orders=entry.orders._replace(**changes))

    def write(self, **changes: Any) -> None:
        """Replace fields of the record; the shell stores it before any effect runs."""
        self.record = dataclasses.replace(self.record, **changes)

    def tell(self, entry: NodeEntry, message: MasterMessage) -> None:
        """Send a message to a node, if it is attached. Otherwise it is brought up to date when it attaches."""
        if entry.attached:
            self.effects.append(TellNode(entry.info.node, entry.info.incarnation, message))

    def probe(self, entry: NodeEntry) -> None:
        """Find out whether the node's launcher refuses connections, so that it is dead."""
        self.effects.append(Probe(entry.info))

    def revoke(self, incarnation: Incarnation) -> None:
        """Revoke the lease of a dead launcher."""
        self.effects.append(Revoke(incarnation))

    def mention(self, kind: Kind, text: str, node: str = "", severity: str = "") -> None:
        """Add an entry to the history that explains no decision: the reason of this step stays."""
        self.effects.append(HistoryNote(kind, text, node, severity, self.record.round))

    def wake_at(self, at_s: float) -> None:
        """Request a tick at this time."""
        self.effects.append(WakeAt(at_s))

    def note(self, kind: Kind, text: str, node: str = "", severity: str = "") -> None:
        """Add an entry to the history, which also becomes the reason of this step."""
        self.reason = text
        self.mention(kind, text, node, severity)

    def conclude(self) -> None:
        """End the job in the store, and let the Master exit."""
        self.effects.append(Conclude())
