"""The shell of the election machine: watches the election key, campaigns, and runs a ``MasterShell`` while this node is
the Master."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edl.errors import FencedOut, LeaseLost, ProtocolError, StoreError, StoreRefused, StoreUnavailable
from edl.master import election as el
from edl.master.shell import MasterDeps, MasterShell
from edl.ports import ChangeKind, CreatedAt, Delete, KeyValue, Put
from edl.tasks import BackgroundTasks, Backoff, end, pause
from edl.types import FencingToken, Incarnation, NodeId
from edl.wire import plain
from edl.wire.messages import Finish

CAMPAIGN_PAUSE_S = 0.05
LONGEST_CAMPAIGN_PAUSE_S = 5.0
"""Bounds of the pause in seconds between two campaigns of one launcher, which spares an unavailable store. It grows
while the store refuses campaigns, or while each Master on this node steps down soon after its election."""
SETTLED_S = 10.0
"""A Master that stayed in office for this many seconds resets the pause."""


@dataclass(frozen=True, slots=True)
class CandidateCallbacks:
    """Callbacks through which a candidate reports the election's outcome."""

    follow: Callable[[el.MasterInfo, FencingToken], None]
    """Called with a new Master, to which the agent has to attach."""
    elected: Callable[[MasterShell | None], None]
    """Called with the shell when this launcher becomes the Master, and with None when it no longer is."""
    concluded: Callable[[Finish], None]
    """Called when the job ends while this launcher is the Master, whose own agent may not be attached."""
    lease_ended: Callable[[Incarnation], None]
    """Called when the store has refused a campaign because this launcher's lease has ended."""


class Candidate:
    """Takes part in elections while this launcher is registered."""

    def __init__(self, deps: MasterDeps, own: el.MasterInfo, callbacks: CandidateCallbacks) -> None:
        self._deps = deps
        self._own = own
        self._callbacks = callbacks
        self._events: asyncio.Queue[el.ElectionEvent] = asyncio.Queue()
        self._state = el.ElectionState()
        self._lease = Incarnation(0)
        self._before: NodeId | None = None
        """Node of the previous Master."""
        self._term: asyncio.Task[None] | None = None
        self._campaigns = BackgroundTasks(self._failed)
        self._campaign = 0
        """Number of the current campaign; results of earlier ones are ignored."""
        self._uncertain = False
        """Whether the election key may belong to this launcher although it does not know: a write was not answered, or
        a delete failed."""
        self._pauses = Backoff(CAMPAIGN_PAUSE_S, LONGEST_CAMPAIGN_PAUSE_S)
        self._rests = Backoff(CAMPAIGN_PAUSE_S, LONGEST_CAMPAIGN_PAUSE_S)
        self._new_lease = asyncio.Event()
        """Set when there is a lease that the current campaign does not use."""
        self._rest_s = 0.0
        """Delay in seconds before the next campaign, which gives other candidates precedence."""
        self._said = ""
        """The last logged reason why the store refuses campaigns."""
        self._known = False
        """Whether the election key has been read once, so that the store accepts this launcher."""
        self._broken: asyncio.Future[None]
        """Receives an unexpected exception of the Master on this node."""
        self.shell: MasterShell | None = None
        """The Master on this node; None: this launcher is not the Master."""

    def registered(self, lease: Incarnation) -> None:
        """Report a new lease, with which this launcher can campaign: a campaign with an earlier one that pauses is
        repeated at once."""
        self._lease, self._uncertain = lease, False
        self._pauses.reset()
        self._new_lease.set()
        self._events.put_nowait(el.LauncherRegistered())

    def unregistered(self) -> None:
        """Report that the lease is lost."""
        self._events.put_nowait(el.LauncherUnregistered())

    def master_refused(self, token: FencingToken) -> None:
        """Report that the Master's host refuses connections."""
        self._events.put_nowait(el.MasterRefused(token))

    def out_of_touch(self) -> None:
        """Report that the store has not answered for a lease time. A Master with unattached nodes then steps down."""
        if self.shell is not None and self.shell.misses_nodes:
            self._events.put_nowait(el.OutOfTouch())

    @property
    def master(self) -> el.MasterInfo | None:
        """The current Master as far as this launcher knows; None: unknown."""
        return self._state.known

    async def run(self) -> None:
        """Take part in elections until cancelled. Raises an unexpected exception of the Master, which ends the
        launcher: the job can do without this launcher, but not without a working Master. Raises ``StoreRefused`` if the
        store does not accept this launcher."""
        self._broken = asyncio.get_running_loop().create_future()
        watch = asyncio.ensure_future(self._watch())
        getter: asyncio.Future[el.ElectionEvent] | None = None
        try:
            while True:
                getter = asyncio.ensure_future(self._events.get())
                beside: list[asyncio.Future[Any]] = [watch, self._broken]
                await asyncio.wait([getter, *beside], return_when=asyncio.FIRST_COMPLETED)
                for task in beside:
                    if task.done():
                        task.result()
                decision = el.elect(self._state, await getter)
                self._state = decision.state
                for effect in decision.effects:
                    await self._carry_out(effect)
        finally:
            if getter is not None:
                getter.cancel()
            watch.cancel()
            self._campaigns.drop()
            await self._end_term()

    async def resign(self) -> None:
        """Give up the election key if it is this launcher's, so that another one becomes the Master at once, not when
        the lease ends. Call it after ``run``; it returns once the store has answered."""
        token = self._state.token if self._state.role is el.Role.MASTER else FencingToken(0)
        if not token and (self._uncertain or self._state.role is el.Role.CANDIDATE):
            token = await self._resolve_write()
        while token:
            try:
                await self._give_up_key(token)
                return
            except StoreError:
                await asyncio.sleep(CAMPAIGN_PAUSE_S)

    async def _give_up_key(self, token: FencingToken) -> None:
        key = self._deps.keys.master
        await self._deps.store.write([Delete(key)], [CreatedAt(key, token)])

    async def _carry_out(self, effect: el.ElectionEffect) -> None:
        match effect:
            case el.Campaign(depose):
                self._campaign += 1
                self._campaigns.begin(self._campaign_once(self._campaign, depose))
            case el.BecomeMaster(token):
                await self._end_term()
                self.shell = MasterShell(self._deps, token, self._before)
                self._term = asyncio.ensure_future(self._run_term(self.shell, token))
            case el.StepDown(reason):
                self._deps.log(f"this node is no longer the Master: {reason}")
                await self._end_term()
            case el.Follow(master, token):
                self._before = master.node
                self._callbacks.follow(master, token)

    async def _run_term(self, shell: MasterShell, token: FencingToken) -> None:
        self._deps.log(f"this node is the Master (token {token})")
        self._callbacks.elected(shell)
        began_s = self._deps.clock.now_s()
        try:
            self._callbacks.concluded(await shell.run())
        except FencedOut:
            self._events.put_nowait(el.FencedOff())
        except StoreError as error:
            # It has lost track of the store, for example because its watch was compacted: another Master reads it.
            self._deps.log(f"stepping down as Master: {error}")
            try:
                await self._give_up_key(token)
            except StoreError:
                self._uncertain = True
            if self._deps.clock.now_s() - began_s >= SETTLED_S:
                self._rests.reset()
            self._rest_s = self._rests.next()
            self._events.put_nowait(el.FencedOff())
        except Exception as error:  # noqa: BLE001 - a bug: ``run`` raises it, so that the job does not stall
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    async def _end_term(self) -> None:
        term, self._term, self.shell = self._term, None, None
        if term is not None:
            self._callbacks.elected(None)
            await end(term)

    async def _campaign_once(self, number: int, depose: FencingToken) -> None:
        """Campaign once, and queue the result unless a newer campaign has begun. At most one candidate wins, because
        creating the key is one transaction."""
        rest_s, self._rest_s = self._rest_s, 0.0
        await asyncio.sleep(rest_s)
        self._new_lease.clear()
        token = await self._create(depose)
        if not token and self._uncertain:
            token = await self._resolve_write()
        if not token:
            await pause(self._pauses.next() if self._said else CAMPAIGN_PAUSE_S, self._new_lease)
        if number == self._campaign:
            self._events.put_nowait(el.CampaignEnded(bool(token), token))

    async def _create(self, depose: FencingToken) -> FencingToken:
        """Create the election key; returns its token, or 0 if the write failed or its outcome is unknown. If only the
        repetition of a write has been answered, the watch reports this launcher's key."""
        key, store, lease = self._deps.keys.master, self._deps.store, self._lease
        put = Put(key, plain.dumps(self._own), lease)
        try:
            if depose:
                await store.write([Delete(key)], [CreatedAt(key, depose)], repeatable=True)
            revision = await store.write([put], [CreatedAt(key, 0)], repeatable=True)
        except StoreError as error:
            self._uncertain = self._uncertain or not error.definite
            if isinstance(error, LeaseLost):
                self._callbacks.lease_ended(lease)
            said, self._said = self._said, str(error) if error.definite else ""
            if self._said and self._said != said:
                self._deps.log(f"cannot become the Master, the store refuses the election key: {error}")
            return FencingToken(0)
        self._pauses.reset()
        self._said = ""
        return FencingToken(revision or 0)

    async def _resolve_write(self) -> FencingToken:
        """Find out whether an unanswered write has created the key; returns its token, or 0. Retries until the store
        answers."""
        while True:
            try:
                snapshot = await self._deps.store.read(self._deps.keys.master)
            except StoreUnavailable:
                await asyncio.sleep(CAMPAIGN_PAUSE_S)
                continue
            except StoreError:
                return FencingToken(0)
            mine = (FencingToken(entry.create_revision) for entry in snapshot.entries if self._is_mine(entry))
            return next(mine, FencingToken(0))

    def _is_mine(self, entry: KeyValue) -> bool:
        return entry.lease == self._lease and self._master_in(entry) == self._own

    def _master_in(self, entry: KeyValue) -> el.MasterInfo | None:
        """The value of the election key; None if edl did not write it, in which case an operator has to delete it."""
        try:
            return plain.loads(el.MasterInfo, entry.value)
        except ProtocolError as error:
            self._deps.log(f"ignoring {entry.key}: {error}; delete this key if edl did not write it")
            return None

    async def _watch(self) -> None:
        """Queue an event for the current election key and for each change."""
        key = self._deps.keys.master
        while True:
            try:
                snapshot = await self._deps.store.read(key)
                self._known = True
                if not snapshot.entries:
                    self._events.put_nowait(el.KeyChanged(None, FencingToken(snapshot.revision)))
                for entry in snapshot.entries:
                    self._show(entry)
                async for change in self._deps.store.watch(key, snapshot.revision):
                    if change.kind is ChangeKind.DELETE:
                        self._events.put_nowait(el.KeyChanged(None, FencingToken(change.entry.mod_revision)))
                    else:
                        self._show(change.entry)
            except StoreRefused:
                if not self._known:
                    raise
                await asyncio.sleep(LONGEST_CAMPAIGN_PAUSE_S)  # a changed password must not end a running job
            except StoreError:  # unavailable, or the missed changes were compacted: read again
                await asyncio.sleep(CAMPAIGN_PAUSE_S)

    def _show(self, entry: KeyValue) -> None:
        master = self._master_in(entry)
        if master is not None:
            self._events.put_nowait(el.KeyChanged(master, FencingToken(entry.create_revision), self._is_mine(entry)))
