"""A launcher's place in the job: agrees on the settings, takes a name, and keeps the lease that both stand on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Iterable

from edl.config import JobSpec
from edl.errors import ForeignJob, JobConflict, LeaseLost, StoreError, StoreUnavailable
from edl.exit_codes import ExitCode
from edl.launch.options.agreement import differences
from edl.ports import Condition, CreatedAt, Delete, KeyValue, ModifiedAt, Operation, Put, Store
from edl.types import Incarnation, NodeId
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import Finish, NodeInfo
from edl.wire.origin import Origin, refused
from edl.wire.secret import Secret, described, own_words, stored_token, token_of

RETRY_S = 0.2
SILENT_PAUSE_S = 0.5
"""Between two looks at a launcher that is in the way and does not answer."""
LEASES = 2
SLACK_S = 5.0
"""After so many leases, and so much more, one that is still there renews its lease."""


class JobEnded(JobConflict):
    """The job to which this node's launcher belonged has just ended; carries its outcome."""

    def __init__(self, outcome: Finish) -> None:
        self.outcome = outcome
        self.exit_code = ExitCode(outcome.exit_code)  # a node that was cut off ends as the job did
        super().__init__(f"the job has already ended: {outcome.reason}")


class _Silent(Exception):
    """A launcher is in the way that neither refuses connections nor answers."""


class Registration:
    """One launcher's membership. ``join`` may be called again after the lease was lost."""

    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        spec: JobSpec,
        node: NodeId,
        refuses: Callable[[str, int], Awaitable[bool]],
        answers: Callable[[str, int], Awaitable[bool]],
        log: Callable[[str], None] = lambda text: None,
        secret: Secret | None = None,
        origin: Origin | None = None,
        allowed: Collection[str] = (),
    ) -> None:
        """``refuses``: nobody listens there, so whoever did is dead. ``answers``: a launcher there lives. ``origin``:
        compared with that of the job's founder, but for what is ``allowed``; None: nothing is."""
        self._origin = origin
        self._allowed = allowed
        self._secret = secret
        self._store = store
        self._node = node
        self._keys = keys
        self._spec = spec
        self._refuses = refuses
        self._answers = answers
        self._log = log
        self._silent = ""
        """Whose end is being waited for."""
        self._token_revision = 0
        """Revision of the store at which the token that we agreed on was written: it names the job."""
        self.token = ""
        self.lease = Incarnation(0)

    async def agree(self) -> None:
        """Settle the job's specification and its secret with the other launchers.

        Raises ``JobConflict`` when a living job of this id has other settings, and ``JobEnded`` when the last launcher
        of this node was part of a job that has just ended and was gone before it heard. Any other launcher that comes
        then begins a new job, once the launchers of the ended one are gone.
        """
        mine = self._keys.launcher(self._node)
        belonged = any(entry.key == mine for entry in (await self._store.read(mine)).entries)
        if belonged:
            await self._raise_if_ended()
        for _ in range(100):
            entries = await self._entries()
            while (over := not belonged and self._keys.over in entries) and self._in_use(entries):
                await asyncio.sleep(RETRY_S)
                entries = await self._entries()
            token = entries.get(self._keys.token)
            conflict = self._conflict(entries)
            if token is not None and not over and self._keys.spec in entries and conflict is None:
                self.token = token_of(token.value, self._secret, self._spec.job) or ""
                self._token_revision = token.mod_revision
                return
            if conflict is not None and self._in_use(entries):
                entries = await self._until_gone(conflict)
            await self._found(entries)
        raise JobConflict(f"job {self._spec.job}: other launchers keep changing its settings; use another --rdzv-id")

    async def _entries(self) -> dict[str, KeyValue]:
        return {entry.key: entry for entry in (await self._store.read(self._keys.prefix)).entries}

    def _in_use(self, entries: Iterable[str]) -> bool:
        """Whether some launcher of the job lives."""
        return any(key.startswith(self._keys.nodes) or key == self._keys.master for key in entries)

    async def _raise_if_ended(self) -> None:
        for entry in (await self._store.read(self._keys.farewell)).entries:
            if entry.key == self._keys.farewell:
                raise JobEnded(plain.loads(Finish, entry.value))

    def _conflict(self, entries: dict[str, KeyValue]) -> JobConflict | None:
        """In what the stored job is another one than ours; None: in nothing, or there is none."""
        stored = entries.get(self._keys.spec)
        if stored is None:
            return None
        theirs = plain.loads(JobSpec, stored.value)
        found = differences(self._spec, theirs)
        token = entries.get(self._keys.token)
        if token is not None and token_of(token.value, self._secret, self._spec.job) is None:
            ours = own_words(self._secret)
            found.append(f"--secret-file: {ours} (the running job has {described(token.value)})")
        foreign = self._foreign(entries)
        if foreign:
            listed = "; ".join(f"{aspect}: {text}" for aspect, text in foreign.items())
            return ForeignJob(
                f"job {self._spec.job} runs already and is another one than this launcher's: {listed}. "
                "Give this one another --rdzv-id (and --rdzv-endpoint), or end the other. If they do belong together: "
                f"--allow-differences={','.join(foreign)}"
            )
        if found:
            listed = "; ".join(found)
            return JobConflict(
                f"job {self._spec.job} is running with other settings: {listed}. "
                "Start this launcher with the same ones, or give it another --rdzv-id"
            )
        return None

    @property
    def _leases_end_s(self) -> float:
        """Seconds after which a lease that is still there is one that its launcher renews."""
        return LEASES * self._spec.timeouts.lease_ttl_s + SLACK_S

    async def _until_gone(self, conflict: JobConflict) -> dict[str, KeyValue]:
        """Returns the job's keys once no launcher of it holds a lease. Raises the conflict when one lives.

        Leases outlive their launchers: a store that starts again gives each its full time once more. So those of
        launchers that are proven dead are ended, and silent ones get the time in which theirs end by themselves.
        """
        looks = 0
        while self._in_use(entries := await self._entries()):
            for key, entry in entries.items():
                if key.startswith(self._keys.nodes):
                    other = plain.loads(NodeInfo, entry.value)
                    if await self._refuses(other.host, other.port):
                        await self._store.revoke_lease(other.incarnation)
                    elif await self._answers(other.host, other.port):
                        raise conflict
            if looks * SILENT_PAUSE_S > self._leases_end_s:
                raise conflict
            if looks == 2:
                self._log(f"job {self._spec.job} has launchers that do not answer: waiting for the end of their leases")
            if looks:
                await asyncio.sleep(SILENT_PAUSE_S)
            looks += 1
        return entries

    def _foreign(self, entries: dict[str, KeyValue]) -> dict[str, str]:
        """In what the job's founder was another one, as far as that is not allowed."""
        if self._origin is None:
            return {}
        stored = entries.get(self._keys.origin)
        founder = plain.loads(Origin, stored.value) if stored is not None else None
        found = refused(self._origin.differences(founder, proved=self._secret is not None), self._allowed)
        where = f" (node {founder.node} at {founder.host} has begun it)" if founder is not None else ""
        return {aspect: text + where for aspect, text in found.items()}

    async def _found(self, entries: dict[str, KeyValue]) -> None:
        """Write our settings and a new secret, in place of nothing or of what a dead job left behind."""
        stored = entries.get(self._keys.spec)
        condition = ModifiedAt(self._keys.spec, stored.mod_revision if stored else 0)
        operations: list[Operation] = [Delete(self._keys.farewell), Delete(self._keys.launchers, prefix=True)]
        if stored is not None:
            leftovers = (self._keys.record, self._keys.world, self._keys.scale, self._keys.over)
            histories = (self._keys.journal, self._keys.services)
            operations += [Delete(key) for key in leftovers]
            operations += [Delete(key, prefix=True) for key in histories]
        operations += [
            Put(self._keys.spec, plain.dumps(self._spec)),
            Put(self._keys.token, stored_token(self._secret)),
        ]
        if self._origin is not None:
            operations.append(Put(self._keys.origin, plain.dumps(self._origin)))
        await self._store.write(operations, [condition])

    async def rejoin(self, info: NodeInfo) -> NodeInfo:
        """``join`` again after the lease was lost. Raises ``JobEnded`` or ``JobConflict`` when the job has ended, also
        if another one of its id has begun."""
        token = await self._stored_token()
        if token is None or token_of(token.value, self._secret, self._spec.job) != self.token:
            await self._raise_if_ended()
            raise JobConflict(f"job {self._spec.job} has ended while this node was cut off")
        self._token_revision = token.mod_revision
        return await self.join(info)

    async def _stored_token(self) -> KeyValue | None:
        entries = (await self._store.read(self._keys.token)).entries
        return next((entry for entry in entries if entry.key == self._keys.token), None)

    async def _raise_if_gone(self) -> None:
        """The job that we agreed on may have ended since; another one may have begun."""
        token = await self._stored_token()
        if (token.mod_revision if token is not None else 0) != self._token_revision:
            await self._raise_if_ended()
            raise JobConflict(
                f"job {self._spec.job} ended while this node was joining it. "
                "Start this launcher again to begin a new one"
            )

    async def join(self, info: NodeInfo) -> NodeInfo:
        """Take the node's name under a new lease; returns the info with its incarnation.

        One that is silent is waited for until its lease ends. Raises ``JobConflict`` when a living launcher holds the
        name or the node rank asked for, and ``JobEnded`` or ``JobConflict`` when the job has ended since ``agree``.
        """
        looks = 0
        while True:
            lease = Incarnation(await self._store.grant_lease(self._spec.timeouts.lease_ttl_s))
            try:
                named = await self._take_name(dataclasses.replace(info, incarnation=lease))
            except (JobConflict, _Silent) as error:
                with contextlib.suppress(StoreError):
                    await self._store.revoke_lease(lease)
                if isinstance(error, JobConflict):
                    raise
                looks += 1
                await self._wait_for(error, looks)
            else:
                self.lease = lease
                return named

    async def _take_name(self, named: NodeInfo) -> NodeInfo:
        key = self._keys.node(named.node)
        while True:
            await self._refuse_same_rank(named)
            mine = [Put(key, plain.dumps(named), named.incarnation), Put(self._keys.launcher(named.node), b"")]
            conditions: list[Condition] = [CreatedAt(key, 0), ModifiedAt(self._keys.token, self._token_revision)]
            if await self._store.write(mine, conditions) is not None:
                return named
            await self._raise_if_gone()
            await self._clear_dead_namesake(key, named)

    async def _wait_for(self, silent: _Silent, looks: int) -> None:
        """Give a launcher that does not answer the time in which its lease ends. One that renews it lives, wherever the
        way to it is cut."""
        limit_s = self._leases_end_s
        if looks * SILENT_PAUSE_S > limit_s:
            raise JobConflict(f"{silent}. It has not answered for {limit_s:g} s, but it keeps its lease: it lives")
        if str(silent) != self._silent:
            self._silent = str(silent)
            self._log(f"{silent}, which does not answer: waiting for the end of its lease")
        await asyncio.sleep(SILENT_PAUSE_S)

    async def _refuse_same_rank(self, info: NodeInfo) -> None:
        if info.node_rank < 0:
            return
        for entry in (await self._store.read(self._keys.nodes)).entries:
            other = plain.loads(NodeInfo, entry.value)
            taken = other.node_rank == info.node_rank and other.node != info.node
            if taken and not await self._refuses(other.host, other.port):
                where = f"in job {self._spec.job} by node {other.node} ({other.host})"
                if not await self._answers(other.host, other.port):
                    raise _Silent(f"--node-rank={info.node_rank} is taken {where}")
                raise JobConflict(
                    f"--node-rank={info.node_rank} is taken {where}. Give each node its own rank, or none"
                )

    async def _clear_dead_namesake(self, key: str, mine: NodeInfo) -> None:
        """Our name is taken: by a launcher that lives (an error) or by what it left (ended here)."""
        for entry in (await self._store.read(key)).entries:
            if entry.key != key:
                continue
            other = plain.loads(NodeInfo, entry.value)
            ours = other.host == mine.host and other.port == mine.port
            if ours or await self._refuses(other.host, other.port):
                await self._store.revoke_lease(other.incarnation)
            elif await self._answers(other.host, other.port):
                raise JobConflict(
                    f"node id {other.node} is in use in job {self._spec.job} by a living launcher at "
                    f"{other.host}:{other.port}. Give this one another --node-id"
                )
            else:
                place = f"{other.host}:{other.port}"
                raise _Silent(f"node id {other.node} is in use in job {self._spec.job} by the launcher at {place}")

    async def keep(self, renewed: Callable[[float], None], missed: Callable[[], None]) -> None:
        """Renew the lease three times in its life until it is lost; then return.

        ``renewed`` is called after each success with the time of the request by the event loop's clock, ``missed`` each
        time the store did not answer.
        """
        pause_s, loop, said = self._spec.timeouts.lease_ttl_s / 3, asyncio.get_running_loop(), ""
        while True:
            lease, sent_s = self.lease, loop.time()
            try:
                await self._store.renew_lease(lease)
            except LeaseLost:
                if lease == self.lease:
                    return
                continue  # the node has registered anew meanwhile
            except StoreError as error:  # also one that refuses, where it did not before: no reason to end what runs
                if not isinstance(error, StoreUnavailable) and str(error) != said:
                    said = str(error)
                    self._log(f"the lease is not renewed: {error}")
                missed()
                await asyncio.sleep(RETRY_S)
                continue
            said = ""
            renewed(sent_s)
            await asyncio.sleep(pause_s)

    async def leave(self) -> None:
        """End the lease, and with it every key of this launcher. Who is started here next is no part of this job."""
        if self.lease:
            with contextlib.suppress(StoreError):
                await self._store.write([Delete(self._keys.launcher(self._node))])
                await self._store.revoke_lease(self.lease)
