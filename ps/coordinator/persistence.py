"""Encoding of the placement machine's state as separately stored pieces, and its restoration by the next Master."""

from __future__ import annotations

from dataclasses import dataclass

from edl.wire import json_messages
from ps.coordinator.checkpoints import CheckpointCoordinator
from ps.coordinator.state import CHECKPOINT, PEOPLE, PLACEMENT, SERVERS, TABLES, PlacementState, Pserver
from ps.protocol import messages
from ps.spec import TableSpec


@dataclass(frozen=True, slots=True)
class _PlacementMap:
    version: int
    history: int
    opened: bool
    stage: str
    reason: str
    found: tuple[messages.FoundCheckpoint, ...]
    top_step: int
    grids: tuple[str, ...]
    """The grids of ``_GRIDS``, packed."""


@dataclass(frozen=True, slots=True)
class _Server:
    number: int
    name: str
    host: str
    port: int
    path: str
    machine: str
    most_bytes: int
    draining: bool
    confirmed: bool


@dataclass(frozen=True, slots=True)
class _Servers:
    numbers: int
    servers: tuple[_Server, ...]


@dataclass(frozen=True, slots=True)
class _Tables:
    tables: tuple[TableSpec, ...]
    saved_lr: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Lr:
    holds: tuple[messages.LrHold, ...]
    worlds: tuple[messages.LrHold, ...]
    world: float


_GRIDS = ("owner", "backup", "joining", "giver", "heir", "since")


def _code(name: str) -> str:
    return "i" if name == "since" else "h"


def save_piece(state: PlacementState, checkpoints: CheckpointCoordinator, piece: str) -> bytes:
    """Encode one piece of the current state."""
    if piece == PEOPLE:
        return state.people.encode()
    if piece == CHECKPOINT:
        return checkpoints.encode()
    value: object
    if piece == PLACEMENT:
        value = _PlacementMap(
            version=state.version,
            history=state.history,
            opened=state.opened,
            stage=state.stage,
            reason=state.reason,
            found=state.found,
            top_step=state.top_step,
            grids=tuple(messages.pack(getattr(state.grid, name), _code(name)) for name in _GRIDS),
        )
    elif piece == SERVERS:
        names = _Server.__dataclass_fields__
        servers = (_Server(*(getattr(one, name) for name in names)) for one in state.servers.values())
        value = _Servers(state.numbers, tuple(servers))
    elif piece == TABLES:
        value = _Tables(tuple(state.tables.values()), tuple(sorted(state.saved_lr)))
    else:
        value = _Lr(tuple(state.holds), tuple(state.world_holds), state.world_factor)
    return json_messages.encode(value)


def load_piece(state: PlacementState, checkpoints: CheckpointCoordinator, piece: str, text: bytes) -> None:
    """Restore one piece. Raises ``ValueError``, ``TypeError``, ``KeyError`` or ``ProtocolError`` for invalid data."""
    if piece == PEOPLE:
        state.people.decode(text)
    elif piece == CHECKPOINT:
        checkpoints.decode(text)
    elif piece == PLACEMENT:
        placement = json_messages.decode(_PlacementMap, text)
        state.version, state.history, state.opened = placement.version, placement.history, placement.opened
        state.stage, state.reason, state.found = placement.stage, placement.reason, placement.found
        state.top_step = placement.top_step
        for name, grid in zip(_GRIDS, placement.grids, strict=True):
            setattr(state.grid, name, messages.unpack(grid, state.grid.buckets, _code(name)))
    elif piece == SERVERS:
        kept = json_messages.decode(_Servers, text)
        state.numbers = kept.numbers
        state.servers = {
            one.number: Pserver(**{name: getattr(one, name) for name in _Server.__dataclass_fields__})
            for one in kept.servers
        }
    elif piece == TABLES:
        defined = json_messages.decode(_Tables, text)
        state.tables, state.saved_lr = {table.name: table for table in defined.tables}, set(defined.saved_lr)
    else:
        lr = json_messages.decode(_Lr, text)
        state.holds, state.world_holds, state.world_factor = list(lr.holds), list(lr.worlds), lr.world
