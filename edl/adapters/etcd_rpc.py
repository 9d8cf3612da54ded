"""Connections to the etcd members of a job: endpoint selection, login, and the meaning of failures.

There is one channel per endpoint. Calls go to the current endpoint as long as its connection stands, and move on when
that member is down, silent or without a leader. A failed call is only repeated when it certainly had no effect or when
repeating it is harmless.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from pyetcd.etcdrpc import kv_pb2, rpc_pb2, rpc_pb2_grpc

from edl.adapters.answer_time import AnswerTime
from edl.adapters.clock import SystemClock
from edl.adapters.identity import Identity
from edl.errors import LeaseLost, StoreError, StoreFull, StoreRefused, StoreUnavailable

__all__ = ["Connections", "Endpoint", "EtcdTls", "Metadata", "kv_pb2", "rpc_pb2", "rpc_pb2_grpc"]

Metadata = tuple[tuple[str, str], ...]
Attempt = Callable[["Endpoint", float, Metadata], Awaitable[Any]]
"""One try of a call: endpoint, time limit in seconds, metadata to send."""

NEEDS_LEADER: Metadata = (("hasleader", "true"),)
"""Makes a member without a leader refuse calls and cancel its streams at once, instead of letting them hang."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # After an outage, the next connection attempt is at most this far away.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Also gRPC's time limit for one connection attempt: a host that drops packets must not hold it for the default 20
    # s.
    ("grpc.min_reconnect_backoff_ms", 2000),
    # The pod of a member may come back at another address before its lease time is over; by default gRPC asks for the
    # address of a name twice in a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # A host that dies silently is noticed by pings. etcd drops clients that ping more often than every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    # A snapshot of a large job is one message.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Several stores in one process share no connections, so that closing or losing one does not affect the others.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

SUSPECT_S = 5.0
"""Seconds for which a silent member is avoided while another one is available."""

SUSPECT_GRACE_S = 0.2
"""Seconds to wait for another member's connection before a silent one is tried again."""

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.02
"""Bounds of the pause in seconds between two checks of the connections, and between two tries."""

CHECK = (
    "Is etcd running there, and reachable from this host? Check --rdzv-endpoint. "
    "If the job's launchers serve the store themselves: has the job ended, or have the serving launchers?"
)
CERTIFICATES = (
    "The certificates were accepted before: has one expired, or is a clock wrong? Renew it: the files of --rdzv-conf "
    "are read again"
)

SLOW = (
    "The connection is up, so etcd is frozen, or its disk or the network is slow: --rdzv-conf=request_timeout=SECONDS "
    "waits longer for each answer"
)
NO_TLS = (
    "The server there does not speak TLS: if it is this etcd, drop etcds:// and ca=, cert=, key= of --rdzv-conf, "
    "or enable TLS in etcd"
)
ROOM = (
    "A store started by edl frees space by itself; in any other one compact, defragment, and disarm the alarm "
    "(docs/failures.md)"
)

FOREIGN = (
    "an etcd of another cluster, which took that port while the member was down: stop it, or give this job other "
    "ports with --rdzv-endpoint"
)

RENEW_S = 1.0
"""Seconds between two looks at the certificates' files while no member can be reached."""

URGENT_AFTER = 0.5
URGENT_PAUSE = 0.1
"""Parts of its time limit after which an urgent call without an answer is sent again: the first time, and then each
time. So a store that is merely slow is not asked more often; an election takes longer."""

EXPLANATION_S = 0.2
"""Seconds for asking gRPC why there is no connection, for the message."""

_now_s = SystemClock().now_s


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """Paths of TLS files. ``cert`` and ``key`` are for servers that require a client certificate; give both or
    neither."""

    ca: str
    cert: str | None = None
    key: str | None = None


class EtcdFailure(enum.Enum):
    """The meaning of a failed call."""

    NOT_DONE = enum.auto()
    """Certainly no effect; another member or a later try may succeed."""
    UNKNOWN = enum.auto()
    """No answer; it may have taken effect."""
    STALE_LOGIN = enum.auto()
    """The login token is unknown or expired; log in again."""
    REFUSED = enum.auto()
    """Wrong credentials or no permission."""
    FULL = enum.auto()
    """No writes until space is freed."""
    LEASE_GONE = enum.auto()
    WRONG = enum.auto()
    """etcd rejected the call; the same call will always fail."""


_BY_TEXT: dict[str, EtcdFailure] = {
    "etcdserver: no leader": EtcdFailure.NOT_DONE,
    "etcdserver: not capable": EtcdFailure.NOT_DONE,
    "etcdserver: rpc not supported for learner": EtcdFailure.NOT_DONE,
    "etcdserver: too many requests": EtcdFailure.NOT_DONE,
    "etcdserver: mvcc: database space exceeded": EtcdFailure.FULL,
    "etcdserver: invalid auth token": EtcdFailure.STALE_LOGIN,
    "etcdserver: revision of auth store is old": EtcdFailure.STALE_LOGIN,
    "etcdserver: user name is empty": EtcdFailure.STALE_LOGIN,
    "etcdserver: authentication failed, invalid user ID or password": EtcdFailure.REFUSED,
    "etcdserver: requested lease not found": EtcdFailure.LEASE_GONE,
}
"""Error texts that the status code alone does not distinguish (etcd, api/v3rpc/rpctypes/error.go)."""

_BY_CODE: dict[grpc.StatusCode, EtcdFailure] = {
    grpc.StatusCode.UNAUTHENTICATED: EtcdFailure.STALE_LOGIN,
    grpc.StatusCode.PERMISSION_DENIED: EtcdFailure.REFUSED,
    grpc.StatusCode.INVALID_ARGUMENT: EtcdFailure.WRONG,
    grpc.StatusCode.FAILED_PRECONDITION: EtcdFailure.WRONG,
    grpc.StatusCode.OUT_OF_RANGE: EtcdFailure.WRONG,
    grpc.StatusCode.NOT_FOUND: EtcdFailure.WRONG,
    grpc.StatusCode.RESOURCE_EXHAUSTED: EtcdFailure.WRONG,
    grpc.StatusCode.UNIMPLEMENTED: EtcdFailure.WRONG,
}


_DEFINITE = (EtcdFailure.LEASE_GONE, EtcdFailure.WRONG, EtcdFailure.FULL, EtcdFailure.REFUSED)
"""Verdicts that are final, so they must come from the right cluster."""


def verdict(error: grpc.aio.AioRpcError) -> EtcdFailure:
    """The meaning of a failed call. Unknown errors count as "it may have taken effect"."""
    return _BY_TEXT.get(error.details() or "", _BY_CODE.get(error.code(), EtcdFailure.UNKNOWN))


class Endpoint:
    """One etcd member and the channel to it. Create it inside the event loop that uses it."""

    def __init__(
        self, address: str, credentials: grpc.ChannelCredentials | None, more: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.address = address
        options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, *more]
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self.channel = grpc.aio.secure_channel(address, credentials, options=options)
        self.kv: Any = rpc_pb2_grpc.KVStub(self.channel)
        self.lease: Any = rpc_pb2_grpc.LeaseStub(self.channel)
        self.watch: Any = rpc_pb2_grpc.WatchStub(self.channel)
        self.auth: Any = rpc_pb2_grpc.AuthStub(self.channel)
        self.cluster: Any = rpc_pb2_grpc.ClusterStub(self.channel)
        self.maintenance: Any = rpc_pb2_grpc.MaintenanceStub(self.channel)
        self.left = asyncio.Event()
        """Set when the member is abandoned; its streams end. Each suspicion sets the event and replaces it with a new
        one."""
        self.foreign = False
        """Whether its last answer came from another cluster."""
        self.answered_s = 0.0
        """Time of its last answer to a call, be it a refusal."""
        self._suspect_until = 0.0

    def connected(self) -> bool:
        """Whether the connection is up; asks gRPC to connect if it is not."""
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    def suspected(self) -> bool:
        """Whether the member was silent within the last ``SUSPECT_S`` seconds."""
        return _now_s() < self._suspect_until

    def suspect(self) -> None:
        """Note that the member does not answer although its connection is up."""
        self._suspect_until = _now_s() + SUSPECT_S
        self.end_streams()

    def end_streams(self) -> None:
        """End this endpoint's streams, so that they move to another one."""
        self.left.set()
        self.left = asyncio.Event()


def _read_file(path: str | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StoreRefused(f"cannot read the {what} file {path}: {error.strerror}. Check the TLS settings") from error


_Pems = tuple[bytes | None, ...]
"""Contents of the files of TLS: CA, key, certificate."""


def _pems_of(tls: EtcdTls | Identity | None) -> _Pems:
    """What the files hold now; empty if there are none. Blocks. Raises ``StoreRefused``."""
    if not isinstance(tls, EtcdTls):
        return ()
    return _read_file(tls.ca, "CA"), _read_file(tls.key, "key"), _read_file(tls.cert, "certificate")


def credentials_of(
    tls: EtcdTls | Identity | None, pems: _Pems | None = None
) -> tuple[grpc.ChannelCredentials | None, Sequence[tuple[str, str]]]:
    """Credentials and further options of a channel. ``pems``: contents of the files, if they have been read already.
    Raises ``StoreRefused`` for a file that cannot be read."""
    if tls is None:
        return None, ()
    if isinstance(tls, Identity):
        return tls.of_client(), tls.channel_options
    return grpc.ssl_channel_credentials(*(_pems_of(tls) if pems is None else pems)), ()


class Connections:
    """Connections to all endpoints of one store, opened on the first call."""

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        tls: EtcdTls | Identity | None = None,
        user: str | None = None,
        password: str | None = None,
        *,
        one_cluster: bool = False,
    ) -> None:
        """``one_cluster``: accept answers only from the cluster that answered first, or that of ``expect``."""
        self.addresses = tuple(addresses)
        self._timeout_s = timeout_s
        self._time = AnswerTime(timeout_s, len(self.addresses))
        self.closed = asyncio.Event()
        self._tls = tls
        self._user = user
        self._password = password
        self._one_cluster = one_cluster
        self._cluster = 0
        """The cluster's id; 0 until it is known."""
        self._login_token: str | None = None
        self._endpoints: list[Endpoint] = []
        self._pems: _Pems = ()
        """Contents of the certificates' files, as the connections use them."""
        self._looked_s = 0.0
        """When these files were last read."""
        self._reading: asyncio.Future[_Pems] | None = None
        self._replaced: list[Endpoint] = []
        """Connections with certificates that have been renewed since."""
        self._current = 0
        self._stood = False
        """Whether a connection has ever been up, which proves that the certificates were right."""

    @property
    def limit_s(self) -> float:
        """Seconds that a call may take now: as configured, and more while the store is slow."""
        return self._time.limit_s(_now_s())

    @property
    def names(self) -> str:
        """The endpoints as text, for messages."""
        return ", ".join(self.addresses)

    def _open(self) -> None:
        if self.closed.is_set():
            raise StoreUnavailable(f"the connection to etcd at {self.names} has been closed by this process")
        if self._endpoints:
            return
        self._connect(_pems_of(self._tls))

    def _connect(self, pems: _Pems) -> None:
        credentials, more = credentials_of(self._tls, pems)
        self._pems, self._looked_s = pems, _now_s()
        self._endpoints = [Endpoint(address, credentials, more) for address in self.addresses]

    def _renew(self) -> None:
        """Connect anew if the certificates' files have been renewed: gRPC knows only what was in them before. They are
        read in a thread, because their file system may hang."""
        reading = self._reading
        if reading is None:
            if self._pems and _now_s() - self._looked_s >= RENEW_S:
                self._looked_s = _now_s()
                self._reading = asyncio.ensure_future(asyncio.to_thread(_pems_of, self._tls))
        elif reading.done():
            self._reading = None
            with contextlib.suppress(StoreRefused, RuntimeError):  # being replaced; there is no thread at present
                pems = reading.result()
                if pems != self._pems:
                    self._reconnect(pems)

    def _reconnect(self, pems: _Pems) -> None:
        before = self._endpoints
        self._connect(pems)
        self._replaced += before  # calls that wait for them end by themselves
        for endpoint in before:
            endpoint.end_streams()

    async def pick(self, deadline_s: float | None) -> Endpoint:
        """An endpoint whose connection is up, preferably the current one. ``deadline_s`` None waits forever.

        Raises ``StoreUnavailable`` at the deadline; nothing has been sent then.
        """
        started_s, pause_s = _now_s(), FIRST_PAUSE_S
        while True:
            self._open()
            now_s = _now_s()
            found = self._standing(suspects_too=now_s - started_s >= SUSPECT_GRACE_S)
            if found is not None:
                return found
            if deadline_s is not None and now_s >= deadline_s:
                raise await self._unreachable()
            self._renew()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _standing(self, *, suspects_too: bool) -> Endpoint | None:
        for offset in range(len(self._endpoints)):
            index = (self._current + offset) % len(self._endpoints)
            endpoint = self._endpoints[index]
            if endpoint.connected() and (suspects_too or not endpoint.suspected()):
                self._current, self._stood = index, True
                return endpoint
        return None

    def leave(self, endpoint: Endpoint, *, silent: bool) -> None:
        """Prefer another endpoint from now on. ``silent``: this one does not answer, so move its streams too."""
        if len(self._endpoints) > 1:
            if self._endpoints[self._current] is endpoint:
                self._current = (self._current + 1) % len(self._endpoints)
            if silent:
                endpoint.suspect()

    def expect(self, cluster: int) -> None:
        """Accept answers only from the cluster with this id."""
        self._cluster = cluster

    def is_foreign(self, endpoint: Endpoint, answer: Any) -> bool:
        """Whether the answer comes from another cluster; its endpoint is then avoided. While a member is down its port
        is free, so another job's etcd may listen there."""
        found = int(answer.header.cluster_id) if self._one_cluster else 0
        self._cluster = self._cluster or found
        endpoint.foreign = found not in (0, self._cluster)
        if not endpoint.foreign:
            return False
        self.leave(endpoint, silent=True)
        return True

    async def _says_nothing_of_ours(self, endpoint: Endpoint) -> bool:
        """Whether a refusal came from another cluster. Refusals carry no cluster id, so one harmless read is made. A
        store that launchers start has no users, so no login is needed."""
        if not self._one_cluster:
            return False
        try:
            request = rpc_pb2.RangeRequest(key=b"\0", serializable=True)
            answer = await endpoint.kv.Range(request, timeout=self.limit_s, metadata=NEEDS_LEADER)
        except grpc.aio.AioRpcError:
            return False
        return self.is_foreign(endpoint, answer)

    async def call(self, attempt: Attempt, *, repeatable: bool, patient: bool = False) -> Any:
        """Carry out one call within the time limit.

        ``repeatable``: repeating is harmless, so the call is sent to the next endpoint when one does not answer.
        Otherwise it is only sent again when it certainly had no effect. ``patient``: an endpoint may use all the time,
        instead of its share. Raises ``StoreError``.
        """
        began_s = _now_s()
        deadline_s = began_s + self.limit_s
        tries = len(self.addresses) if repeatable and not patient else 1
        logins = 0
        while True:
            # More time is for answers only: a connection that does not stand is reported after the configured time.
            endpoint = await self.pick(min(deadline_s, began_s + self._timeout_s))
            remaining_s = max(deadline_s - _now_s(), LONGEST_PAUSE_S)
            sent = False
            try:
                metadata = await self.metadata(endpoint)
                sent, sent_s = True, _now_s()
                self._time.asked(sent_s)
                answer = await attempt(endpoint, remaining_s / max(tries, 1), metadata)
                endpoint.answered_s = _now_s()
                self._time.answered(endpoint.answered_s - sent_s)
                if not self.is_foreign(endpoint, answer):
                    return answer
                if _now_s() >= deadline_s:
                    raise self.unavailable(f"{endpoint.address}: {FOREIGN}")
            except grpc.aio.AioRpcError as error:
                failure = verdict(error)
                if failure is not EtcdFailure.UNKNOWN:
                    endpoint.answered_s = _now_s()
                    self._time.refused()
                if failure in _DEFINITE and await self._says_nothing_of_ours(endpoint):
                    if _now_s() >= deadline_s:
                        raise self.unavailable(f"{endpoint.address}: {FOREIGN}") from error
                    await asyncio.sleep(LONGEST_PAUSE_S)
                    continue
                if failure is EtcdFailure.STALE_LOGIN and self._user and logins < 2:
                    self._login_token = None
                    logins += 1
                    continue
                self.leave(endpoint, silent=error.code() is grpc.StatusCode.DEADLINE_EXCEEDED)
                again = failure is EtcdFailure.NOT_DONE or (failure is EtcdFailure.UNKNOWN and (repeatable or not sent))
                if not again or _now_s() >= deadline_s:
                    raise self.explained(endpoint, error) from error
            tries -= 1
            await asyncio.sleep(LONGEST_PAUSE_S)

    async def hedged(self, attempt: Attempt) -> Any:
        """Carry out one urgent call that is harmless to repeat: while it has no answer, it is sent again, and the first
        answer counts. A member that was just passing it on to a leader that has died is silent until its time limit;
        the same call that comes after the election is answered at once. Raises ``StoreError`` like ``call``."""
        if len(self.addresses) == 1:
            return await self.call(attempt, repeatable=True)
        asked: list[tuple[Endpoint, float]] = []

        def first(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Awaitable[Any]:
            asked.append((endpoint, _now_s()))
            return attempt(endpoint, timeout_s, metadata)

        calls: list[asyncio.Future[Any]] = []
        limit_s = self.limit_s
        pause_s = URGENT_AFTER * limit_s
        try:
            while True:
                sent = self.call(attempt if calls else first, repeatable=True, patient=True)
                calls.append(asyncio.ensure_future(sent))
                done, _ = await asyncio.wait(calls, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                if done:  # else: a call ends without an answer only at its time limit, the first one before the others
                    answer = next((one for one in done if one.exception() is None), min(done, key=calls.index)).result()
                    if not calls[0].done() and asked:
                        self._judge_silence(*asked[-1], URGENT_AFTER * limit_s)
                    return answer
                pause_s = URGENT_PAUSE * limit_s
                if self._endpoints:
                    self.leave(self._endpoints[self._current], silent=False)
        finally:
            for one in calls:
                one.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _judge_silence(self, endpoint: Endpoint, since_s: float, late_s: float) -> None:
        """Another call has been answered before the one that this member got at ``since_s``: is it silent, after at
        least ``late_s``? Its streams must not wait for what gRPC's pings take to notice that its host has lost power.
        """
        if endpoint.answered_s < since_s <= _now_s() - late_s:
            self.leave(endpoint, silent=True)

    async def metadata(self, endpoint: Endpoint) -> Metadata:
        """Metadata for a call: it requires a leader, and carries the login token if there is a user."""
        if self._user is None:
            return NEEDS_LEADER
        if self._login_token is None:
            self._login_token = await self._log_in(endpoint, self._user)
        if not self._login_token:
            return NEEDS_LEADER
        return (*NEEDS_LEADER, ("token", self._login_token))

    async def _log_in(self, endpoint: Endpoint, user: str) -> str:
        request = rpc_pb2.AuthenticateRequest(name=user, password=self._password or "")
        try:
            answer = await endpoint.auth.Authenticate(request, timeout=self.limit_s, metadata=NEEDS_LEADER)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                return ""  # authentication is disabled in etcd: no token is needed
            raise
        return str(answer.token)

    def forget_login(self) -> None:
        """Log in again before the next call."""
        self._login_token = None

    def explained(self, endpoint: Endpoint, error: grpc.aio.AioRpcError) -> StoreError:
        """Translate a failed call into an error of ``edl.errors``."""
        detail = error.details() or error.code().name
        failure = verdict(error)
        if failure in (EtcdFailure.REFUSED, EtcdFailure.STALE_LOGIN):
            who = f"user {self._user!r}" if self._user else "a client without a user name"
            advice = "Check the user name and password given for the store, and the user's permissions in etcd"
            return StoreRefused(f"etcd at {endpoint.address} refuses {who}: {detail}. {advice}")
        if failure is EtcdFailure.FULL:
            return StoreFull(f"no room left in etcd at {endpoint.address}: {detail}. {ROOM}")
        if failure is EtcdFailure.LEASE_GONE:
            return LeaseLost(f"etcd at {endpoint.address} does not know the lease (any more): {detail}")
        if failure is EtcdFailure.WRONG:
            stranger = ". The server there is not etcd: check --rdzv-endpoint" if "http2 header" in detail else ""
            return StoreError(f"etcd at {endpoint.address} does not accept this call: {detail}{stranger}")
        if endpoint.foreign:  # it is not the slowness of this call that has to be mended
            return self.unavailable(f"{endpoint.address}: {FOREIGN}")
        slow = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return self.unavailable(f"{endpoint.address}: {detail}", SLOW if slow else CHECK)

    def unavailable(self, detail: str, advice: str = CHECK) -> StoreUnavailable:
        """The error for "no answer", with gRPC's details."""
        if "no leader" in detail:  # this member runs, but has lost the others
            advice = "More than half of its members must run: start the missing ones"
        return StoreUnavailable(f"no answer from etcd at {self.names} within {self.limit_s:.2g} s ({detail}). {advice}")

    async def _unreachable(self) -> StoreError:
        """The error that says why no connection is up. gRPC reports the reason only for a call, so a harmless one is
        made."""
        endpoint = self._endpoints[self._current]
        try:
            await endpoint.kv.Range(rpc_pb2.RangeRequest(key=b"\0"), timeout=EXPLANATION_S)
        except grpc.aio.AioRpcError as error:
            detail = error.details() or error.code().name
            if "SSL_ERROR_SSL" in detail or "CERTIFICATE_VERIFY_FAILED" in detail:
                if self._stood:  # a certificate has expired meanwhile: no reason to stop running jobs
                    return self.unavailable(f"{endpoint.address}: {detail}", CERTIFICATES)
                advice = "Check the CA file, the client certificate, and whether etcd speaks TLS on this port"
                return StoreRefused(f"no TLS connection with etcd at {endpoint.address}: {detail}. {advice}")
            if self._tls is not None and "Handshake read failed" in detail:
                return self.unavailable(f"{endpoint.address}: {detail}", NO_TLS)
            return self.unavailable(f"{endpoint.address}: {detail}")
        return self.unavailable(f"{endpoint.address}: connected only just now")

    async def close(self) -> None:
        """End streams and close the channels; calls in progress get the time limit to finish."""
        if self.closed.is_set():
            return
        self.closed.set()
        opened = [*self._endpoints, *self._replaced]
        for endpoint in opened:
            endpoint.end_streams()
        await asyncio.gather(*(endpoint.channel.close(grace=self._timeout_s) for endpoint in opened))
