"""Coordination of checkpoints: all trainers stop at a step boundary, pservers mark their rows, trainers continue, and
the marked rows are written.

Halt -> AtCheckpoint of every member -> one trainer names the data positions -> ``mark`` on all pservers -> GoOn ->
``write`` -> ``complete`` on one pserver -> CheckpointSaved. Any failure abandons the checkpoint; its number is not
reused. Until the mark, buckets do not move.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from edl.master.service import Caller
from edl.wire import json_messages
from ps.coordinator.membership import TrainerEntry
from ps.coordinator.state import CHECKPOINT, PlacementState, PlacementTurn, listed
from ps.protocol import messages

SETTLE, HALT, NAME, MARK, WRITE, COMPLETE = "settle", "halt", "name", "mark", "write", "complete"


@dataclass(frozen=True, slots=True)
class _CheckpointRecord:
    top: int
    run: str
    history: int


class CheckpointCoordinator:
    """The checkpoint in progress and the requests for it."""

    def __init__(self, state: PlacementState) -> None:
        self._state = state
        self.top = 0
        """The highest number that any checkpoint has used."""
        self.run = ""
        """Folder of the newest complete checkpoint of ``history``: the base of the next one."""
        self._history = 0
        self.phase = ""
        self.asks: dict[Caller, int] = {}
        self._later: dict[Caller, int] = {}
        """Requests that came after the mark of the one in progress; they are for the next one."""
        self._wanted = False
        self._at: dict[int, messages.AtCheckpoint] = {}
        self._names: dict[int, str] = {}
        self._namer = 0
        self._named: messages.DataNamed | None = None
        self._reports: dict[int, str] = {}
        """The pservers' reports at the end of the current phase."""
        self._parts: tuple[str, ...] = ()
        """The pservers' reports about what they have written."""
        self._servers: frozenset[int] = frozenset()
        """The pservers that take part, from the mark on, without those that have left after their part."""
        self._due_s = 0.0
        self._next_s = 0.0
        self.last = ""
        """Outcome of the last checkpoint, for display."""

    @property
    def freezes(self) -> bool:
        """True while buckets must not move."""
        return self.phase in (SETTLE, HALT, NAME, MARK)

    @property
    def marking(self) -> bool:
        """True while no trainer may become a member."""
        return self.phase in (NAME, MARK)

    def encode(self) -> bytes:
        """Encode the part of the state that is persisted."""
        return json_messages.encode(_CheckpointRecord(self.top, self.run, self._history))

    def decode(self, text: bytes) -> None:
        """Restore the encoded state. A checkpoint that was in progress is abandoned; its trainers may continue."""
        kept = json_messages.decode(_CheckpointRecord, text)
        self.top, self.run, self._history = kept.top, kept.run, kept.history

    def above(self, turn: PlacementTurn, top: int) -> None:
        """The checkpoint directory has checkpoints up to this number: use higher ones."""
        self.top = max(self.top, top)
        turn.keep(CHECKPOINT)

    def order(self, server: int) -> messages.CheckpointOrder | None:
        """The order for one pserver in the current phase, if any."""
        if server not in self._servers:
            return None
        if self.phase == MARK:
            return messages.CheckpointOrder(self.top, "mark")
        if self.phase == WRITE:
            return messages.CheckpointOrder(self.top, "write", self.run if self._history == self._state.history else "")
        if self.phase == COMPLETE and server == min(self._servers):
            return messages.CheckpointOrder(self.top, "complete", "", self._extra(), self._parts)
        return None

    # --- messages ----------------------------------------------------------------------------------------------------

    def ask(self, turn: PlacementTurn, caller: Caller, ask: int) -> None:
        """A trainer requests a checkpoint."""
        if self.phase in (MARK, WRITE, COMPLETE) and self.asks.get(caller) != ask:
            self._later[caller] = ask
            return
        self.asks[caller] = ask
        self._wanted = not self.phase

    def at_checkpoint(self, turn: PlacementTurn, trainer: TrainerEntry, message: messages.AtCheckpoint) -> None:
        """A trainer has stopped at its step boundary."""
        self._state.reach(message.step)
        if message.checkpoint != self.top or self.phase not in (HALT, NAME, MARK):
            turn.send(trainer.caller, messages.GoOn(message.checkpoint))
            return
        if self.phase == HALT:
            self._at[trainer.number], self._names[trainer.number] = message, trainer.name
        elif trainer.number == self._namer and self._named is None:
            turn.send(trainer.caller, messages.NameData(self.top))

    def forget(self, caller: Caller) -> None:
        """Drop the requests of a worker that is gone."""
        self.asks.pop(caller, None)
        self._later.pop(caller, None)

    def data_named(self, turn: PlacementTurn, trainer: TrainerEntry, message: messages.DataNamed) -> None:
        """The data positions have been named, or could not be: without them a restore would read all data again."""
        if message.checkpoint != self.top or self.phase != NAME:
            return
        if message.failed:
            self.give_up(turn, f"trainer {trainer.name} could not name the data positions: {message.failed}")
        else:
            self._named = message

    def done(self, turn: PlacementTurn, server: int, message: messages.CheckpointPhaseDone) -> None:
        """A pserver has finished a phase, or failed."""
        if message.number != self.top or message.phase != self.phase or server not in self._servers:
            return
        if message.failed:
            self.give_up(turn, f"{self._state.servers[server].label}: {message.failed}", lasting=message.lasting)
        elif self.phase == COMPLETE:
            self._completed(turn, message.report)
        else:
            self._reports[server] = message.report
            if self._state.servers[server].draining:
                turn.change(CHECKPOINT)  # it may go now

    def needs(self, server: int) -> bool:
        """True if the checkpoint in progress cannot be completed without this pserver."""
        if server not in self._servers:
            return False
        if self.phase == WRITE:
            return server not in self._reports
        return self.phase == MARK or server == min(self._servers)

    def server_gone(self, turn: PlacementTurn, number: int, name: str) -> None:
        """A pserver has died, or has left."""
        if self.needs(number):
            self.give_up(turn, f"{name} was lost")
        self._servers -= {number}

    # --- progress ----------------------------------------------------------------------------------------------------

    def settle(self, turn: PlacementTurn) -> None:
        """Advance as far as the known facts allow."""
        state = self._state
        if self.phase and turn.now_s >= self._due_s:
            self.give_up(turn, self._waiting())
        every = state.training.save_every_s
        if not self.phase:
            if every and state.opened and not self._next_s:
                self._next_s = turn.now_s + every
            # Without members no trainer could name the data positions.
            due = bool(self._next_s) and turn.now_s >= self._next_s and bool(state.members())
            if (self._wanted or due) and state.whole and state.opened:
                self._begin(turn)
            elif self._next_s > turn.now_s:
                turn.wake(self._next_s)
        members = {one.number for one in state.members()}
        if self.phase == SETTLE and not state.grid.in_motion():
            self._enter(turn, HALT, turn.now_s + state.limits.halt_s)
            for number in members:
                self.halt(turn, number)
        if self.phase == HALT and members <= self._at.keys() and not state.grid.in_motion():
            self._enter(turn, NAME, self._due_s)
        if self.phase == NAME:
            self._name(turn, members)
        if self.phase == MARK and self._reports.keys() >= self._servers:
            self._go_on(turn)
            self._enter(turn, WRITE, turn.now_s + state.limits.write_s)
        if self.phase == WRITE and self._reports.keys() >= self._servers:
            self._parts = tuple(self._reports.values())
            self._enter(turn, COMPLETE, self._due_s)
        if self.phase:
            turn.wake(self._due_s)

    def _begin(self, turn: PlacementTurn) -> None:
        state = self._state
        self.top += 1
        self._wanted = False
        self._next_s = turn.now_s + state.training.save_every_s if state.training.save_every_s else 0.0
        self._at, self._names, self._named, self._namer = {}, {}, None, 0
        self._enter(turn, SETTLE, turn.now_s + state.limits.halt_s)

    def halt(self, turn: PlacementTurn, number: int) -> None:
        """Send Halt to a member, including one that has just joined."""
        if self.phase == HALT:
            turn.send(self._state.people.trainers[number].caller, messages.Halt(self.top))

    def _enter(self, turn: PlacementTurn, phase: str, due_s: float) -> None:
        self.phase, self._due_s, self._reports = phase, due_s, {}
        turn.change(CHECKPOINT)

    def _name(self, turn: PlacementTurn, members: set[int]) -> None:
        if members and self._named is None:
            if self._namer not in members:
                self._namer = min(members)
                turn.send(self._state.people.trainers[self._namer].caller, messages.NameData(self.top))
            return
        if self._named is None and self._state.top_step:
            self.give_up(turn, "there is no trainer that could name the data positions")
            return
        holders, servers = self._state.grid.holders(), self._state.servers
        # Those that leave and hold nothing have been allowed to exit.
        self._servers = frozenset(one for one in servers if one in holders or not servers[one].draining)
        self._enter(turn, MARK, turn.now_s + self._state.limits.mark_s)

    def _go_on(self, turn: PlacementTurn) -> None:
        # Also to trainers that are no members any more: they may have stopped since. Others ignore it.
        for trainer in self._state.people.trainers.values():
            turn.send(trainer.caller, messages.GoOn(self.top))

    def give_up(self, turn: PlacementTurn, why: str, *, lasting: bool = False) -> None:
        """Abandon the checkpoint and release the trainers. ``lasting``: a retry would fail in the same way."""
        if not self.phase:
            return
        if self.freezes:
            self._go_on(turn)
        self.phase, self._reports, self._servers = "", {}, frozenset()
        turn.change(CHECKPOINT)
        self.last = f"checkpoint {self.top} was abandoned: {why}"
        turn.note(self.last)
        for caller, ask in self.asks.items():
            advice = "Training continues" if lasting else "Training continues; request it again"
            turn.send(caller, messages.RequestRefused("save", f"{self.last}. {advice}", ask))
        self._over()

    def _over(self) -> None:
        self.asks, self._later = self._later, {}
        self._wanted = bool(self.asks)

    def _completed(self, turn: PlacementTurn, report: str) -> None:
        """The manifest has been written."""
        try:
            run = str(json.loads(report)["run"])
        except (ValueError, KeyError, TypeError):
            self.give_up(turn, f"a pserver's report lacks the checkpoint's folder: {report[:80]!r}")
            return
        self.run, self._history = run, self._state.history
        self.phase, self._servers = "", frozenset()
        turn.change(CHECKPOINT)
        self.last = f"checkpoint {self.top} is complete: {run}"
        turn.note(self.last)
        for caller, ask in self.asks.items():
            turn.send(caller, messages.CheckpointSaved(ask, self.top, run))
        self._over()

    def _extra(self) -> str:
        values = {self._names[number]: message.value for number, message in self._at.items() if message.value}
        step = max((message.step for message in self._at.values()), default=self._state.top_step)
        ledgers = dict(self._named.ledgers) if self._named is not None else {}
        members = [self._names[number] for number in self._at]
        return json.dumps({"step": step, "members": members, "values": values, "ledgers": ledgers})

    def _waiting(self) -> str:
        """What the checkpoint is waiting for, for messages."""
        state = self._state
        if self.phase == SETTLE:
            return f"{state.grid.in_motion()} buckets were still moving"
        if self.phase == HALT:
            late = [one.name for one in state.members() if one.number not in self._at]
            what = "reached no step boundary in time" if late else f"{state.grid.in_motion()} buckets are moving"
            return f"{listed(late)} {what}".strip()
        if self.phase == NAME:
            return "the data positions were not named in time"
        late = [
            one.label
            for one in state.servers.values()
            if one.number in self._servers and one.number not in self._reports
        ]
        return f"{listed(late)} did not finish phase {self.phase} in time"
