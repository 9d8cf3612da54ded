"""Renews a lease by a blocking call from a thread, in case the event loop that normally does it is busy.

The store's connections belong to the event loop, so these are separate. They stay open until ``close``, because opening
a connection is slow on a busy machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from edl.adapters.etcd_rpc import (
    CHANNEL_OPTIONS,
    NEEDS_LEADER,
    EtcdTls,
    Metadata,
    credentials_of,
    rpc_pb2,
    rpc_pb2_grpc,
)
from edl.adapters.identity import Identity
from edl.adapters.system_threads import room_for_threads
from edl.errors import StoreRefused

CALL_THREADS = 2
"""Threads that gRPC starts for a call: one for its requests, and one for the events of its channel."""


class EtcdLeases:
    """Renews leases at the first endpoint that answers. Callable from any thread, one call at a time."""

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        tls: EtcdTls | Identity | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> None:
        self._addresses = tuple(addresses)
        self._timeout_s = timeout_s
        self._tls = tls
        self._user = user
        self._password = password
        self._channels: dict[str, grpc.Channel] = {}
        self._broken: list[grpc.Channel | None] = []
        """Channels without the thread that they need for their calls. To close one, or to drop the last reference to
        it, would wait for ever."""

    def renew(self, lease: int) -> bool:
        """Renew the lease; False when no endpoint did so within the time limit, the lease has ended, or the system
        allows no further thread."""
        return room_for_threads(CALL_THREADS) and any(self._renew_at(address, lease) for address in self._addresses)

    def close(self) -> None:
        """Close the connections; the next renewal opens new ones."""
        while self._channels:
            self._channels.popitem()[1].close()

    def _renew_at(self, address: str, lease: int) -> bool:
        limit_s = self._timeout_s / len(self._addresses)
        request = rpc_pb2.LeaseKeepAliveRequest(ID=lease)
        try:
            channel = self._channels.get(address) or self._open(address)
            metadata = self._login(channel, limit_s)
            answers = rpc_pb2_grpc.LeaseStub(channel).LeaseKeepAlive(
                iter([request]), timeout=limit_s, metadata=metadata
            )
            return any(answer.TTL > 0 for answer in answers)
        except (grpc.RpcError, StoreRefused):
            return False  # the event loop finds out why and logs it
        except RuntimeError:  # there is no thread after all
            self._broken.append(self._channels.pop(address, None))
            return False

    def _open(self, address: str) -> grpc.Channel:
        credentials, more = credentials_of(self._tls)
        options = [*CHANNEL_OPTIONS, *more]
        if credentials is None:
            opened = grpc.insecure_channel(address, options=options)
        else:
            opened = grpc.secure_channel(address, credentials, options=options)
        self._channels[address] = opened
        return opened

    def _login(self, channel: grpc.Channel, limit_s: float) -> Metadata:
        if not self._user:
            return NEEDS_LEADER
        request = rpc_pb2.AuthenticateRequest(name=self._user, password=self._password or "")
        try:
            answer = rpc_pb2_grpc.AuthStub(channel).Authenticate(request, timeout=limit_s, metadata=NEEDS_LEADER)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                return NEEDS_LEADER  # etcd has authentication switched off
            raise
        return (*NEEDS_LEADER, ("token", str(answer.token)))
