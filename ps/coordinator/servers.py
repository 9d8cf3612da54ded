"""The pservers' part of the placement machine: registration, messages, failures, initial placement and moves."""

from __future__ import annotations

import json
from typing import Any, Protocol

from edl.errors import ProtocolError
from ps.coordinator.checkpoints import CheckpointCoordinator
from ps.coordinator.placement import Planner
from ps.coordinator.state import (
    LR,
    PEOPLE,
    PLACEMENT,
    SERVERS,
    TABLES,
    PlacementState,
    PlacementTurn,
    Pserver,
    label_of,
    listed,
    unwritten,
)
from ps.protocol import messages
from ps.protocol.messages import NO_PSERVER, RESTORE
from ps.spec import TableSpec

MOST_HEAT = 4096
ORPHANS_S = 2.0
"""Seconds that a new Master waits for the keys of pservers that the previous one knew. A store that was frozen ends the
leases of processes that live, so any Master waits ``returns_s`` for a pserver that holds what no other one has."""

LEASE_ENDED = "its lease has ended"

ELSEWHERE = {PEOPLE, TABLES, LR}
"""Changes that do not affect placement."""


class People(Protocol):
    """The trainers' part, as used here."""

    def rolled_back(self, turn: PlacementTurn) -> None:
        """The parameters are rolled back to a new history; all trainers must restart."""
        ...

    def compare(self, turn: PlacementTurn, saved: tuple[TableSpec, ...]) -> None:
        """A checkpoint with these tables is about to be restored; refuse trainers that define them differently."""
        ...


class PserverRegistry:
    """Tracks the pservers in the placement state."""

    def __init__(
        self, state: PlacementState, checkpoints: CheckpointCoordinator, people: People, secret: str = ""
    ) -> None:
        self._state, self._checkpoints, self._people = state, checkpoints, people
        self.keys: dict[str, dict[str, Any]] = {}
        """Values of the pservers' keys, by name."""
        self.failed = ""
        """Reason why the job cannot continue."""
        self.secret = secret
        self._enough_s = 0.0
        """Deadline of the first placement, once there are enough pservers."""
        self._without_s = 0.0
        """Time since which there have been too few pservers; 0: there are enough."""
        self._orphans_s = 0.0
        self._returning: dict[int, float] = {}
        """Pservers whose keys have gone but may come back, with the time until which they are waited for."""
        self._heat: dict[int, float] = {}
        self._heat_s = 0.0
        self.greeted: set[int] = set()
        """Pservers that need complete orders although nothing has changed."""
        self._silent: dict[int, float] = {}
        """Time since which each of these pservers has been unreachable."""
        self._below = False
        self._unplanned = True
        """No planning pass has run yet."""
        self._stuck = ""
        self._unread_s = 0.0
        """Time since which the checkpoints cannot be read; 0: they can, as far as known."""
        self._find_s = 0.0
        """Time of the next search for checkpoints after a failed one; 0: one is under way."""

    def taken_over(self, turn: PlacementTurn) -> None:
        """A new Master has taken over: look for pservers whose keys have disappeared meanwhile."""
        if self._state.servers:
            self._orphans_s = turn.now_s + ORPHANS_S

    # --- keys and lines ----------------------------------------------------------------------------------------------

    def key_put(self, turn: PlacementTurn, name: str, value: bytes) -> None:
        """A pserver has registered, or announces that it leaves."""
        try:
            found = json.loads(value)
            described = (str(found["host"]), int(found["port"]), found.get("path", ""), found.get("machine", ""))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            turn.note(f"parameter servers: the value of key {name} does not describe a pserver ({error!r})")
            return
        self.keys[name] = found
        self.secret = str(found.get("secret", "")) or self.secret
        server = self._state.named(name)
        if server is None:
            return
        self._returning.pop(server.number, None)
        saves = bool(found.get("saves", True))
        if saves != server.saves:  # another one may look for checkpoints now
            server.saves = saves
            turn.change(SERVERS)
        draining = bool(found.get("draining"))
        if described != (server.host, server.port, server.path, server.machine):
            server.host, server.port, server.path, server.machine = described
            turn.change(SERVERS)
        if draining != server.draining:
            server.draining = draining
            turn.note(f"pserver {server.label} {'leaves' if draining else 'stays'}")
            turn.change(SERVERS)

    def key_gone(self, turn: PlacementTurn, name: str) -> None:
        """A pserver's lease has ended: it has died or left, or the store was away for longer than a lease. In the last
        case its launcher registers it again, so a live one without which rows are lost is waited for."""
        self.keys.pop(name, None)
        server = self._state.named(name)
        if server is None:
            return
        if server.greeted or turn.now_s < self._orphans_s:
            self._miss(turn, server, LEASE_ENDED)
        else:
            self.bury(turn, server, LEASE_ENDED)

    def line_down(self, turn: PlacementTurn, name: str, refused: bool) -> None:
        """The connection to a pserver is down. ``refused``: its port refuses connections, so the process is gone."""
        server = self._state.named(name)
        if server is not None:
            server.greeted = False
            self._silent.setdefault(server.number, turn.now_s)
            if refused:
                self.bury(turn, server, "its port refuses connections")

    # --- messages ----------------------------------------------------------------------------------------------------

    def heard(self, turn: PlacementTurn, name: str, body: str) -> None:
        """Process a message from a pserver."""
        try:
            message = messages.decode(body)
        except ProtocolError as error:
            turn.note(f"pserver {label_of(name)}: {error}")
            return
        server = self._state.named(name)
        if isinstance(message, messages.PserverHello):
            self._hello(turn, name, server, message)
        elif server is not None and server.greeted:
            self._on_message(turn, server, message)

    def _hello(self, turn: PlacementTurn, name: str, server: Pserver | None, message: messages.PserverHello) -> None:
        if name not in self.keys:
            return
        if server is not None:
            other = message.number != server.number and (message.number != NO_PSERVER or server.confirmed)
            if other or (server.confirmed and not message.version):
                self.bury(turn, server, "another process has registered with its name")
                server = None
        if server is None:
            value = self.keys[name]
            server = Pserver(self._state.new_number(), name, str(value["host"]), int(value["port"]))
            server.path, server.machine = str(value.get("path", "")), str(value.get("machine", ""))
            server.draining, server.saves = bool(value.get("draining")), bool(value.get("saves", True))
            lost = unwritten(self._state.tables.values(), [server]) if self._state.opened else ""
            if lost:
                turn.note(lost)
            self._state.servers[server.number] = server
            turn.change(SERVERS)
        server.most_bytes = message.most_bytes
        server.greeted = True
        self._silent.pop(server.number, None)
        self.greeted.add(server.number)

    def _on_message(self, turn: PlacementTurn, server: Pserver, message: Any) -> None:
        state, number = self._state, server.number
        match message:
            case messages.Followed(version):
                server.followed = max(server.followed, version)
                if not server.confirmed:
                    server.confirmed = True
                    turn.keep(SERVERS)
            case messages.GetOrders():
                self.greeted.add(number)
            case messages.Synced(version, follower, buckets):
                able = follower in state.servers and not state.servers[follower].draining
                state.grid.synced(number, follower, version, messages.of_ranges(buckets, state.grid.buckets), able)
            case messages.Unsynced(version, follower, buckets):
                copies = state.copies and follower in state.servers
                state.grid.unsynced(number, follower, version, messages.of_ranges(buckets, state.grid.buckets), copies)
            case messages.Took(version, buckets):
                state.grid.took(number, version, messages.of_ranges(buckets, state.grid.buckets), state.copies)
            case messages.CheckpointPhaseDone(_, phase, failed) if phase == "restore":
                self._not_restored(turn, server, message, failed)
            case messages.CheckpointPhaseDone(_, phase, failed) if phase == "find":
                self._not_found(turn, server, failed)
            case messages.CheckpointPhaseDone():
                self._checkpoints.done(turn, number, message)
            case messages.FoundCheckpoints() if number == self.finder:
                self._found(turn, message)
            case messages.PserverLoad():
                self._load(server, message)

    def _load(self, server: Pserver, message: messages.PserverLoad) -> None:
        server.load = message
        if message.history in (0, self._state.history):  # otherwise it was sent before a rollback
            self._state.reach(message.top_step)
        for bucket, keys in message.hot:
            if 0 <= bucket < self._state.grid.buckets and len(self._heat) < MOST_HEAT:
                self._heat[bucket] = self._heat.get(bucket, 0.0) + keys

    # --- deaths ------------------------------------------------------------------------------------------------------

    def bury(self, turn: PlacementTurn, server: Pserver, why: str) -> None:
        """Remove a dead pserver; its replicas become owners in the same step."""
        state = self._state
        del state.servers[server.number]
        turn.change(SERVERS)
        held = server.number in state.grid.holders()
        lost = state.grid.bury(server.number)
        if held or not server.draining:
            turn.note(f"pserver {server.label} (number {server.number}) is lost: {why}")
        if lost and state.opened:
            count = f"{len(lost)} of {state.grid.buckets} buckets"
            self._roll_back(turn, f"pserver {server.label} was the only holder of {count}")
        elif lost:
            giver = RESTORE if state.found else NO_PSERVER
            sites = state.sites()
            if any(site.active for site in sites):
                Planner(state.grid, sites, state.copies, 0).place(lost, giver)
            else:
                self._start_over()
            turn.change(PLACEMENT)
        self._checkpoints.server_gone(turn, server.number, server.label)

    def _bury_silent(self, turn: PlacementTurn) -> None:
        """Remove unreachable pservers if others hold all their data. Otherwise wait: the key tells whether the process
        lives, and its launcher supervises it. A pserver that comes back starts empty."""
        state = self._state
        for number, since_s in list(self._silent.items()):
            server = state.servers.get(number)
            if server is None or server.greeted:
                del self._silent[number]
            elif turn.now_s < since_s + state.limits.silent_s:
                turn.wake(since_s + state.limits.silent_s)
            elif state.grid.spares(number, {one.number for one in state.servers.values() if one.greeted}):
                del self._silent[number]
                self.bury(turn, server, "it does not respond, and other pservers hold all its data")

    def _miss(self, turn: PlacementTurn, server: Pserver, why: str) -> None:
        """Wait for the key of a pserver that may live, if rows are lost without it; otherwise remove it."""
        state = self._state
        if state.opened and state.grid.lost_with(server.number):
            self._returning[server.number] = turn.now_s + state.limits.returns_s
        else:
            self.bury(turn, server, why)

    def _bury_missing(self, turn: PlacementTurn) -> None:
        """Remove pservers whose keys have not come back."""
        for number, until_s in list(self._returning.items()):
            server = self._state.servers.get(number)
            if server is not None and turn.now_s < until_s:
                turn.wake(until_s)
                continue
            del self._returning[number]
            if server is not None:
                self.bury(turn, server, LEASE_ENDED)

    def _start_over(self) -> None:
        """No bucket has an owner. The next placement begins a new history: a pserver that has looked for checkpoints
        once does so again only in another one."""
        state = self._state
        state.stage = "new"
        state.history += 1
        state.grid.clear()
        state.found = ()
        state.unread, self._unread_s = "", 0.0
        self._enough_s = 0.0

    def _roll_back(self, turn: PlacementTurn, why: str) -> None:
        """Rows are lost: roll back to the last complete checkpoint; all trainers must restart."""
        state = self._state
        turn.note(f"{why}: rolling all parameters back to the last complete checkpoint")
        self._checkpoints.give_up(turn, why)
        self._start_over()
        state.reason, state.opened = why, False
        turn.change(PLACEMENT)
        self._people.rolled_back(turn)

    # --- start and restore -------------------------------------------------------------------------------------------

    @property
    def finder(self) -> int:
        """Number of the pserver that looks for a checkpoint."""
        servers = self._state.servers
        if self._state.stage != "finding":
            return NO_PSERVER
        readers = (number for number, one in servers.items() if one.saves)  # others would find none
        return min(readers, default=min(servers, default=NO_PSERVER))

    def order(self, number: int) -> messages.CheckpointOrder | None:
        """The order for one pserver about the checkpoint to start from, if any."""
        state = self._state
        if number == self.finder:
            return messages.CheckpointOrder(0, "find")
        if state.stage == "placed" and state.found and RESTORE in state.grid.giver:
            return messages.CheckpointOrder(state.found[0].number, "restore", state.found[0].run)
        return None

    def _found(self, turn: PlacementTurn, message: messages.FoundCheckpoints) -> None:
        state = self._state
        state.unread, self._unread_s = "", 0.0
        self._checkpoints.above(turn, message.top)
        if not message.checkpoints and message.refused:
            lines = "\n".join(message.refused)
            because = f"{state.reason}, and no checkpoint" if state.reason else "none of the checkpoints found"
            self.failed = f"{because} can be used:\n{lines}\nRepair or remove them, or use another --rdzv-id"
        elif not message.checkpoints and state.reason:
            advice = "Restart the job; use --checkpoint-dir with --ps-save-every to keep most of the training next time"
            self.failed = f"{state.reason}, and there is no complete checkpoint. {advice}"
        else:
            state.found = message.checkpoints
            self._place(turn)

    def _not_found(self, turn: PlacementTurn, server: Pserver, failed: str) -> None:
        state = self._state
        if not failed or server.number != self.finder:
            return
        text = f"pserver {server.label} cannot read the checkpoints: {failed}"
        if text != state.unread:
            turn.note(text)
        state.unread = text
        self._unread_s = self._unread_s or turn.now_s
        self._find_s = turn.now_s + state.limits.find_s

    def _find_again(self, turn: PlacementTurn) -> None:
        """Repeat a failed search after a pause, and end the job when it has failed for too long."""
        state, limits = self._state, self._state.limits
        if not self._unread_s:
            return
        if turn.now_s >= self._unread_s + limits.recover_s:
            self.failed = f"{state.reason}, and {state.unread}" if state.reason else state.unread
            return
        turn.wake(self._unread_s + limits.recover_s)
        if self._find_s and turn.now_s >= self._find_s:
            self._find_s = 0.0
            self.greeted.add(self.finder)
        elif self._find_s:
            turn.wake(self._find_s)

    def _place(self, turn: PlacementTurn) -> None:
        state = self._state
        if not any(site.active for site in state.sites()):
            self._start_over()
            return
        if state.found:
            self._people.compare(turn, state.found[0].tables)
            state.top_step = state.found[0].step
            turn.change(TABLES)
            turn.note(f"restoring the parameters from {state.found[0].run}")
        Planner(state.grid, state.sites(), state.copies, 0).place_all(RESTORE if state.found else NO_PSERVER)
        state.stage = "placed"
        turn.change(PLACEMENT)

    def _not_restored(
        self, turn: PlacementTurn, server: Pserver, message: messages.CheckpointPhaseDone, failed: str
    ) -> None:
        state = self._state
        checkpoint = self.order(server.number)
        if not failed or checkpoint is None or checkpoint.phase != "restore" or checkpoint.number != message.number:
            return
        turn.note(f"checkpoint {checkpoint.run} cannot be restored by {server.label}: {failed}")
        if message.lasting:
            self.failed = f"checkpoint {checkpoint.run} cannot be restored by pserver {server.label}: {failed}"
            return
        state.found = state.found[1:]
        state.history += 1
        if state.found:
            self._place(turn)
        else:
            self.failed = (
                f"no checkpoint could be restored; the last attempt was {checkpoint.run} on {server.label}: {failed}"
            )

    # --- consequences ------------------------------------------------------------------------------------------------

    def settle(self, turn: PlacementTurn) -> None:
        """Advance as far as the known facts allow."""
        state = self._state
        if self._orphans_s and turn.now_s >= self._orphans_s:
            self._orphans_s = 0.0
            missing = [one for one in state.servers.values() if one.name not in self.keys]
            for server in [one for one in missing if one.number not in self._returning]:
                self._miss(turn, server, "it died while there was no Master")
        elif self._orphans_s:
            turn.wake(self._orphans_s)
        self._bury_missing(turn)
        self._bury_silent(turn)
        if state.stage == "finding" and not state.servers:
            self._start_over()
        if state.stage == "new":
            self._first(turn)
        elif state.stage == "finding":
            self._find_again(turn)
        elif state.stage == "placed":
            self._watch_few(turn)
            if state.whole and not self._checkpoints.freezes:
                self._plan(turn)
        if not self.failed and self._without_s and turn.now_s >= self._without_s + state.limits.recover_s:
            self.failed = self._too_few()

    def _first(self, turn: PlacementTurn) -> None:
        """Wait for enough pservers, then look for a checkpoint."""
        state = self._state
        able = [one for one in state.servers.values() if one.greeted and not one.draining]
        least, most = state.training.servers
        if not able or (len(able) < least and not state.reason):
            self._enough_s = 0.0
            if not self._without_s:
                self._without_s = turn.now_s
            turn.wake(self._without_s + state.limits.recover_s)
            return
        self._without_s = 0.0
        self._enough_s = self._enough_s or turn.now_s + state.limits.grace_s
        if len(able) < most and turn.now_s < self._enough_s:
            turn.wake(self._enough_s)
            return
        state.stage = "finding"
        turn.change(PLACEMENT)

    def _too_few(self) -> str:
        state = self._state
        least = state.training.servers[0]
        there = sum(1 for one in state.servers.values() if one.greeted)
        since = f"{state.reason}; since then" if state.reason else "since the job's start"
        text = f"{since}, {there} of at least {least} pservers have connected within {state.limits.recover_s:g} s"
        return f"{text}. Start more of them (--servers), or check why they exit"

    def _watch_few(self, turn: PlacementTurn) -> None:
        """Report when fewer pservers than the minimum are left, and when there are enough again. The job continues."""
        state = self._state
        able = sum(1 for one in state.servers.values() if not one.draining)
        below = able < state.training.servers[0]
        if below != self._below:
            self._below = below
            if below:
                least = state.training.servers[0]
                turn.note(f"{able} of at least {least} pservers are left; no data is lost, continuing")
            else:
                turn.note(f"there are {able} pservers again")

    def _plan(self, turn: PlacementTurn) -> None:
        state = self._state
        hot = bool(self._heat) and turn.now_s >= self._heat_s
        if not (hot or turn.changed - ELSEWHERE or state.grid.touched or self._unplanned):
            return
        self._unplanned = False
        heat = None
        if hot:
            self._heat_s = turn.now_s + state.limits.heat_s
            heat = self._heat
            self._heat = {bucket: keys / 2 for bucket, keys in heat.items() if keys >= 2}
        planner = Planner(state.grid, state.sites(), state.copies, state.motion(), lagging=state.lagging)
        planner.run(heat)
        leaving = [one.label for one in state.servers.values() if one.draining]
        stuck = listed(leaving) if leaving and not planner.active else ""
        if stuck != self._stuck:
            self._stuck = stuck
            if stuck:
                turn.note(f"{stuck} cannot leave: there is no other pserver to take its buckets")

    def may_go(self, server: Pserver) -> bool:
        """True if the pserver is leaving, holds no buckets any more and is not needed for a checkpoint."""
        state, number = self._state, server.number
        over = server.draining and state.stage == "placed" and number not in state.grid.holders()
        return over and not self._checkpoints.needs(number)
