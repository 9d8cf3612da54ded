"""Keeps embedded etcd members below their space quota.

etcd's database file does not shrink automatically, and when it reaches the quota, etcd refuses all writes until it is
compacted, defragmented and the alarm is disarmed. A job's own store has no administrator, so its launcher does this.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from edl.adapters.etcd_disk import free_bytes
from edl.adapters.etcd_rpc import Connections, Endpoint, Metadata, rpc_pb2
from edl.adapters.etcd_server import HISTORY, EtcdMember
from edl.errors import StoreError, StoreUnavailable

LOOK_S = 20.0
"""Seconds between two checks. Members are checked at different times, so they do not stall together."""
HALF = 0.5
"""Share of the quota at which the file is made smaller."""
RETAINED = 200
"""Revisions kept when the file has grown; none if it is full. A watch that is further behind starts over."""
LIMIT_S = 60.0
"""Time limit of each call in seconds; a defragmentation copies the whole file."""
MIB = 1 << 20
LOW_BYTES = 256 * MIB
"""If the disk has less free space than this, a member's file is made smaller from ``SMALL_BYTES`` on."""
SMALL_BYTES = 16 * MIB


async def keep_room(member: EtcdMember, log: Callable[[str], None], look_s: float = LOOK_S) -> None:
    """Check one member every ``look_s`` seconds until cancelled."""
    while True:
        await asyncio.sleep(look_s)
        await asyncio.to_thread(member.look_after_files)
        with contextlib.suppress(StoreError):  # it is down; retried at the next check
            done = await make_room(member)
            if done:
                log(done)


async def make_room(member: EtcdMember) -> str:
    """Make the member's file smaller if it has grown or stopped accepting writes; returns what was done, empty for
    nothing.

    Raises ``StoreError`` when a call fails.
    """
    connections = Connections([member.endpoint], LIMIT_S, member.identity)
    try:
        room = _Room(connections)
        before = await room.status()
        full = await room.is_full(before)
        grown = before.dbSize >= HALF * member.quota_bytes
        if not (full or grown or (before.dbSize >= max(SMALL_BYTES, 2 * member.tidy_bytes) and _is_low(member))):
            await _forget(room, member, before.header.revision)
            return ""
        await room.compact(before.header.revision - (0 if full else RETAINED))
        await room.defragment()
        after = await room.status()
        member.tidy_bytes = after.dbSize
        if full and after.dbSize < member.quota_bytes:
            await room.take_alarm_back(after)
        state = "was full" if full else "had grown" if grown else "took up space on a disk that is almost full"
        sizes = f"from {before.dbSize / MIB:.0f} to {after.dbSize / MIB:.0f} MiB of {member.quota_bytes / MIB:.0f}"
        return f"the embedded etcd {state}: compacted and defragmented {sizes}"
    finally:
        await connections.close()


async def _forget(room: _Room, member: EtcdMember, revision: int) -> None:
    """Compact as etcd does automatically every five minutes, provided that its leader lives that long."""
    if revision > member.compacted + 2 * HISTORY:
        member.compacted = revision - HISTORY
        await room.compact(member.compacted)


def _is_low(member: EtcdMember) -> bool:
    free = free_bytes(member.data_dir)
    return free is not None and free < LOW_BYTES


class _Room:
    """Maintenance calls to one member."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def status(self) -> Any:
        return await self._call(lambda stub: stub.Status, rpc_pb2.StatusRequest())

    async def is_full(self, status: Any) -> bool:
        """Whether this member has raised the NOSPACE alarm."""
        request = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET, alarm=rpc_pb2.NOSPACE)
        answer = await self._call(lambda stub: stub.Alarm, request)
        return any(one.memberID == status.header.member_id for one in answer.alarms)

    async def compact(self, revision: int) -> None:
        request = rpc_pb2.CompactionRequest(revision=max(1, revision), physical=True)

        def attempt(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Any:
            return endpoint.kv.Compact(request, timeout=timeout_s, metadata=metadata)

        try:
            await self._connections.call(attempt, repeatable=True)
        except StoreUnavailable:
            raise
        except StoreError:
            return  # another member was faster: a later revision is already compacted

    async def defragment(self) -> None:
        await self._call(lambda stub: stub.Defragment, rpc_pb2.DefragmentRequest())

    async def take_alarm_back(self, status: Any) -> None:
        request = rpc_pb2.AlarmRequest(
            action=rpc_pb2.AlarmRequest.DEACTIVATE, memberID=status.header.member_id, alarm=rpc_pb2.NOSPACE
        )
        await self._call(lambda stub: stub.Alarm, request)

    async def _call(self, choose: Callable[[Any], Any], request: Any) -> Any:
        def attempt(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Any:
            return choose(endpoint.maintenance)(request, timeout=timeout_s, metadata=metadata)

        return await self._connections.call(attempt, repeatable=True)
