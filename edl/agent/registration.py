"""A launcher's place in the job: agrees on the settings, takes a name, and keeps the lease that both stand on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable

from edl.config import JobSpec
from edl.errors import JobConflict, LeaseLost, StoreError, StoreUnavailable
from edl.ports import CreatedAt, Delete, KeyValue, ModifiedAt, Operation, Put, Store
from edl.types import Incarnation
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import Finish, NodeInfo
from edl.wire.secret import Secret, described, own_words, stored_token, token_of

RETRY_S = 0.2


class JobEnded(JobConflict):
    """The job of this name has just ended; carries its outcome."""

    def __init__(self, outcome: Finish) -> None:
        self.outcome = outcome
        super().__init__(f"the job has already ended: {outcome.reason}")


class Registration:
    """One launcher's membership. ``join`` may be called again after the lease was lost."""

    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        spec: JobSpec,
        refuses: Callable[[str, int], Awaitable[bool]],
        secret: Secret | None = None,
    ) -> None:
        self._secret = secret
        self._store = store
        self._keys = keys
        self._spec = spec
        self._refuses = refuses
        self.token = ""
        self.lease = Incarnation(0)

    async def agree(self) -> None:
        """Settle the job's specification and its secret with the other launchers.

        Raises ``JobConflict`` when a living job of this id has other settings and ``JobEnded`` right after an end.
        """
        await self._raise_if_ended()
        for _ in range(100):
            snapshot = await self._store.read(self._keys.prefix)
            entries = {entry.key: entry for entry in snapshot.entries}
            token = entries.get(self._keys.token)
            if token is not None and self._fits(entries):
                self.token = token_of(token.value, self._secret, self._spec.job) or ""
                return
            await self._found(entries)
        raise JobConflict(f"job {self._spec.job}: other launchers keep changing its settings; use another --rdzv-id")

    async def _raise_if_ended(self) -> None:
        for entry in (await self._store.read(self._keys.farewell)).entries:
            if entry.key == self._keys.farewell:
                raise JobEnded(plain.loads(Finish, entry.value))

    def _fits(self, entries: dict[str, KeyValue]) -> bool:
        """Whether the stored settings are ours. Raises ``JobConflict`` when they are others' and these live."""
        stored = entries.get(self._keys.spec)
        if stored is None:
            return False
        theirs = plain.loads(JobSpec, stored.value)
        differences = self._spec.differences(theirs)
        token = entries.get(self._keys.token)
        if token is not None and token_of(token.value, self._secret, self._spec.job) is None:
            ours = own_words(self._secret)
            differences.append(f"--secret-file: {ours} (the running job has {described(token.value)})")
        if not differences:
            return True
        if any(key.startswith(self._keys.nodes) or key == self._keys.master for key in entries):
            listed = "; ".join(differences)
            raise JobConflict(
                f"job {self._spec.job} is running with other settings: {listed}. "
                "Start this launcher with the same ones, or give it another --rdzv-id"
            )
        return False

    async def _found(self, entries: dict[str, KeyValue]) -> None:
        """Write our settings and a new secret, in place of nothing or of what a dead job left behind."""
        stored = entries.get(self._keys.spec)
        condition = ModifiedAt(self._keys.spec, stored.mod_revision if stored else 0)
        operations: list[Operation] = []
        if stored is not None:
            operations += [Delete(self._keys.record), Delete(self._keys.journal, prefix=True)]
        operations += [
            Put(self._keys.spec, plain.dumps(self._spec)),
            Put(self._keys.token, stored_token(self._secret)),
        ]
        await self._store.write(operations, [condition])

    async def rejoin(self, info: NodeInfo) -> NodeInfo:
        """``join`` again after the lease was lost. Raises ``JobEnded`` or ``JobConflict`` when the job has ended."""
        if not (await self._store.read(self._keys.spec)).entries:
            await self._raise_if_ended()
            raise JobConflict(f"job {self._spec.job} has ended while this node was cut off")
        return await self.join(info)

    async def join(self, info: NodeInfo) -> NodeInfo:
        """Take the node's name under a new lease; returns the info with its incarnation.

        Raises ``JobConflict`` when a living launcher holds the name or the node rank asked for.
        """
        lease = Incarnation(await self._store.grant_lease(self._spec.timeouts.lease_ttl_s))
        named = dataclasses.replace(info, incarnation=lease)
        key = self._keys.node(info.node)
        try:
            while True:
                await self._refuse_same_rank(info)
                if await self._store.write([Put(key, plain.dumps(named), lease)], [CreatedAt(key, 0)]) is not None:
                    self.lease = lease
                    return named
                await self._clear_dead_namesake(key, named)
        except JobConflict:
            with contextlib.suppress(StoreError):
                await self._store.revoke_lease(lease)
            raise

    async def _refuse_same_rank(self, info: NodeInfo) -> None:
        if info.node_rank < 0:
            return
        for entry in (await self._store.read(self._keys.nodes)).entries:
            other = plain.loads(NodeInfo, entry.value)
            taken = other.node_rank == info.node_rank and other.node != info.node
            if taken and not await self._refuses(other.host, other.port):
                raise JobConflict(
                    f"--node-rank={info.node_rank} is taken in job {self._spec.job} by node {other.node} "
                    f"({other.host}). Give each node its own rank, or none"
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
            else:
                raise JobConflict(
                    f"node id {other.node} is in use in job {self._spec.job} by a living launcher at "
                    f"{other.host}:{other.port}. Give this one another --node-id"
                )

    async def keep(self, renewed: Callable[[float], None], missed: Callable[[], None]) -> None:
        """Renew the lease three times in its life until it is lost; then return.

        ``renewed`` is called after each success with the seconds since the request, ``missed`` each time the store
        did not answer.
        """
        pause_s, loop = self._spec.timeouts.lease_ttl_s / 3, asyncio.get_running_loop()
        while True:
            lease, sent_s = self.lease, loop.time()
            try:
                await self._store.renew_lease(lease)
            except LeaseLost:
                if lease == self.lease:
                    return
                continue  # the node has registered anew meanwhile
            except StoreUnavailable:
                missed()
                await asyncio.sleep(RETRY_S)
                continue
            renewed(loop.time() - sent_s)
            await asyncio.sleep(pause_s)

    async def leave(self) -> None:
        """End the lease, and with it every key of this launcher."""
        if self.lease:
            with contextlib.suppress(StoreError):
                await self._store.revoke_lease(self.lease)
