"""The election's shell: watches the election key, campaigns, and runs a ``MasterShell`` while this launcher rules."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edl.errors import FencedOut, StoreError, StoreRefused, StoreUnavailable
from edl.master import election as el
from edl.master.shell import MasterShell, Surroundings
from edl.ports import ChangeKind, CreatedAt, Delete, Put
from edl.tasks import end
from edl.types import Incarnation, Token
from edl.wire import plain
from edl.wire.messages import Finish

CAMPAIGN_PAUSE_S = 0.05
"""Between two campaigns of one launcher, so that a store that is away is not hammered."""


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

    def __init__(self, around: Surroundings, ruler: el.Ruler, callbacks: Callbacks) -> None:
        self._around = around
        self._ruler = ruler
        self._callbacks = callbacks
        self._events: asyncio.Queue[el.ElectionEvent] = asyncio.Queue()
        self._state = el.ElectionState()
        self._lease = Incarnation(0)
        self._rule: asyncio.Task[None] | None = None
        self._campaigns: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None]
        """What the Master here did not expect."""
        self.shell: MasterShell | None = None

    def registered(self, lease: Incarnation) -> None:
        """A (new) lease is there to stand on."""
        self._lease = lease
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
        try:
            while True:
                getter = asyncio.ensure_future(self._events.get())
                beside: list[asyncio.Future[Any]] = [watch, self._broken]
                await asyncio.wait([getter, *beside], return_when=asyncio.FIRST_COMPLETED)
                for task in beside:
                    if task.done():
                        getter.cancel()
                        task.result()
                decision = el.elect(self._state, await getter)
                self._state = decision.state
                for effect in decision.effects:
                    await self._carry_out(effect)
        finally:
            watch.cancel()
            for campaign in self._campaigns:
                campaign.cancel()
            await self._stop_ruling()

    async def _carry_out(self, effect: el.ElectionEffect) -> None:
        match effect:
            case el.Campaign(depose):
                task = asyncio.get_running_loop().create_task(self._campaign(depose))
                self._campaigns.add(task)
                task.add_done_callback(self._campaigns.discard)
            case el.Rule(token):
                await self._stop_ruling()
                self.shell = MasterShell(self._around, token)
                self._rule = asyncio.ensure_future(self._run_rule(self.shell, token))
            case el.StepDown(reason):
                self._around.log(f"this node is no longer the Master: {reason}")
                await self._stop_ruling()
            case el.Follow(ruler, token):
                self._callbacks.follow(ruler, token)

    async def _run_rule(self, shell: MasterShell, token: Token) -> None:
        self._around.log(f"this node is the Master (token {token})")
        self._callbacks.rule(shell)
        try:
            self._callbacks.concluded(await shell.run())
        except FencedOut:
            self._events.put_nowait(el.FencedOff())
        except StoreError as error:
            # It lost the thread of the store (a compacted watch, say): make room for a Master with a fresh view.
            self._around.log(f"giving the Master's place up: {error}")
            key = self._around.keys.master
            with contextlib.suppress(StoreError):
                await self._around.store.write([Delete(key)], [CreatedAt(key, token)])
            self._events.put_nowait(el.FencedOff())
        except Exception as error:  # noqa: BLE001 - a defect: said by who runs this, instead of a job that stands still
            self._broken.set_exception(error)

    async def _stop_ruling(self) -> None:
        rule, self._rule, self.shell = self._rule, None, None
        if rule is not None:
            self._callbacks.rule(None)
            await end(rule)

    async def _campaign(self, depose: Token) -> None:
        """Two transactions; whoever is faster between them wins, and either way exactly one rules."""
        key, store = self._around.keys.master, self._around.store
        put = Put(key, plain.dumps(self._ruler), self._lease)
        try:
            if depose:
                await store.write([Delete(key)], [CreatedAt(key, depose)])
            revision = await store.write([put], [CreatedAt(key, 0)])
            if revision is not None:
                self._events.put_nowait(el.CampaignEnded(True, Token(revision)))
                return
        except StoreUnavailable:
            await self._find_out()
            return
        except StoreError as error:
            self._around.log(f"cannot stand for Master: {error}")
        await asyncio.sleep(CAMPAIGN_PAUSE_S)
        self._events.put_nowait(el.CampaignEnded(False, Token(0)))

    async def _find_out(self) -> None:
        """The store did not answer; the key may have been created all the same. Look until it says."""
        while True:
            await asyncio.sleep(CAMPAIGN_PAUSE_S)
            try:
                snapshot = await self._around.store.read(self._around.keys.master)
            except StoreUnavailable:
                continue
            except StoreError:
                break
            for entry in snapshot.entries:
                if entry.lease == self._lease and plain.loads(el.Ruler, entry.value) == self._ruler:
                    self._events.put_nowait(el.CampaignEnded(True, Token(entry.create_revision)))
                    return
            break
        self._events.put_nowait(el.CampaignEnded(False, Token(0)))

    async def _watch(self) -> None:
        """Show the election key's changes, beginning with what is there."""
        key = self._around.keys.master
        while True:
            try:
                snapshot = await self._around.store.read(key)
                if not snapshot.entries:
                    self._events.put_nowait(el.KeyChanged(None, Token(snapshot.revision)))
                for entry in snapshot.entries:
                    self._show(entry.value, entry.create_revision)
                async for change in self._around.store.watch(key, snapshot.revision):
                    if change.kind is ChangeKind.DELETE:
                        self._events.put_nowait(el.KeyChanged(None, Token(change.entry.mod_revision)))
                    else:
                        self._show(change.entry.value, change.entry.create_revision)
            except StoreRefused:
                raise
            except StoreError:  # it is away, or no longer keeps the changes missed: begin again with what is there
                await asyncio.sleep(CAMPAIGN_PAUSE_S)

    def _show(self, value: bytes, revision: int) -> None:
        self._events.put_nowait(el.KeyChanged(plain.loads(el.Ruler, value), Token(revision)))
