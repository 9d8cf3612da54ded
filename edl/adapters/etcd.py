"""The store on etcd v3, over grpc.aio.

The messages are those that the etcd-sdk-python package generates from etcd's own .proto files; the calls, their time
limits and their retries are here and in ``etcd_rpc``.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from edl.adapters.etcd_rpc import Connections, Endpoint, EtcdFailure, EtcdTls, Metadata, kv_pb2, rpc_pb2, verdict
from edl.adapters.identity import Identity
from edl.errors import LeaseLost, StoreError, StoreUnavailable
from edl.ports import (
    Change,
    ChangeKind,
    Condition,
    CreatedAt,
    KeyValue,
    Operation,
    PrefixSnapshot,
    Put,
)

__all__ = ["EtcdStore", "EtcdTls"]

LONGEST_WATCH_PAUSE_S = 0.2
"""Longest pause between two attempts to set up a watch while all members refuse it."""


def _to_bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _range_of(prefix: str) -> tuple[bytes, bytes]:
    """Key and range end, in etcd's sense, of all keys with this prefix.

    UTF-8 text never contains the byte 0xff, so incrementing the last byte never carries.
    """
    raw = _to_bytes(prefix)
    return (raw, raw[:-1] + bytes([raw[-1] + 1])) if raw else (b"\0", b"\0")


def _to_entry(kv: Any) -> KeyValue:
    return KeyValue(
        key=kv.key.decode("utf-8", "surrogateescape"),
        value=kv.value,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        lease=kv.lease,
    )


def _to_request(operation: Operation) -> Any:
    if isinstance(operation, Put):
        put = rpc_pb2.PutRequest(key=_to_bytes(operation.key), value=operation.value, lease=operation.lease)
        return rpc_pb2.RequestOp(request_put=put)
    if operation.prefix:
        key, end = _range_of(operation.key)
        return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key, range_end=end))
    return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=_to_bytes(operation.key)))


def _to_compare(condition: Condition) -> Any:
    if isinstance(condition, CreatedAt):
        wanted = {"target": rpc_pb2.Compare.CREATE, "create_revision": condition.revision}
    else:
        wanted = {"target": rpc_pb2.Compare.MOD, "mod_revision": condition.revision}
    return rpc_pb2.Compare(result=rpc_pb2.Compare.EQUAL, key=_to_bytes(condition.key), **wanted)


def _to_change(event: Any) -> Change:
    kind = ChangeKind.DELETE if event.type == kv_pb2.Event.DELETE else ChangeKind.PUT
    return Change(kind, _to_entry(event.kv))


def _reached(response: Any) -> int:
    """The revision up to which a watch is complete after this response.

    All changes of one revision arrive in one response. A response without changes is a progress report; in one with
    changes, the header may be ahead of them, so it does not count.
    """
    return int(response.events[-1].kv.mod_revision if response.events else response.header.revision)


class _WatchRefused(Exception):
    """etcd cancelled a watch for lack of permission."""


class _WatchStream:
    """One watch on one endpoint. It ends without an error when that endpoint is abandoned."""

    def __init__(self, connections: Connections, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.revision = 0
        """The store's revision when the watch was set up, as known to this member."""
        self._connections = connections
        self._left = asyncio.ensure_future(endpoint.left.wait())
        self._call: Any = None

    async def open(self, prefix: str, seen: int) -> bool:
        """Set the watch up; False when the member does not answer in time.

        The watch starts at the last revision seen, not the one after: etcd accepts a watch from the very revision it
        was compacted at, but may have dropped a delete of that revision. Everything after the last revision seen is
        therefore complete.
        """
        metadata = await self._connections.metadata(self.endpoint)
        self._call = self.endpoint.watch.Watch(metadata=metadata)
        key, end = _range_of(prefix)
        # Thanks to progress reports, an idle watch that reconnects continues from a revision that is not compacted yet.
        create = rpc_pb2.WatchCreateRequest(key=key, range_end=end, start_revision=max(seen, 1), progress_notify=True)
        await self._call.write(rpc_pb2.WatchRequest(create_request=create))
        created = await self.next(self._connections.timeout_s)
        if created is None:
            self._connections.leave(self.endpoint, silent=True)
            return False
        self.revision = created.header.revision
        return not self._connections.is_foreign(self.endpoint, created)

    async def next(self, timeout_s: float | None = None) -> Any:
        """The next response; None after ``timeout_s`` or when the endpoint was abandoned."""
        read = asyncio.ensure_future(self._call.read())
        try:
            await asyncio.wait({read, self._left}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not read.done():
                return None
            response = read.result()
        finally:
            read.cancel()
        if response is grpc.aio.EOF:
            return None
        if response.canceled:
            self._explain_cancel(response)
            return None
        return response

    def _explain_cancel(self, response: Any) -> None:
        if response.compact_revision:
            raise StoreError(
                f"changes before revision {response.compact_revision} have been compacted by etcd at "
                f"{self.endpoint.address}, so some were missed. Read again and watch from there"
            )
        if "permission denied" in response.cancel_reason or "auth" in response.cancel_reason:
            raise _WatchRefused(response.cancel_reason)

    def close(self) -> None:
        """Close the stream."""
        self._left.cancel()
        if self._call is not None:
            self._call.cancel()


class EtcdStore:
    """``Store`` on one or more etcd endpoints (``"host:port"``).

    ``request_timeout_s`` bounds every call. Connections are made on first use, in the event loop of that call. A write
    that got no answer raises ``StoreUnavailable`` and is never sent twice; reads, lease calls and watches are retried
    on another endpoint. With ``user``, etcd's password login is used, and repeated when etcd no longer knows the token.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        request_timeout_s: float = 2.0,
        tls: EtcdTls | Identity | None = None,
        user: str | None = None,
        password: str | None = None,
        one_cluster: bool = False,
    ) -> None:
        """``one_cluster``: as for ``Connections``."""
        if not endpoints:
            raise ValueError("EtcdStore needs at least one endpoint")
        self._connections = Connections(endpoints, request_timeout_s, tls, user, password, one_cluster=one_cluster)

    def expect(self, cluster: int) -> None:
        """Accept answers only from the cluster with this id."""
        self._connections.expect(cluster)

    async def read(self, prefix: str) -> PrefixSnapshot:
        """All keys with this prefix, by a linearizable read."""
        key, end = _range_of(prefix)
        request = rpc_pb2.RangeRequest(key=key, range_end=end)
        answer = await self._range(request)
        return PrefixSnapshot(tuple(_to_entry(kv) for kv in answer.kvs), answer.header.revision)

    async def write(self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()) -> int | None:
        """Run one transaction; see ``Store.write``. etcd accepts at most 128 operations, and each key only once."""
        request = rpc_pb2.TxnRequest(
            compare=[_to_compare(condition) for condition in conditions],
            success=[_to_request(operation) for operation in operations],
        )

        def attempt(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Any:
            return endpoint.kv.Txn(request, timeout=timeout_s, metadata=metadata)

        answer = await self._connections.call(attempt, repeatable=False)
        return int(answer.header.revision) if answer.succeeded else None

    async def grant_lease(self, ttl_s: float) -> int:
        """Create a lease of at least ``ttl_s`` seconds, rounded up to whole seconds; returns its id."""
        request = rpc_pb2.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)))

        def attempt(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Any:
            return endpoint.lease.LeaseGrant(request, timeout=timeout_s, metadata=metadata)

        # Repeating is harmless: a lease whose answer was lost holds no keys and expires.
        answer = await self._connections.call(attempt, repeatable=True)
        return int(answer.ID)

    async def renew_lease(self, lease: int) -> float:
        """Renew the lease; returns its remaining seconds. Raises ``LeaseLost`` when it has expired or was revoked."""
        ttl_s = await self._keep_alive(lease)
        if ttl_s <= 0:
            # A newly elected leader may not have applied the grant yet (etcd before 3.5.3). A linearizable read passes
            # through the same log, so a lease that is unknown after it is really gone.
            await self._range(rpc_pb2.RangeRequest(key=b"\0", limit=1))
            ttl_s = await self._keep_alive(lease)
        if ttl_s <= 0:
            raise LeaseLost(f"lease {lease:x} has expired or was revoked at etcd {self._connections.names}")
        return ttl_s

    async def _keep_alive(self, lease: int) -> float:
        request = rpc_pb2.LeaseKeepAliveRequest(ID=lease)

        async def attempt(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Any:
            # Written without an iterator of requests: if the call breaks before they are sent, gRPC cancels it, which
            # this task cannot tell from its own cancellation.
            call = endpoint.lease.LeaseKeepAlive(timeout=timeout_s, metadata=metadata)
            try:
                with contextlib.suppress(asyncio.InvalidStateError):  # failed already: read() says why
                    await call.write(request)
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    raise self._connections.unavailable(f"{endpoint.address}: closed the lease stream")
                return answer
            finally:
                call.cancel()

        answer = await self._connections.call(attempt, repeatable=True)
        return float(answer.TTL)

    async def revoke_lease(self, lease: int) -> None:
        """Revoke the lease and delete its keys; no error if it is already gone."""
        request = rpc_pb2.LeaseRevokeRequest(ID=lease)

        def attempt(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Any:
            return endpoint.lease.LeaseRevoke(request, timeout=timeout_s, metadata=metadata)

        try:
            await self._connections.call(attempt, repeatable=True)
        except LeaseLost:
            return

    async def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Change]:
        """Changes under ``prefix`` with revision > ``after_revision``, in order, none missing; see ``Store.watch``.

        Moves to another endpoint when a member dies, loses its leader, or stops answering. Ends when the store is
        closed.
        """
        seen, pause_s = after_revision, 0.0
        while not self._connections.closed.is_set():
            stream: _WatchStream | None = None
            try:
                stream = _WatchStream(self._connections, await self._connections.pick(None))
                if await stream.open(prefix, seen):
                    await self._check_history(stream, seen)
                    while (response := await stream.next()) is not None:
                        pause_s = 0.0
                        for event in response.events:
                            if event.kv.mod_revision > seen:
                                yield _to_change(event)
                        seen = max(seen, _reached(response))
            except StoreUnavailable:
                pass  # retried below, or closed
            except (grpc.aio.AioRpcError, _WatchRefused) as error:
                await self._judge_watch_failure(stream, error, prefix)
            finally:
                if stream is not None:
                    stream.close()
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, 0.01), LONGEST_WATCH_PAUSE_S)

    async def _check_history(self, stream: _WatchStream, seen: int) -> None:
        """Raise ``StoreError`` if the store's revision is lower than one seen before: it was restarted without its
        data."""
        if stream.revision >= seen:
            return
        # A member may just lag behind; a linearizable read decides.
        answer = await self._range(rpc_pb2.RangeRequest(key=b"\0", limit=1))
        if answer.header.revision < seen:
            raise StoreError(
                f"etcd at {self._connections.names} is at revision {answer.header.revision}, but revision {seen} has "
                "been seen before: it has lost its data. Read again, and check its data directory"
            )

    async def _judge_watch_failure(
        self, stream: _WatchStream | None, error: grpc.aio.AioRpcError | _WatchRefused, prefix: str
    ) -> None:
        """Return if the watch should be set up again; raise if that would fail again."""
        if isinstance(error, grpc.aio.AioRpcError):
            if stream is not None:
                self._connections.leave(stream.endpoint, silent=error.code() is grpc.StatusCode.DEADLINE_EXCEEDED)
            if verdict(error) not in (EtcdFailure.REFUSED, EtcdFailure.STALE_LOGIN):
                return
        # A read logs in again if necessary, and raises StoreRefused if that fails.
        self._connections.forget_login()
        key, end = _range_of(prefix)
        with contextlib.suppress(StoreUnavailable):
            await self._range(rpc_pb2.RangeRequest(key=key, range_end=end, limit=1))

    async def _range(self, request: Any) -> Any:
        def attempt(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Any:
            return endpoint.kv.Range(request, timeout=timeout_s, metadata=metadata)

        return await self._connections.call(attempt, repeatable=True)

    async def close(self) -> None:
        """Close all connections; running watches end."""
        await self._connections.close()
