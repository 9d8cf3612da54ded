"""The trainers' part of the placement machine: joining, membership, learning rates, placement maps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edl.errors import ProtocolError
from edl.master.service import Caller, TellWorker
from edl.wire.records import Settings, World
from ps.coordinator.checkpoints import CheckpointCoordinator
from ps.coordinator.membership import TrainerEntry
from ps.coordinator.report import waiting
from ps.coordinator.state import LR, PEOPLE, PLACEMENT, TABLES, PlacementState, PlacementTurn, unwritten
from ps.protocol import messages
from ps.protocol.deltas import counted
from ps.spec import MOST_TABLES, TableSpec, differences

MOST_HOLDS = 256
ADVICE = "Set the tables back, or give the job another --checkpoint-dir"


class TrainerRegistry:
    """Tracks the trainers in the placement state."""

    def __init__(
        self,
        state: PlacementState,
        checkpoints: CheckpointCoordinator,
        placement: Callable[[], messages.PlacementMap],
        secret: Callable[[], str],
    ) -> None:
        self._state, self._checkpoints, self._placement, self._secret = state, checkpoints, placement, secret
        self._waiting: dict[Caller, messages.Join] = {}
        """Join requests to be answered once every bucket has an owner."""
        self._ready: dict[Caller, TrainerEntry] = {}
        """Trainers to be answered at the end of this turn."""
        self._asked: set[Caller] = set()
        """Callers that have sent Join in this turn."""
        self._beginning: dict[int, None] = {}
        """Trainers that become members as soon as the checkpoint is marked."""
        self._world: World | None = None
        self._sent: messages.PlacementUpdate | None = None
        """The state that trainers have if they have received every message."""

    # --- worlds ------------------------------------------------------------------------------------------------------

    def world_began(self, turn: PlacementTurn, world: World) -> None:
        """A new world has begun: trainers whose slot is not in it are lost, the others continue."""
        self._world = world
        self._lost(turn, self._state.people.follow(world))
        self._waiting = {caller: join for caller, join in self._waiting.items() if self._has_place(caller)}

    def _has_place(self, caller: Caller) -> bool:
        member = self._world.member(caller.node) if self._world is not None else None
        return self._world is None or (member is not None and caller.slot in member.used)

    def lost(self, turn: PlacementTurn, number: int) -> None:
        """A pserver reports that a trainer's connections broke."""
        self._lost(turn, self._state.people.lose([number]))

    def _lost(self, turn: PlacementTurn, gone: list[TrainerEntry]) -> None:
        for one in gone:
            if one.begun:
                turn.note(f"trainer {one.name} (number {one.number}) is lost; the others continue without it")
            self._beginning.pop(one.number, None)
            self._checkpoints.forget(one.caller)
            turn.change(PEOPLE)

    def rolled_back(self, turn: PlacementTurn) -> None:
        """The parameters are rolled back to a new history; all trainers must restart."""
        state = self._state
        text = f"{state.reason}: the parameters are rolled back to the last checkpoint. Restart the process"
        for one in state.people.trainers.values():
            turn.send(one.caller, messages.RequestRefused("stale", text))
        state.people.lose(list(state.people.trainers))
        self._beginning = {}
        for caller, message in self._waiting.items():  # not admitted yet, so they stay
            self._join(turn, caller, message)
        # Scripts set their factors again; those set by hand for the whole job still apply.
        state.holds = []
        state.world_holds = [messages.LrHold(0, state.world_factor)] if state.world_factor != 1.0 else []
        turn.change(PEOPLE)
        turn.change(LR)

    # --- messages ----------------------------------------------------------------------------------------------------

    def said(self, turn: PlacementTurn, caller: Caller, body: str) -> None:
        """Process a message from a trainer."""
        try:
            message = messages.decode(body)
        except ProtocolError as error:
            turn.send(caller, messages.RequestRefused("word", f"invalid message: {error}"))
            return
        if not self._has_place(caller):
            turn.send(
                caller,
                messages.RequestRefused("stale", f"{caller.node}/{caller.slot} has no slot in the job's current world"),
            )
            return
        if isinstance(message, messages.Join):
            self._join(turn, caller, message)
            return
        trainer = self._state.people.at(caller)
        number = getattr(message, "number", trainer.number if trainer is not None else 0)
        if trainer is None or number != trainer.number:
            text = f"{caller.node}/{caller.slot}: the slot is taken, or the process has never joined. Restart it"
            turn.send(caller, messages.RequestRefused("stale", text, getattr(message, "ask", 0)))
            return
        self._on_message(turn, trainer, message)

    def _on_message(self, turn: PlacementTurn, trainer: TrainerEntry, message: Any) -> None:
        match message:
            case messages.Begin():
                self._begin(turn, trainer)
            case messages.LeaveMembership():
                self._beginning.pop(trainer.number, None)
                if self._state.people.leave(trainer.number):
                    turn.change(PEOPLE)
            case messages.GetPlacement(version):
                if self._state.version > version:
                    turn.send(trainer.caller, self.placement_update())
            case messages.Suspect(server, why):
                one = self._state.servers.get(server)
                if one is not None:
                    turn.note(f"trainer {trainer.name} cannot reach pserver {one.label}: {why}")
                turn.send(trainer.caller, self.placement_update())
            case messages.SetLr(_, hold, ask):
                self._set_lr(turn, trainer, hold, ask)
            case messages.Save(ask):
                self._checkpoints.ask(turn, trainer.caller, ask)
            case messages.AtCheckpoint():
                self._checkpoints.at_checkpoint(turn, trainer, message)
            case messages.DataNamed():
                self._checkpoints.data_named(turn, trainer, message)
            case _:
                text = f"{type(message).__name__} is not a message that a trainer sends"
                turn.send(trainer.caller, messages.RequestRefused("word", text))

    def _join(self, turn: PlacementTurn, caller: Caller, message: messages.Join) -> None:
        state = self._state
        wrong = self._define(turn, caller, message)
        if wrong:
            turn.send(caller, messages.RequestRefused("table", wrong))
            return
        member = self._world.member(caller.node) if self._world is not None else None
        incarnation = str(member.incarnation) if member is not None else ""
        _, old = state.people.join(caller, message.nonce, incarnation)
        if old is not None:
            self._lost(turn, [old])
        turn.keep(PEOPLE)
        self._waiting[caller] = message
        self._asked.add(caller)

    def compare(self, turn: PlacementTurn, saved: tuple[TableSpec, ...]) -> None:
        """A checkpoint with these tables is about to be restored. Refuse waiting trainers that define a table
        differently, so that none of the checkpoint's data is lost to another model. LRs are the scripts'."""
        state = self._state
        # Before a rollback there was a job, whose LRs hold; else no pserver knows the scripts' definitions yet.
        before = state.tables if state.reason else {}
        state.saved_lr = {table.name for table in saved} - before.keys()
        kept = {table.name: _with_lr_of(before.get(table.name, table), table) for table in saved}
        state.tables = {**before, **kept}
        turn.change(TABLES)
        for caller, message in list(self._waiting.items()):
            wrong = differences(saved, message.tables)
            if wrong:
                self._turn_away(turn, caller, wrong, f"\n{ADVICE}")
            else:
                state.tables = {**{table.name: table for table in message.tables}, **state.tables}
                self._take_lrs(turn, message)

    def _turn_away(self, turn: PlacementTurn, caller: Caller, wrong: str, advice: str = "") -> None:
        """Refuse the tables of a waiting trainer."""
        del self._waiting[caller]
        one = self._state.people.at(caller)
        self._lost(turn, self._state.people.lose([one.number] if one is not None else []))
        turn.send(caller, messages.RequestRefused("table", f"{wrong}{advice}"))
        turn.note(f"trainer {caller.node}/{caller.slot} refused: {wrong}")

    def _define(self, turn: PlacementTurn, caller: Caller, message: messages.Join) -> str:
        """Add new table definitions; return why they are refused, such as a difference from existing ones."""
        tables = self._state.tables
        lines = []
        for table in message.tables:
            known = tables.get(table.name)
            difference = table.difference(known) if known is not None else ""
            if difference:
                lines.append(f"table {table.name}: {difference} (here: this script, there: the job)")
        new = [table for table in message.tables if table.name not in tables]
        one = self._state.people.at(caller)
        if new and not lines and self._state.found and (one is None or one.nonce != message.nonce):
            wrong = differences(self._state.found[0].tables, message.tables)  # may a table have been renamed?
            lines += [wrong, ADVICE] if wrong else []
        if len(tables) + len(new) > MOST_TABLES:
            lines.append(f"{len(tables) + len(new)} tables exceed the limit of {MOST_TABLES}")
        lost = unwritten(new, self._state.servers.values())
        lines += [lost] if lost else []
        if lines:
            return "\n".join(lines)
        for table in new:
            tables[table.name] = table
            turn.change(TABLES)
        self._take_lrs(turn, message)
        return ""

    def _take_lrs(self, turn: PlacementTurn, message: messages.Join) -> None:
        """Give tables from a checkpoint the LR of the first trainer that defines them."""
        tables, left = self._state.tables, self._state.saved_lr
        for table in message.tables:
            if table.name not in left:
                continue
            left.discard(table.name)
            turn.keep(TABLES)
            saved, lr = tables[table.name].optimizer.lr, table.optimizer.lr
            if lr != saved:
                tables[table.name] = _with_lr_of(table, tables[table.name])
                turn.change(TABLES)
                turn.note(f"table {table.name}: the LR is the script's, {lr:g}, no longer {saved:g}")

    def _begin(self, turn: PlacementTurn, trainer: TrainerEntry) -> None:
        if self._checkpoints.marking:
            self._beginning[trainer.number] = None
            return
        state = self._state
        if state.people.begin(trainer.number, state.top_step + 1 if state.members() else state.top_step):
            turn.change(PEOPLE)
            self._checkpoints.halt(turn, trainer.number)
        else:
            turn.send(trainer.caller, self.placement_update())

    # --- learning rates ----------------------------------------------------------------------------------------------

    def _set_lr(self, turn: PlacementTurn, trainer: TrainerEntry, hold: messages.LrHold, ask: int) -> None:
        if hold.table and hold.table not in self._state.tables:
            wrong = f"set_lr: there is no table {hold.table}"
        elif not 0 <= hold.factor < float("inf"):
            wrong = f"set_lr: factor {hold.factor} must be 0 or more"
        else:
            wrong = ""
            self._hold(turn, self._state.holds, hold)
        if wrong:
            turn.send(trainer.caller, messages.RequestRefused("word", wrong, ask))
        elif ask:
            turn.send(trainer.caller, messages.LrSet(ask))

    def settings_hold(self, turn: PlacementTurn, settings: Settings) -> None:
        """Apply the LR factor of the world's settings."""
        if settings.factor == self._state.world_factor:
            return
        self._state.world_factor = settings.factor
        self._hold(turn, self._state.world_holds, messages.LrHold(0, settings.factor))

    def _hold(self, turn: PlacementTurn, holds: list[messages.LrHold], new: messages.LrHold) -> None:
        """Apply a factor from its step on, or from the first step that no trainer has reached."""
        top = self._state.top_step
        new = replace(new, step=max(new.step, top + 1))
        holds[:] = [one for one in holds if (one.table, one.step) != (new.table, new.step)]
        holds.append(new)
        holds.sort(key=lambda one: one.step)
        while len(holds) > MOST_HOLDS:
            first = holds[0]
            if not any(one.table == first.table and one.step <= top for one in holds[1:]):
                break
            del holds[0]
        turn.change(LR)

    # --- answers -----------------------------------------------------------------------------------------------------

    def settle(self, turn: PlacementTurn) -> None:
        """Admit waiting trainers as soon as every bucket has an owner."""
        state = self._state
        if self._beginning and not self._checkpoints.marking:
            beginning, self._beginning = self._beginning, {}
            for number in beginning:
                if number in state.people.trainers:
                    self._begin(turn, state.people.trainers[number])
        whole = state.whole and (state.opened or bool(state.found) or not any(state.grid.joining))
        if whole and not state.opened and not state.reason:  # these tables were defined before the pservers were known
            for caller, message in list(self._waiting.items()):
                lost = unwritten(message.tables, state.servers.values())
                if lost:
                    self._turn_away(turn, caller, lost)
        if self._waiting and whole:
            for caller in self._waiting:
                trainer = state.people.at(caller)
                if trainer is not None:
                    self._ready[caller] = trainer
            self._waiting = {}
            if self._ready and not state.opened:
                state.opened = True
                turn.keep(PLACEMENT)

    def placement_update(self) -> messages.PlacementUpdate:
        """The current placement map and membership."""
        return messages.PlacementUpdate(0, self._placement(), self._state.people.epoch, self._state.members())

    def notify(self, turn: PlacementTurn) -> None:
        """End a turn: answer admitted trainers, and send changes of placement and membership to all."""
        state = self._state
        ready, self._ready = self._ready, {}
        placement = self._placement()
        updates = self._updates()
        if updates:
            for one in state.people.trainers.values():
                if one.caller not in ready and one.caller not in self._waiting:
                    turn.effects += [TellWorker(one.caller, body) for body in updates]
        for caller, trainer in ready.items():
            turn.send(caller, self._joined(trainer, placement))
        asked, self._asked = self._asked, set()
        for caller in asked & self._waiting.keys():
            turn.send(caller, messages.Waits(waiting(state) or "the first copies are being created"))

    def _updates(self) -> list[str]:
        """The changes since the last call, encoded once for all trainers."""
        now, sent = self.placement_update(), self._sent
        if sent is None:
            self._sent = now
            return []
        if now.placement is sent.placement and now.epoch == sent.epoch:
            return []
        self._sent, found = now, []
        if _placed(now.placement) != _placed(sent.placement):
            found.append(messages.encode(messages.PlacementChanged(now.token, now.placement)))
        if now.epoch != sent.epoch:
            found.append(messages.encode(counted(now.token, sent.epoch, sent.members, now.epoch, now.members)))
        return found

    def _joined(self, trainer: TrainerEntry, placement: messages.PlacementMap) -> messages.Joined:
        state = self._state
        restored = ""
        if state.found:
            said = json.loads(state.found[0].extra) if state.found[0].extra else {}
            number = state.found[0].number
            now = {"run": state.found[0].run, "checkpoint": number, "cut": number, "history": state.history}
            restored = json.dumps({**said, **now})
        tables = tuple(state.tables.values())
        return messages.Joined(
            trainer.number,
            0,
            placement,
            state.people.epoch,
            state.members(),
            state.training,
            tables,
            state.top_step,
            restored,
            self._secret(),
        )


def _with_lr_of(other: TableSpec, table: TableSpec) -> TableSpec:
    """The definition ``table`` with the LR of another one."""
    return replace(table, optimizer=replace(table.optimizer, lr=other.optimizer.lr))


def _placed(placement: messages.PlacementMap) -> tuple[object, ...]:
    return placement.owner, placement.servers, placement.history
