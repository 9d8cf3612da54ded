"""A trainer's session with the Master: joining, placement maps, membership, checkpoint stops, save requests.

Messages may be lost when the Master changes. The session is notified of that (``None``) and sends everything that
matters again. Received state is kept here for the trainer's threads to read or wait for.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from edl.adapters.clock import SystemClock
from edl.errors import PsError
from ps.client.member_count import MemberCount
from ps.client.routing import RoutingTable
from ps.errors import RolledBack
from ps.protocol import messages
from ps.protocol.deltas import members_after
from ps.spec import TableSpec
from ps.wait import BoundedWait

SERVICE = "ps"
AGAIN_S = 5.0
"""An unanswered request is repeated after this many seconds."""
REQUEST_PAUSE_S = 1.0
"""Least seconds between two requests for a newer placement map."""
LOOK_S = 0.25
"""Waiting threads check their condition at least this often, in seconds."""
_now_s = SystemClock().now_s

Listener = Callable[[], None]


class Line(Protocol):
    """The interface used here of ``edl.worker.link.Link``."""

    def call(self, service: str, body: str, number: int) -> None:
        """Send a message as a worker of the given round."""
        ...

    def listen(self, service: str, heard: Callable[[str | None], None]) -> None:
        """Set the receiver of the service's messages. It gets None when messages may have been lost."""
        ...


class MasterSession(Protocol):
    """The part of a trainer's session with the Master that the rest of the client uses."""

    @property
    def number(self) -> int:
        """The number by which pservers know this trainer."""
        ...

    @property
    def route(self) -> RoutingTable:
        """The newest placement map."""
        ...

    @property
    def joined(self) -> messages.Joined:
        """The answer to ``Join``, updated with the newest epoch and members."""
        ...

    @property
    def halted(self) -> int:
        """Number of the checkpoint to stop for; 0 if there is none."""
        ...

    @property
    def begun(self) -> bool:
        """True if this trainer takes part as a member."""
        ...

    @property
    def without_master(self) -> bool:
        """True if there is no Master that could send a newer placement map."""
        ...

    def check(self) -> None:
        """Raises ``RolledBack`` if this process must restart."""
        ...

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener``, from any thread, after every change; returns a function that removes it."""
        ...

    def update_placement(self, message: messages.PlacementUpdate) -> None:
        """Take over a placement map that a pserver has sent."""
        ...

    def newer(self, version: int) -> None:
        """Request a placement map newer than this version."""
        ...

    def suspect(self, server: int, why: str) -> None:
        """Report a pserver that cannot be reached."""
        ...

    def watch_members(self) -> MemberCount:
        """Count members from now on, until the next call."""
        ...


class LiveMasterSession:
    """``MasterSession`` of a trainer in a job. Thread-safe."""

    without_master = False

    def __init__(self, line: Line, round_: Callable[[], int], tables: Sequence[TableSpec]) -> None:
        self._line, self._round = line, round_
        self._nonce = secrets.token_hex(16)
        self._tables = tuple(tables)
        self._changed = threading.Condition(threading.RLock())
        self._listeners: list[Listener] = []
        self._joined: messages.Joined | None = None
        self._seen = MemberCount()
        self._route: RoutingTable | None = None
        self._token = 0
        self._begun = False
        self._missed = False
        """A membership delta was based on an epoch that was never received."""
        self._over = ""
        self._refused: messages.RequestRefused | None = None
        self._waits = "the Master has not answered"
        """What the Master is waiting for before it answers ``Join``, if known."""
        self._checkpoint = 0
        self._at: messages.AtCheckpoint | None = None
        self._to_name = 0
        self._named: messages.DataNamed | None = None
        self._asks = secrets.randbits(40)
        self._saving: messages.Save | None = None
        self._saved: messages.CheckpointSaved | messages.RequestRefused | None = None
        self._lrs: dict[int, messages.SetLr] = {}
        """Changes of the LR that the Master has not answered yet, in their order."""
        self._asked_s = float("-inf")
        line.listen(SERVICE, self._heard)

    # --- received state ----------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """This trainer's number, as ``MasterSession`` requires."""
        return self.joined.number

    @property
    def joined(self) -> messages.Joined:
        """The answer to ``Join``, updated with the newest epoch and members."""
        with self._changed:
            if self._joined is None:
                raise PsError("this trainer has not joined yet")
            return self._joined

    @property
    def route(self) -> RoutingTable:
        """The newest placement map, as ``MasterSession`` requires."""
        with self._changed:
            if self._route is None:
                raise PsError("this trainer has not joined yet")
            return self._route

    @property
    def halted(self) -> int:
        """Number of the checkpoint to stop for; 0 if there is none."""
        with self._changed:
            return self._checkpoint

    @property
    def begun(self) -> bool:
        """True from ``begin`` until ``leave``. A trainer that others took for dead still counts: it must restart, which
        ``check`` says."""
        with self._changed:
            return self._begun

    @property
    def to_name(self) -> int:
        """Number of the checkpoint for which this trainer must name the data positions; 0 if there is none."""
        with self._changed:
            return self._to_name

    def check(self) -> None:
        """Raises ``RolledBack`` if this process must restart."""
        with self._changed:
            if self._over:
                raise RolledBack(self._over)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener``, from any thread, after every change; returns a function that removes it."""
        with self._changed:
            self._listeners.append(listener)

        def end() -> None:
            with self._changed:
                self._listeners.remove(listener)

        return end

    def watch_members(self) -> MemberCount:
        """Count members from now on, as ``MasterSession`` requires."""
        with self._changed:
            joined = self.joined
            self._seen = MemberCount(joined.number, joined.members)
            return self._seen

    # --- messages ----------------------------------------------------------------------------------------------------

    def join(self, *more: TableSpec) -> messages.Joined:
        """Join the job, or add tables to it. Blocks until every bucket has an owner. Raises ``PsError`` if a table is
        refused, and ``RolledBack``."""
        with self._changed:
            before, self._tables = self._tables, (*self._tables, *more)
            self._refused = None
            names = {one.name for one in self._tables}
        self._say(messages.Join(self._nonce, self._tables))

        def answered() -> bool:
            if self._refused is not None:
                self._tables = before
                raise PsError(f"the Master refused this trainer's tables: {self._refused.text}")
            known = {one.name for one in self._joined.tables} if self._joined is not None else set()
            return self._joined is not None and names <= known

        wait = BoundedWait("admission to the parameter servers", deadline_s=None)
        again = lambda: self._say(messages.Join(self._nonce, self._tables))  # noqa: E731
        self._wait(answered, again, wait, lambda: self._waits)
        return self.joined

    def begin(self, deadline_s: float) -> messages.TrainerMember:
        """Become a member; return the membership, with the first step, once the Master has confirmed it. This can take
        as long as a checkpoint. Raises ``PsError`` at the deadline, in seconds."""
        message = messages.Begin(self.number)
        with self._changed:
            self._begun = True
        self._say(message)
        wait = BoundedWait("the Master to confirm this trainer's membership", deadline_s=deadline_s)
        self._wait(lambda: self._member() is not None, lambda: self._say(message), wait)
        member = self._member()
        return member or messages.TrainerMember(self.number, "", self.joined.step)

    def leave(self, deadline_s: float) -> None:
        """Stop being a member and wait for the Master's confirmation. Raises ``PsError`` at the deadline, in
        seconds."""
        message = messages.LeaveMembership(self.number)
        with self._changed:
            self._begun = False
        self._say(message)
        wait = BoundedWait("the Master to confirm the end of this trainer's membership", deadline_s=deadline_s)
        self._wait(lambda: self._member() is None, lambda: self._say(message), wait)

    def _member(self) -> messages.TrainerMember | None:
        return next((one for one in self.joined.members if one.number == self.number), None)

    def set_lr(self, hold: messages.LrHold) -> None:
        """Ask the Master to change a learning rate; see ``messages.SetLr``. The next Master is asked again if need
        be."""
        with self._changed:
            self._asks += 1
            message = self._lrs[self._asks] = messages.SetLr(self.number, hold, self._asks)
        self._say(message)

    def newer(self, version: int) -> None:
        """Request a placement map newer than this version."""
        with self._changed:
            now_s = _now_s()
            if now_s - self._asked_s < REQUEST_PAUSE_S:
                return
            self._asked_s = now_s
        self._say(messages.GetPlacement(version))

    def suspect(self, server: int, why: str) -> None:
        """Report a pserver that cannot be reached."""
        self._say(messages.Suspect(server, why[:300]))

    def ask_save(self) -> None:
        """Request a checkpoint; ``saved`` returns the result."""
        with self._changed:
            self._asks += 1
            self._saved = None
            self._saving = messages.Save(self._asks)
        self._say(self._saving)

    def saved(self) -> messages.CheckpointSaved | None:
        """The result of the requested checkpoint; None while it is pending. Raises ``PsError`` if it was refused."""
        with self._changed:
            found = self._saved
            if found is None:
                return None
            self._saving = self._saved = None
        if isinstance(found, messages.RequestRefused):
            raise PsError(f"no checkpoint was written: {found.text}")
        return found

    def stand(self, checkpoint: int, step: int, value: str) -> None:
        """Report that this trainer has stopped at a step boundary for the checkpoint."""
        message = messages.AtCheckpoint(checkpoint, step, value)
        with self._changed:
            self._at, self._named = message, None
        self._say(message)

    def name(self, checkpoint: int, ledgers: Sequence[tuple[str, str]], failed: str = "") -> None:
        """Report the named data positions, or why they could not be named."""
        message = messages.DataNamed(checkpoint, tuple(ledgers), failed)
        with self._changed:
            self._to_name, self._named = 0, message
        self._say(message)

    def go_on(self, checkpoint: int) -> None:
        """Continue after a checkpoint stop, whether the Master has released this trainer or not."""
        with self._changed:
            self._at = self._named = None
            self._to_name = 0
            if self._checkpoint == checkpoint:
                self._checkpoint = 0

    def wait(self, seconds: float = LOOK_S) -> None:
        """Wait up to ``seconds`` for the next message."""
        with self._changed:
            self._changed.wait(seconds)

    def _wait(
        self,
        ask: Callable[[], bool],
        again: Callable[[], None],
        wait: BoundedWait,
        why: Callable[[], str] = lambda: "the Master has not answered",
    ) -> None:
        said_s = _now_s()
        while True:
            with self._changed:
                if self._over:
                    raise RolledBack(self._over)
                if ask():
                    break
                self._changed.wait(LOOK_S)
            wait.look(why)
            if _now_s() - said_s > AGAIN_S:
                said_s = _now_s()
                again()
        wait.over()

    def _say(self, message: Any) -> None:
        self._line.call(SERVICE, messages.encode(message), self._round())

    # --- on the link's receiving thread ------------------------------------------------------------------------------

    def _heard(self, text: str | None) -> None:
        if text is None:
            self._say_again()
            return
        message = messages.decode(text)
        with self._changed:
            self._take(message)
            self._changed.notify_all()
            listeners = list(self._listeners)
            missed, self._missed = self._missed, False
        if missed:
            self._say(messages.GetPlacement(-1))
        for listener in listeners:
            listener()

    def _say_again(self) -> None:
        with self._changed:
            again: list[Any] = [messages.Join(self._nonce, self._tables)]
            if self._joined is not None and self._begun:
                again.append(messages.Begin(self._joined.number))
            again += self._lrs.values()
            again += [message for message in (self._saving, self._at, self._named) if message is not None]
        for message in again:
            self._say(message)

    def update_placement(self, message: messages.PlacementUpdate) -> None:
        """Take over a placement map that a pserver has sent."""
        with self._changed:
            self._use_placement(message)
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def _take(self, message: Any) -> None:
        match message:
            case messages.Joined():
                self._join(message)
            case messages.PlacementUpdate() | messages.PlacementChanged() | messages.MembersChanged():
                self._apply_update(message)
            case messages.Waits(text):
                self._waits = text
            case messages.Halt(checkpoint):
                self._checkpoint = checkpoint
            case messages.NameData(checkpoint):
                self._to_name = checkpoint
            case messages.GoOn(checkpoint):
                if checkpoint >= self._checkpoint:
                    self._checkpoint = 0
            case messages.CheckpointSaved(ask):
                if self._saving is not None and self._saving.ask == ask:
                    self._saved = message
            case messages.LrSet(ask):
                self._lrs.pop(ask, None)
            case messages.RequestRefused():
                self._take_refusal(message)

    def _take_refusal(self, message: messages.RequestRefused) -> None:
        if message.kind == "stale":
            self._over = self._over or f"{message.text}. This process must restart; its launcher does that"
        elif message.ask and self._lrs.pop(message.ask, None) is None:
            if self._saving is not None and self._saving.ask == message.ask:
                self._saved = message
        elif message.kind == "table":
            self._refused = message
        else:
            sys.stderr.write(f"edl: the Master refused a message of this trainer ({message.kind}): {message.text}\n")

    def _join(self, message: messages.Joined) -> None:
        old = self._joined
        if old is None:
            self._joined, self._route, self._token = message, RoutingTable(message.placement), message.token
        elif message.number != old.number:
            self._over = self._over or (
                f"the Master considers trainer {old.number} lost. This process must restart; its launcher does that"
            )
        elif message.placement.history > old.placement.history:
            self._roll_back(message.placement.history, message.restored)
        else:
            self._joined = replace(old, tables=message.tables)
            self._use_placement(
                messages.PlacementUpdate(message.token, message.placement, message.epoch, message.members)
            )

    def _use_placement(self, message: messages.PlacementUpdate) -> None:
        if self._joined is None or message.token < self._token:
            return
        if message.placement.history > self._joined.placement.history:
            self._roll_back(message.placement.history)
            return
        self._token = message.token
        joined = self._joined
        if message.epoch >= joined.epoch:
            joined = replace(joined, epoch=message.epoch, members=message.members)
            self._seen.take(joined.members)
        if message.placement.version > joined.placement.version:
            joined = replace(joined, placement=message.placement)
            self._route = RoutingTable(message.placement)
        self._joined = joined

    def _apply_update(
        self, message: messages.PlacementUpdate | messages.PlacementChanged | messages.MembersChanged
    ) -> None:
        if isinstance(message, messages.PlacementChanged):
            message = messages.PlacementUpdate(message.token, message.placement, -1, ())
        if isinstance(message, messages.PlacementUpdate):
            self._use_placement(message)
            return
        joined = self._joined
        if joined is None or message.token < self._token or message.epoch <= joined.epoch:
            return
        if message.since == joined.epoch:
            members = members_after(joined.members, message.came, message.went)
            self._joined = replace(joined, epoch=message.epoch, members=members)
            self._seen.take(members)
        else:
            self._missed = True

    def _roll_back(self, history: int, restored: str = "") -> None:
        run = json.loads(restored).get("run", "") if restored else ""
        what = f"the checkpoint {run}" if run else "the last complete checkpoint"
        self._over = self._over or (
            f"buckets were lost with their pservers; all parameters were rolled back to {what} (history {history}). "
            "This process must restart from there; its launcher does that"
        )


class FixedMasterSession:
    """``MasterSession`` without a Master: nothing changes unless a pserver sends a newer placement map."""

    without_master = True
    begun = True
    """The members are those that the caller has given to the pservers."""
    halted = 0

    def __init__(self, joined: messages.Joined) -> None:
        self.joined = joined
        self.number = joined.number
        self.route = RoutingTable(joined.placement)

    def check(self) -> None:
        """Does nothing: there are no rollbacks without a Master."""

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Does nothing: ``listener`` is never called."""
        return lambda: None

    def update_placement(self, message: messages.PlacementUpdate) -> None:
        """Take over a placement map that a pserver has sent."""
        if message.placement.version > self.route.version:
            self.route = RoutingTable(message.placement)

    def newer(self, version: int) -> None:
        """Does nothing: no newer placement map can be requested."""

    def suspect(self, server: int, why: str) -> None:
        """Does nothing: there is no Master to report to."""

    def watch_members(self) -> MemberCount:
        """The members, which never change."""
        return MemberCount(self.number, self.joined.members)
