"""The machine that places buckets on pservers: the Master's service "ps".

Pure: events in, effects out. ``placement`` decides which pserver holds what, ``servers`` handles the pservers,
``trainers`` and ``membership`` the trainers, ``checkpoints`` the checkpoints; ``state`` is shared by all. This file
dispatches events and then runs every consequence. It is level-triggered, so nothing depends on a single message being
received. Any change raises the placement map's version, is persisted, and is sent to every pserver as the complete
current state (or as a delta from it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edl.errors import ProtocolError
from edl.job_records import Training
from edl.master import service as sv
from edl.master.service import Effect, Event, Fail, Keep, Progress, Send, WakeAt
from edl.wire.json_messages import to_plain
from ps.coordinator.checkpoints import CheckpointCoordinator
from ps.coordinator.persistence import load_piece, save_piece
from ps.coordinator.placement import Grid
from ps.coordinator.report import report
from ps.coordinator.servers import PserverRegistry
from ps.coordinator.state import (
    CHECKPOINT,
    LR,
    PEOPLE,
    PLACEMENT,
    PREFIX,
    SERVERS,
    TABLES,
    CoordinatorLimits,
    PlacementState,
    PlacementTurn,
    Pserver,
    label_of,
)
from ps.coordinator.trainers import TrainerRegistry
from ps.protocol import messages
from ps.protocol.deltas import orders_changed
from ps.spec import BUCKETS

PIECES = (PLACEMENT, SERVERS, PEOPLE, TABLES, CHECKPOINT, LR)
_CAN_WAIT = ('{"word":"Synced"', '{"word":"Took"')
"""Messages after which no process waits for new orders."""


class PlacementMachine:
    """Implements ``edl.master.service.Service``. The state is mutable."""

    name = "ps"

    def __init__(
        self, training: Training, *, buckets: int = BUCKETS, limits: CoordinatorLimits | None = None, secret: str = ""
    ) -> None:
        """``secret``: what trainers show to pservers. A Master may take over while no pserver has a key, which would
        tell it."""
        self.state = PlacementState(training, limits or CoordinatorLimits(), Grid(buckets))
        self.checkpoints = CheckpointCoordinator(self.state)
        self.trainers = TrainerRegistry(self.state, self.checkpoints, self.placement, lambda: self.servers.secret)
        self.servers = PserverRegistry(self.state, self.checkpoints, self.trainers, secret)
        self._kept: dict[str, bytes] = {}
        self._placement = messages.PlacementMap()
        self._over = False
        self._wake_s = 0.0
        """Time of the earliest requested tick; 0: none."""
        self._gather_s = 0.0
        """Until this time, changes that can wait are batched; 0: none are pending."""
        self._crowd_s = 0.0
        """Until this time, further membership changes are batched."""
        self._crowd: tuple[set[str], set[str]] = (set(), set())
        """Batched membership changes: the changed pieces and the pieces to persist."""
        self._orders: messages.Orders | None = None
        """The newest orders, without the parts specific to one pserver."""
        self._sent_versions: dict[int, int] = {}
        """Version of the newest orders sent to each pserver."""

    def load(self, kept: Mapping[str, bytes], now_s: float) -> tuple[Effect, ...]:
        """Start from the state that the previous Master persisted. Called first."""
        turn = PlacementTurn(now_s)
        try:
            for piece in PIECES:
                if kept.get(piece):
                    load_piece(self.state, self.checkpoints, piece, kept[piece])
                    self._kept[piece] = kept[piece]
        except (ProtocolError, ValueError, TypeError, KeyError) as error:
            self.servers.failed = (
                f"the state of the parameter servers written by the previous Master is unusable: {error!r}"
            )
        self._placement = self._placement_map()
        self.servers.taken_over(turn)
        return self._finish(turn)

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Process one event. Every message is answered, including invalid ones."""
        turn = PlacementTurn(now_s)
        match event:
            case sv.Said(caller, _, body):
                self.trainers.said(turn, caller, body)
            case sv.HelperSaid(name, body) if name.startswith(PREFIX):
                self._heard(turn, name, body)
            case sv.KeyPut(name, value) if name.startswith(PREFIX):
                self.servers.key_put(turn, name, value)
            case sv.KeyGone(name):
                self.servers.key_gone(turn, name)
            case sv.LineDown(name, refused):
                self.servers.line_down(turn, name, refused)
            case sv.WorldBegan(world):
                self.trainers.world_began(turn, world)
            case sv.SettingsHold(settings):
                self.trainers.settings_hold(turn, settings)
            case sv.Tick():
                self._wake_s = 0.0
            case _:
                return ()
        return self._finish(turn)

    def report(self) -> tuple[Progress, ...]:
        """Progress of pservers, trainers and checkpoints, for ``edl status``."""
        return report(self.state, self.checkpoints)

    def placement(self) -> messages.PlacementMap:
        """The newest placement map."""
        return self._placement

    # --- the end of a turn -------------------------------------------------------------------------------------------

    def _heard(self, turn: PlacementTurn, name: str, body: str) -> None:
        if body.startswith('{"word":"TrainerLost"'):
            teller = self.state.named(name)
            if teller is None or not teller.confirmed:
                return  # from before the pserver was considered dead: trainers hung up for that reason
            try:
                self.trainers.lost(turn, messages.decode(body).trainer)
            except ProtocolError as error:
                turn.note(f"pserver {label_of(name)}: {error}")
            return
        before = len(self.state.grid.touched)
        self.servers.heard(turn, name, body)
        if len(self.state.grid.touched) == before:
            return
        if not body.startswith(_CAN_WAIT):
            self._gather_s = 0.0
        elif not before:
            self._gather_s = turn.now_s + self.state.limits.gather_s

    def _finish(self, turn: PlacementTurn) -> tuple[Effect, ...]:
        """Process all consequences of an event; persist, then send."""
        state = self.state
        if self._over:
            return ()
        urgent = turn.changed or turn.kept or self.servers.greeted or self.checkpoints.phase
        if turn.now_s < self._gather_s and not urgent:
            return self._asleep(turn, [self._gather_s])
        if self._crowded(turn):
            return self._asleep(turn, [self._crowd_s])
        self._gather_s = 0.0
        for _ in range(3):  # the end of a checkpoint lets buckets move and trainers join
            self.servers.settle(turn)
            self.checkpoints.settle(turn)
            self.trainers.settle(turn)
        if self.servers.failed:
            self._over = True
            return (*self._notes(turn), Fail(self.servers.failed))
        changed = bool(turn.changed or state.grid.touched)
        if changed:
            state.version += 1
            state.grid.stamp(state.version)
            self._placement = self._placement_map()
            turn.kept |= turn.changed | {PLACEMENT}
        keeps = self._keep(turn)
        self._send(turn, changed)
        self.trainers.notify(turn)
        wakes = [effect.at_s for effect in turn.effects if isinstance(effect, WakeAt) and effect.at_s > turn.now_s]
        return (*keeps, *self._asleep(turn, wakes))

    def _crowded(self, turn: PlacementTurn) -> bool:
        """True if only the membership has changed and it also changed a moment ago. At the start of a job trainers join
        by the hundred; one version for many of them is enough."""
        changed, kept = self._crowd
        turn.changed |= changed
        turn.kept |= kept
        new = turn.changed | turn.kept
        if PEOPLE not in new:
            return False
        busy = turn.effects or self.servers.greeted or self.checkpoints.phase or self.state.grid.touched
        waits = new == {PEOPLE} and not busy and turn.now_s < self._crowd_s
        self._crowd = (turn.changed, turn.kept) if waits else (set(), set())
        if not waits:
            self._crowd_s = turn.now_s + self.state.limits.gather_s
        return waits

    def _asleep(self, turn: PlacementTurn, wakes: list[float]) -> tuple[Effect, ...]:
        """The turn's effects, plus a timer if one is needed earlier than the pending one."""
        effects: list[Effect] = [effect for effect in turn.effects if not isinstance(effect, WakeAt)]
        if wakes and (not self._wake_s or min(wakes) < self._wake_s):
            self._wake_s = min(wakes)
            effects.append(WakeAt(self._wake_s))
        return tuple(effects)

    @staticmethod
    def _notes(turn: PlacementTurn) -> list[Effect]:
        return [effect for effect in turn.effects if isinstance(effect, sv.AddToHistory)]

    def _keep(self, turn: PlacementTurn) -> list[Keep]:
        keeps = []
        for piece in PIECES:
            if piece in turn.kept:
                value = save_piece(self.state, self.checkpoints, piece)
                if self._kept.get(piece) != value:
                    self._kept[piece] = value
                    keeps.append(Keep(piece, value))
        return keeps

    def _placement_map(self) -> messages.PlacementMap:
        state = self.state
        servers = tuple(one.public() for one in sorted(state.servers.values(), key=lambda one: one.number))
        grids = (messages.pack(one) for one in (state.grid.owner, state.grid.backup, state.grid.joining))
        return messages.PlacementMap(state.version, state.history, servers, *grids)

    def _send(self, turn: PlacementTurn, changed: bool) -> None:
        """Send new orders to all pservers if anything has changed; complete orders to those that have just
        connected."""
        state = self.state
        greeted, self.servers.greeted = self.servers.greeted, set()
        to = [one for one in state.servers.values() if one.greeted and (changed or one.number in greeted)]
        if not to:
            return
        orders = messages.Orders(
            token=0,
            you=0,
            placement=self._placement,
            epoch=state.people.epoch,
            members=state.members(),
            training=state.training,
            # Before buckets are placed, a checkpoint may still define tables differently, and a pserver defines a table
            # once.
            tables=tuple(state.tables.values()) if state.stage == "placed" else (),
            lr=state.lr,
            revoked=state.people.revoked,
            since=messages.pack(state.grid.since, "i"),
            giver=messages.pack(state.grid.giver),
        )
        last, self._orders = self._orders, orders
        texts: dict[bool, dict[str, Any]] = {}
        for server in to:
            goes_on = last is not None and server.number not in greeted
            goes_on = goes_on and last is not None and self._sent_versions.get(server.number) == last.placement.version
            if goes_on not in texts:
                message = orders_changed(last, orders) if goes_on and last is not None else orders
                texts[goes_on] = {"word": type(message).__name__, **to_plain(message)}
            self._sent_versions[server.number] = orders.placement.version
            fields = {**texts[goes_on], **self._own(server)}
            turn.effects.append(Send(server.name, json.dumps(fields, separators=(",", ":"))))

    def _own(self, server: Pserver) -> dict[str, Any]:
        """The part of the orders that is specific to one pserver."""
        checkpoint = self.servers.order(server.number) or self.checkpoints.order(server.number)
        return {
            "you": server.number,
            "checkpoint": to_plain(checkpoint),
            "drain": server.draining,
            "go": self.servers.may_go(server),
        }
