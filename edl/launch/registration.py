"""Registers a launcher: agrees with the others on the job's settings, creates the node's key, and renews its lease."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from edl.config import JobSpec
from edl.errors import ForeignJob, JobConflict, LeaseLost, ProtocolError, StoreError, StoreUnavailable
from edl.exit_codes import ExitCode
from edl.launch.lease_length import WINDOW_S, LeaseLength
from edl.launch.options.agreement import differences
from edl.launch.stored_runs import run_of
from edl.master.stored import left_by_masters
from edl.ports import Condition, CreatedAt, Delete, KeyValue, ModifiedAt, Operation, Put, Store
from edl.rendezvous.phrases import listed
from edl.tasks import pause
from edl.types import Incarnation, NodeId
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import Finish
from edl.wire.origin import Origin, refused
from edl.wire.records import NodeInfo
from edl.wire.release import compatible, founder_of, refusal
from edl.wire.secret import Secret, described, described_own, stored_token, token_of

RETRY_S = 0.2
QUIET_LOOKS = 15
"""Number of looks for launchers of an ended job before a line is logged about those that are still there."""
SILENT_PAUSE_S = 0.5
"""Seconds between two checks of a silent launcher that holds the name or rank that this one needs."""
LEASES = 2
SLACK_S = 5.0
"""A lease that still exists after ``LEASES`` lease times plus ``SLACK_S`` seconds is being renewed."""


class JobEnded(JobConflict):
    """The job that this node's previous launcher belonged to has just ended; carries its outcome."""

    job_over = True

    def __init__(self, outcome: Finish) -> None:
        self.outcome = outcome
        self.exit_code = ExitCode(outcome.exit_code)  # an isolated node exits with the status of the job
        super().__init__(f"the job has already ended: {outcome.reason}")


class _Silent(Exception):
    """Another launcher holds the name or rank that this one needs, and neither refuses connections nor answers.
    ``lease_s``: the duration of its lease."""

    def __init__(self, text: str, lease_s: float) -> None:
        self.lease_s = lease_s
        super().__init__(text)


def _ends_within_s(lease_s: float) -> float:
    """Seconds after which a lease that still exists must have been renewed, so that its launcher is alive."""
    return LEASES * lease_s + SLACK_S


class Registration:
    """One launcher's registration in the job: ``agree``, ``join``, ``keep``, ``leave``. After a lost lease ``rejoin``
    registers again."""

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
        """``refuses``: whether an address refuses connections, so that its launcher is dead. ``answers``: whether a
        living launcher answers there. ``origin``: compared with that of the job's founder, except for the aspects in
        ``allowed``; its version of edl always counts. None: no comparison."""
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
        """The last logged reason for waiting for a silent launcher."""
        self._token_revision = 0
        """Revision of the store at which the job's token was written. It identifies the job among those of this id."""
        self.token = ""
        """The job's token, after ``agree``."""
        self.run = ""
        """Differs between all runs of the job, although a secret gives them the same token; after ``agree``. As secret
        as the token."""
        self.lease = Incarnation(0)
        """The lease of the node's key; 0: not registered."""
        self.lease_s = spec.timeouts.lease_ttl_s
        """Duration of the lease."""
        self._length = LeaseLength(spec.timeouts.lease_ttl_s)
        self._joining = Incarnation(0)
        """The lease under which ``join`` is about to create the node's key, or may have created it."""
        self._ended = asyncio.Event()
        """Set once the store has refused another call because it does not know ``lease``."""

    async def agree(self) -> None:
        """Agree with the other launchers on the job's specification and token, or found the job.

        Raises ``JobConflict`` if a running job of this id has other settings or a version of edl that is not
        compatible, and ``JobEnded`` if this node's previous launcher belonged to a job that has just ended and did not
        learn of the end. Any other launcher founds a new job once the launchers of the ended one are gone.
        """
        mine = self._keys.launcher(self._node)
        belonged = any(entry.key == mine for entry in (await self._store.read(mine)).entries)
        if belonged:
            await self._raise_if_ended()
        for _ in range(100):
            entries = await self._until_left(belonged)
            over = self._is_over(entries, belonged)
            token = entries.get(self._keys.token)
            conflict = self._conflict(entries)
            if token is not None and not over and self._keys.spec in entries and conflict is None:
                self.token = token_of(token.value, self._secret, self._spec.job) or ""
                self.run = run_of(token, entries.get(self._keys.run), self._secret, self._spec.job)
                self._token_revision = token.mod_revision
                return
            if conflict is not None and self._in_use(entries):
                entries = await self._until_gone(conflict)
            await self._create_job(entries)
        raise JobConflict(f"job {self._spec.job}: other launchers keep changing its settings; use another --rdzv-id")

    async def _entries(self) -> dict[str, KeyValue]:
        return {entry.key: entry for entry in (await self._store.read(self._keys.prefix)).entries}

    async def _until_left(self, belonged: bool) -> dict[str, KeyValue]:
        """Wait until no launcher of an ended job is registered; returns the job's keys."""
        looks = 0
        while True:
            entries = await self._entries()
            if not (self._is_over(entries, belonged) and self._in_use(entries)):
                return entries
            if looks == QUIET_LOOKS:
                nodes = [key.removeprefix(self._keys.nodes) for key in entries if key.startswith(self._keys.nodes)]
                who = f" ({listed(sorted(nodes))})" if nodes else ""
                self._log(f"job {self._spec.job} has ended: waiting for its launchers to leave{who}")
            looks += 1
            await asyncio.sleep(RETRY_S)

    def _is_over(self, entries: Collection[str], belonged: bool) -> bool:
        """Whether the job has ended, even if some of its launchers do not know yet and are still registered. They must
        be gone before a new job begins: one of them could become its Master."""
        return self._keys.spec not in entries or (not belonged and self._keys.over in entries)

    def _in_use(self, entries: Iterable[str]) -> bool:
        """Whether any launcher of the job is registered."""
        return any(key.startswith(self._keys.nodes) or key == self._keys.master for key in entries)

    async def _raise_if_ended(self) -> None:
        for entry in (await self._store.read(self._keys.farewell)).entries:
            if entry.key == self._keys.farewell:
                raise JobEnded(plain.loads(Finish, entry.value))

    def _conflict(self, entries: dict[str, KeyValue]) -> JobConflict | None:
        """An error that lists the differences between the stored job and this launcher's; None if there are none or no
        job is stored."""
        stored = entries.get(self._keys.spec)
        if stored is None:
            return None
        other = self._other_version(entries)  # before anything else is decoded: it may have another form there
        if other is not None:
            return other
        theirs = plain.loads(JobSpec, stored.value)
        found = differences(self._spec, theirs)
        token = entries.get(self._keys.token)
        if token is not None and token_of(token.value, self._secret, self._spec.job) is None:
            ours = described_own(self._secret)
            found.append(f"--secret-file: {ours} (the running job has {described(token.value)})")
        foreign = self._foreign(entries)
        if foreign:
            listed = "; ".join(f"{aspect}: {text}" for aspect, text in foreign.items())
            return ForeignJob(
                f"job {self._spec.job} is already running and differs from this launcher's: {listed}. "
                "Use another --rdzv-id (and --rdzv-endpoint), or end the other job. If they do belong together: "
                f"--allow-differences={','.join(foreign)}"
            )
        if found:
            listed = "; ".join(found)
            return JobConflict(
                f"job {self._spec.job} is running with other settings: {listed}. "
                "Start this launcher with the same settings, or with another --rdzv-id"
            )
        return None

    def _other_version(self, entries: Mapping[str, KeyValue]) -> ForeignJob | None:
        """An error if the job was founded by a version of edl that is not compatible with this launcher's; None if it
        was not."""
        if self._origin is None:
            return None
        stored = entries.get(self._keys.origin)
        founder = founder_of(stored.value if stored is not None else b"")
        if compatible(self._origin.edl, founder.edl):
            return None
        return ForeignJob(refusal(self._spec.job, self._origin.edl, founder))

    def _lease_of(self, other: NodeInfo) -> float:
        """Duration of another launcher's lease in seconds."""
        return other.lease_within(self._spec.timeouts.lease_ttl_s)

    async def _until_gone(self, conflict: JobConflict) -> dict[str, KeyValue]:
        """Wait until no launcher of the job holds a lease; returns the job's keys. Raises ``conflict`` if a launcher is
        alive.

        Leases may outlive their launchers: a restarted store extends each by its full time. So the leases of launchers
        that are certainly dead are revoked, and those of silent launchers get time to expire.
        """
        checks, lease_s = 0, self._spec.timeouts.lease_ttl_s
        while self._in_use(entries := await self._entries()):
            for key, entry in entries.items():
                if key.startswith(self._keys.nodes):
                    try:
                        other = plain.loads(NodeInfo, entry.value)
                    except ProtocolError:
                        continue  # of a very different version: only its lease tells whether it is alive
                    lease_s = max(lease_s, self._lease_of(other))
                    if await self._refuses(other.host, other.port):
                        await self._store.revoke_lease(other.incarnation)
                    elif await self._answers(other.host, other.port):
                        raise conflict
            if checks * SILENT_PAUSE_S > _ends_within_s(lease_s):
                raise conflict
            if checks == 2:
                self._log(f"job {self._spec.job} has launchers that do not answer: waiting for their leases to expire")
            if checks:
                await asyncio.sleep(SILENT_PAUSE_S)
            checks += 1
        return entries

    def _foreign(self, entries: dict[str, KeyValue]) -> dict[str, str]:
        """Aspects in which this launcher differs from the job's founder, except allowed ones, each with a
        description."""
        stored = entries.get(self._keys.origin)
        if self._origin is None or stored is None:
            return {}
        founder = plain.loads(Origin, stored.value)
        found = refused(self._origin.differences(founder, proved=self._secret is not None), self._allowed)
        where = f" (the job was started by node {founder.node} on {founder.host})"
        return {aspect: text + where for aspect, text in found.items()}

    async def _create_job(self, entries: dict[str, KeyValue]) -> None:
        """Found the job: write this launcher's settings and a new token, and delete what an ended job left behind.
        Does nothing if another launcher was faster."""
        stored = entries.get(self._keys.spec)
        condition = ModifiedAt(self._keys.spec, stored.mod_revision if stored else 0)
        operations: list[Operation] = [Delete(self._keys.farewell), Delete(self._keys.launchers, prefix=True)]
        operations += left_by_masters(self._keys)
        operations += [
            Put(self._keys.spec, plain.dumps(self._spec)),
            Put(self._keys.token, stored_token(self._secret)),
        ]
        if self._secret is not None:
            operations.append(Put(self._keys.run, secrets.token_hex(16).encode()))
        if self._origin is not None:
            operations.append(Put(self._keys.origin, plain.dumps(self._origin)))
        await self._store.write(operations, [condition])

    async def rejoin(self, info: NodeInfo) -> NodeInfo:
        """Register again after the lease was lost, like ``join``. Raises ``JobEnded`` or ``JobConflict`` if the job has
        ended, even if another job of the same id has begun."""
        token = await self._stored(self._keys.token)
        run = await self._stored(self._keys.run) if self._secret is not None else None
        if token is None or run_of(token, run, self._secret, self._spec.job) != self.run:
            await self._raise_if_ended()
            what = "has ended while this node was isolated, or its store has lost its data"
            raise JobConflict(f"job {self._spec.job} {what}. Start this launcher again")
        self._token_revision = token.mod_revision
        return await self.join(info)

    async def _stored(self, key: str) -> KeyValue | None:
        return next((entry for entry in (await self._store.read(key)).entries if entry.key == key), None)

    async def _raise_if_gone(self) -> None:
        """Raise ``JobEnded`` or ``JobConflict`` if the job that was agreed on has ended, even if another has begun."""
        token = await self._stored(self._keys.token)
        if (token.mod_revision if token is not None else 0) != self._token_revision:
            await self._raise_if_ended()
            raise JobConflict(
                f"job {self._spec.job} ended while this node was joining it. "
                "Start this launcher again to begin a new one"
            )

    async def join(self, info: NodeInfo) -> NodeInfo:
        """Create the node's key under a new lease; returns the info with its incarnation.

        Waits for the lease of a silent launcher to expire. Raises ``JobConflict`` if a living launcher holds the name
        or the requested node rank, and ``JobEnded`` or ``JobConflict`` if the job has ended since ``agree``.
        """
        waits = 0
        while True:
            lease_s = self._length.next_s(asyncio.get_running_loop().time())
            lease = Incarnation(await self._store.grant_lease(lease_s))
            self._joining = lease
            try:
                named = await self._take_name(dataclasses.replace(info, incarnation=lease, lease_s=lease_s))
            except LeaseLost:
                self._lost_lease()
                await asyncio.sleep(RETRY_S)  # this launcher was frozen, or the store down, for longer than the lease
            except (JobConflict, _Silent) as error:
                with contextlib.suppress(StoreError):
                    await self._store.revoke_lease(lease)
                if isinstance(error, JobConflict):
                    raise
                waits += 1
                await self._wait_for(error, waits)
            else:
                self._say_longer(lease_s)
                self.lease, self.lease_s, self._joining = lease, lease_s, Incarnation(0)
                self._ended.clear()
                return named

    def _lost_lease(self) -> None:
        self._length.lost(asyncio.get_running_loop().time())

    def _say_longer(self, lease_s: float) -> None:
        if lease_s > self.lease_s:
            losses = self._length.losses(asyncio.get_running_loop().time())
            self._log(
                f"this launcher has lost its lease {losses} times within {WINDOW_S / 60:g} min although it lives: the "
                f"new one lasts {lease_s:g} s instead of {self.lease_s:g} s"
            )

    async def _take_name(self, named: NodeInfo) -> NodeInfo:
        """Create the node's key under the lease of ``named``. Raises ``JobConflict`` or ``_Silent`` if the name or the
        rank is taken, and ``LeaseLost``."""
        key = self._keys.node(named.node)
        while True:
            await self._refuse_same_rank(named)
            mine = [Put(key, plain.dumps(named), named.incarnation), Put(self._keys.launcher(named.node), b"")]
            conditions: list[Condition] = [CreatedAt(key, 0), ModifiedAt(self._keys.token, self._token_revision)]
            if await self._store.write(mine, conditions) is not None:
                return named
            await self._raise_if_gone()
            await self._clear_dead_namesake(key, named)

    async def _wait_for(self, silent: _Silent, waits: int) -> None:
        """Wait ``SILENT_PAUSE_S`` for the lease of a silent launcher to expire. Raises ``JobConflict`` after so many
        waits that the launcher must have renewed it: then it is alive, even if this host cannot reach it."""
        limit_s = _ends_within_s(silent.lease_s)
        if waits * SILENT_PAUSE_S > limit_s:
            raise JobConflict(
                f"{silent}. It has not answered for {limit_s:g} s, but it is alive, because it renews its lease"
            )
        if str(silent) != self._silent:
            self._silent = str(silent)
            self._log(f"{silent}, which does not answer: waiting for its lease to expire")
        await asyncio.sleep(SILENT_PAUSE_S)

    async def _refuse_same_rank(self, info: NodeInfo) -> None:
        """Raise ``JobConflict`` if a living launcher has the requested node rank, ``_Silent`` if it does not answer."""
        if info.node_rank < 0:
            return
        for entry in (await self._store.read(self._keys.nodes)).entries:
            other = plain.loads(NodeInfo, entry.value)
            taken = other.node_rank == info.node_rank and other.node != info.node
            if taken and not await self._refuses(other.host, other.port):
                where = f"in job {self._spec.job} by node {other.node} ({other.host})"
                if not await self._answers(other.host, other.port):
                    raise _Silent(f"--node-rank={info.node_rank} is taken {where}", self._lease_of(other))
                raise JobConflict(
                    f"--node-rank={info.node_rank} is taken {where}. Give each node its own rank, or omit --node-rank"
                )

    async def _clear_dead_namesake(self, key: str, mine: NodeInfo) -> None:
        """Free the name if its launcher is dead, by revoking the lease. Raises ``JobConflict`` if a living launcher has
        the name, ``_Silent`` if it does not answer."""
        for entry in (await self._store.read(key)).entries:
            if entry.key != key:
                continue
            other = plain.loads(NodeInfo, entry.value)
            ours = other.host == mine.host and other.port == mine.port
            if ours or await self._refuses(other.host, other.port):
                await self._store.revoke_lease(other.incarnation)
            elif await self._answers(other.host, other.port):
                raise JobConflict(
                    f"node id {other.node} is in use in job {self._spec.job} by a running launcher at "
                    f"{other.host}:{other.port}. Use another --node-id"
                )
            else:
                where = f"in job {self._spec.job} by the launcher at {other.host}:{other.port}"
                raise _Silent(f"node id {other.node} is in use {where}", self._lease_of(other))

    async def keep(self, renewed: Callable[[float], None], missed: Callable[[], None]) -> None:
        """Renew the lease three times per ``--lease-ttl``; returns when it is lost, after which the next one may be
        longer. A longer lease is renewed as often, so that its end is noticed as soon.

        ``renewed`` is called after each success with the time of the request on the event loop's clock, ``missed``
        after each failure.
        """
        loop, said = asyncio.get_running_loop(), ""
        while True:
            lease, sent_s = self.lease, loop.time()
            try:
                if self._ended.is_set():
                    raise LeaseLost("the store did not know it in another call")
                await self._store.renew_lease(lease)
            except LeaseLost:
                if lease == self.lease:
                    self._lost_lease()
                    return
                continue  # the node has registered again meanwhile
            except StoreError as error:  # also if the store refuses the call: that is no reason to stop the workers
                if not isinstance(error, StoreUnavailable) and str(error) != said:
                    said = str(error)
                    self._log(f"cannot renew the lease: {error}")
                missed()
                await pause(RETRY_S, self._ended)
                continue
            said = ""
            renewed(sent_s)
            await pause(self._spec.timeouts.lease_ttl_s / 3, self._ended)

    def ended(self, lease: Incarnation) -> None:
        """Report that the store has refused another call because it does not know the lease. A store that is slow may
        answer that one long before it answers a renewal. ``keep`` then returns at once."""
        if lease == self.lease:
            self._ended.set()

    async def leave(self) -> None:
        """Unregister: revoke the lease, which deletes the node's keys, and the record that a launcher of this node id
        belongs to this job. If ``join`` was cancelled, revoke its lease: it may have created the key."""
        with contextlib.suppress(StoreError):
            if self.lease:
                await self._store.write([Delete(self._keys.launcher(self._node))])
            for lease in filter(None, (self.lease, self._joining)):
                await self._store.revoke_lease(lease)
