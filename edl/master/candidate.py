"""The election's shell: watches the election key, campaigns, and runs a ``MasterShell`` while this launcher rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edl.errors import FencedOut, ProtocolError, StoreError, StoreRefused, StoreUnavailable
from edl.master import election as el
from edl.master.shell import MasterDeps, MasterShell
from edl.ports import ChangeKind, CreatedAt, Delete, KeyValue, Put
from edl.tasks import BackgroundTasks, Backoff, end
from edl.types import Incarnation, NodeId, Token
from edl.wire import plain
from edl.wire.messages import Finish

CAMPAIGN_PAUSE_S = 0.05
LONGEST_CAMPAIGN_PAUSE_S = 5.0
"""Between two campaigns of one launcher, so that a store that is away is not hammered; longer and longer while it
refuses them, or while each Master here loses its thread as soon as it rules."""
SETTLED_S = 10.0
"""A Master that has ruled for so long has begun well."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Whom a candidate tells."""

    follow: Callable[[el.Ruler, Token], None]
    """Attach to this Master."""
    rule: Callable[[MasterShell | None], None]
    """This launcher rules with this shell, or (None) not any more."""
    concluded: Callable[[Finish], None]
    """The job has ended under this launcher's rule; its own agent may not have been there to hear."""


class Candidate:
    """Stands for election as long as this launcher is registered."""

    def __init__(self, deps: MasterDeps, ruler: el.Ruler, callbacks: Callbacks) -> None:
        self._deps = deps
        self._ruler = ruler
        self._callbacks = callbacks
        self._events: asyncio.Queue[el.ElectionEvent] = asyncio.Queue()
        self._state = el.ElectionState()
        self._lease = Incarnation(0)
        self._before: NodeId | None = None
        """The last Master's node."""
        self._rule: asyncio.Task[None] | None = None
        self._campaigns = BackgroundTasks(self._failed)
        self._campaign = 0
        """Number of the one under way; what an earlier one finds out comes too late."""
        self._uncertain = False
        """The election key may be this launcher's without its knowledge: a write had no answer, or a key stayed."""
        self._pauses = Backoff(CAMPAIGN_PAUSE_S, LONGEST_CAMPAIGN_PAUSE_S)
        self._rests = Backoff(CAMPAIGN_PAUSE_S, LONGEST_CAMPAIGN_PAUSE_S)
        self._rest_s = 0.0
        """What the next campaign waits for: others may do better."""
        self._said = ""
        """Why the store refuses campaigns."""
        self._known = False
        """The store has shown the election key once: it accepts this launcher."""
        self._broken: asyncio.Future[None]
        """What the Master here did not expect."""
        self.shell: MasterShell | None = None

    def registered(self, lease: Incarnation) -> None:
        """A (new) lease is there to stand on."""
        self._lease, self._uncertain = lease, False
        self._events.put_nowait(el.Registered())

    def unregistered(self) -> None:
        """The lease is gone."""
        self._events.put_nowait(el.Unregistered())

    def ruler_refused(self, token: Token) -> None:
        """The Master's host refuses connections."""
        self._events.put_nowait(el.RulerRefused(token))

    def out_of_touch(self) -> None:
        """The store has been silent for as long as a lease lasts. A Master that misses a node gives its place up."""
        if self.shell is not None and self.shell.misses_nodes:
            self._events.put_nowait(el.OutOfTouch())

    @property
    def ruler(self) -> el.Ruler | None:
        """Who rules, as far as this launcher knows; None while it does not."""
        return None if self._state.role is el.Role.CANDIDATE else self._state.ruler

    async def run(self) -> None:
        """Take part in elections until cancelled. A mistake in the Master ends it with that exception: the others can
        do without this launcher, and nobody without a Master."""
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
            await self._stop_ruling()

    async def _carry_out(self, effect: el.ElectionEffect) -> None:
        match effect:
            case el.Campaign(depose):
                self._campaign += 1
                self._campaigns.begin(self._stand(self._campaign, depose))
            case el.Rule(token):
                await self._stop_ruling()
                self.shell = MasterShell(self._deps, token, self._before)
                self._rule = asyncio.ensure_future(self._run_rule(self.shell, token))
            case el.StepDown(reason):
                self._deps.log(f"this node is no longer the Master: {reason}")
                await self._stop_ruling()
            case el.Follow(ruler, token):
                self._before = ruler.node
                self._callbacks.follow(ruler, token)

    async def _run_rule(self, shell: MasterShell, token: Token) -> None:
        self._deps.log(f"this node is the Master (token {token})")
        self._callbacks.rule(shell)
        began_s = self._deps.clock.now_s()
        try:
            self._callbacks.concluded(await shell.run())
        except FencedOut:
            self._events.put_nowait(el.FencedOff())
        except StoreError as error:
            # It lost the thread of the store (a compacted watch, say): make room for a Master with a fresh view.
            self._deps.log(f"giving the Master's place up: {error}")
            key = self._deps.keys.master
            try:
                await self._deps.store.write([Delete(key)], [CreatedAt(key, token)])
            except StoreError:
                self._uncertain = True
            if self._deps.clock.now_s() - began_s >= SETTLED_S:
                self._rests.reset()
            self._rest_s = self._rests.next()
            self._events.put_nowait(el.FencedOff())
        except Exception as error:  # noqa: BLE001 - a defect: said by who runs this, instead of a job that stands still
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    async def _stop_ruling(self) -> None:
        rule, self._rule, self.shell = self._rule, None, None
        if rule is not None:
            self._callbacks.rule(None)
            await end(rule)

    async def _stand(self, number: int, depose: Token) -> None:
        """Two transactions; whoever is faster between them wins, and either way exactly one rules."""
        rest_s, self._rest_s = self._rest_s, 0.0
        await asyncio.sleep(rest_s)
        token = await self._create(depose)
        if not token and self._uncertain:
            token = await self._find_out()
        if not token:
            await asyncio.sleep(self._pauses.next() if self._said else CAMPAIGN_PAUSE_S)
        if number == self._campaign:
            self._events.put_nowait(el.CampaignEnded(bool(token), token))

    async def _create(self, depose: Token) -> Token:
        """Create the election key; 0 if that did not work, or is not known to have worked."""
        key, store = self._deps.keys.master, self._deps.store
        put = Put(key, plain.dumps(self._ruler), self._lease)
        try:
            if depose:
                await store.write([Delete(key)], [CreatedAt(key, depose)])
            revision = await store.write([put], [CreatedAt(key, 0)])
        except StoreError as error:
            self._uncertain = self._uncertain or not error.definite
            said, self._said = self._said, str(error) if error.definite else ""
            if self._said and self._said != said:
                self._deps.log(f"cannot stand for Master: {error}")
            return Token(0)
        self._pauses.reset()
        self._said = ""
        return Token(revision or 0)

    async def _find_out(self) -> Token:
        """A write had no answer, and the key may have been created all the same. Look until the store says."""
        while True:
            try:
                snapshot = await self._deps.store.read(self._deps.keys.master)
            except StoreUnavailable:
                await asyncio.sleep(CAMPAIGN_PAUSE_S)
                continue
            except StoreError:
                return Token(0)
            mine = (Token(entry.create_revision) for entry in snapshot.entries if self._is_mine(entry))
            return next(mine, Token(0))

    def _is_mine(self, entry: KeyValue) -> bool:
        return entry.lease == self._lease and self._ruler_in(entry) == self._ruler

    def _ruler_in(self, entry: KeyValue) -> el.Ruler | None:
        """None for what no edl has written there: whoever did so has to take it away."""
        try:
            return plain.loads(el.Ruler, entry.value)
        except ProtocolError as error:
            self._deps.log(f"passing over {entry.key}: {error}")
            return None

    async def _watch(self) -> None:
        """Show the election key's changes, beginning with what is there."""
        key = self._deps.keys.master
        while True:
            try:
                snapshot = await self._deps.store.read(key)
                self._known = True
                if not snapshot.entries:
                    self._events.put_nowait(el.KeyChanged(None, Token(snapshot.revision)))
                for entry in snapshot.entries:
                    self._show(entry)
                async for change in self._deps.store.watch(key, snapshot.revision):
                    if change.kind is ChangeKind.DELETE:
                        self._events.put_nowait(el.KeyChanged(None, Token(change.entry.mod_revision)))
                    else:
                        self._show(change.entry)
            except StoreRefused:
                if not self._known:
                    raise
                await asyncio.sleep(LONGEST_CAMPAIGN_PAUSE_S)  # a password has changed: no reason to end what runs
            except StoreError:  # it is away, or no longer keeps the changes missed: begin again with what is there
                await asyncio.sleep(CAMPAIGN_PAUSE_S)

    def _show(self, entry: KeyValue) -> None:
        ruler = self._ruler_in(entry)
        if ruler is not None:
            self._events.put_nowait(el.KeyChanged(ruler, Token(entry.create_revision), self._is_mine(entry)))
