"""Selects the embedded etcd member that this launcher runs, and joins it to its cluster.

All launchers of a job have the same list of endpoints. Each starts the first member whose host is this host and whose
port is free, at most one; the other launchers only connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edl.adapters.claims import claim
from edl.adapters.clock import SystemClock
from edl.adapters.etcd_plan import MemberPlan, SocketPlan, is_socket, plan_members, split_endpoint
from edl.adapters.etcd_rpc import Connections, Endpoint, Metadata, rpc_pb2
from edl.adapters.etcd_server import POLL_S, PROBE_S, EtcdMember
from edl.adapters.identity import Identity, secret_at
from edl.adapters.knocking import is_loopback, means_loopback, own_address_towards
from edl.adapters.leftovers import boot_id
from edl.adapters.runtime_folder import runtime_folder
from edl.errors import PortInUse, SettingError, StoreError, StoreUnavailable
from edl.wire.address import address

IDENTIFY_S = 2.0
"""Seconds for finding out whether a program that answers on a taken port is etcd after all."""

SILENT_S = 30.0
"""Seconds for the first answer of the program on a taken port: an etcd that is starting on a busy host needs many."""

CLAIM_S = 10.0
"""Seconds to wait for another launcher that is starting the same member, before the next one is tried."""

READY_S = 60.0
"""Seconds that a new member may take until it is ready. One whose process ends is not waited for."""

_now_s = SystemClock().now_s

RunAt = Callable[[Sequence[str]], Awaitable[str]]
"""Reads the fingerprint of the job's run from the store at some endpoints; empty: the store has no run of the job.
Raises ``StoreError``, also when these members have no majority."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The member that a launcher is to run, besides its address."""

    folder: Path
    token: str
    timeout_s: float
    run_at: RunAt | None
    log: Callable[[str], None]


async def start_private_member(
    folder: Path,
    sockets: Path,
    *,
    token: str = "edl",  # noqa: S107 -- a name, not a secret
) -> EtcdMember:
    """Start a private store for one launcher; returns when it is ready. ``sockets``: the folder for its unix sockets.
    Raises ``StoreError``."""
    member = EtcdMember(SocketPlan(sockets), folder, token=token)
    member.start()
    try:
        await member.wait_ready(READY_S)
    except (StoreError, asyncio.CancelledError):
        await member.stop(0)
        raise
    return member


async def start_local_member(
    endpoints: Sequence[str],
    folder: Path,
    *,
    token: str = "edl",  # noqa: S107 -- a name, not a secret
    timeout_s: float = READY_S,
    identity: Identity | None = None,
    run_at: RunAt | None = None,
    seen_at: str = "",
    log: Callable[[str], None] = lambda text: None,
) -> EtcdMember | None:
    """Start this launcher's member; None if no endpoint is for this host, so that the launcher only connects.
    ``run_at``: by which data of an earlier run are recognised and deleted; None: all data are kept. ``seen_at``: the
    address at which other hosts see this one, in case its name is a loopback address here and no other member tells;
    empty: there are no others.

    Returns as soon as the member listens; it answers once more than half of the members are up (``wait_ready``). Raises
    ``PortInUse`` when a program other than etcd uses the port, ``StoreError`` when etcd does not start,
    ``StoreUnavailable`` when the member lost its data and cannot be replaced because too few others are up, and
    ``SettingError`` for invalid endpoints or when a member's secret is not that of ``identity``.
    """
    plans, wanted = plan_members(endpoints, identity), _Wanted(folder, token, timeout_s, run_at, log)
    for plan in plans:
        found = await _addresses_of(plan, plans, seen_at)
        if not found.own:
            continue
        async with _claim(plan) as claimed:
            member = await _start_unless_taken(plan, plans, found, wanted) if claimed else None
        if member is not None:
            return member
    return None


async def hosts_without_address(endpoints: Sequence[str]) -> tuple[str, ...]:
    """Hosts in the endpoints whose names do not resolve at the moment. A pod's name does not resolve before the pod is
    in the cluster's DNS, so such a host may turn out to be this one. Raises ``SettingError`` for invalid endpoints."""
    loop = asyncio.get_running_loop()

    async def known(host: str) -> bool:
        try:
            return bool(await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except OSError:
            return False

    hosts = list(dict.fromkeys(split_endpoint(endpoint)[0] for endpoint in endpoints if not is_socket(endpoint)))
    answers = await asyncio.gather(*map(known, hosts))
    return tuple(host for host, found in zip(hosts, answers, strict=True) if not found)


async def _start_unless_taken(
    plan: MemberPlan, plans: Sequence[MemberPlan], found: _Addresses, wanted: _Wanted
) -> EtcdMember | None:
    taken = [port for port in (plan.client_port, plan.peer_port) if any(not can_bind(ip, port) for ip in found.own)]
    if taken:
        program = await _program_at(plan)
        if program is _Program.ETCD:
            return None  # another launcher's member on this host
        await refuse_other_secret((plan.endpoint, address(plan.host, plan.peer_port)), plan.identity)
        uses = {
            _Program.OTHER: "a program other than etcd uses it. Stop",
            _Program.SILENT: f"the program that uses it has not answered for {SILENT_S:g} s. If it is etcd on a busy "
            "host, start this launcher again; otherwise stop",
        }
        raise PortInUse(
            f"port {taken[0]} on {plan.host} is needed for the embedded etcd member of {plan.endpoint}, but "
            f"{uses[program]} that program or choose other ports with --rdzv-endpoint"
        )
    await _refuse_name_of_several_hosts(plan, found.elsewhere, wanted.log)
    member = EtcdMember(plan, wanted.folder, listen=found.own, token=wanted.token)
    if wanted.run_at is not None and await _is_outdated(member, plan, plans, wanted.run_at):
        wanted.log(
            f"deleting {member.data_dir}: it is the store of an earlier run, and the other members have a new one"
        )
        member.discard()
    if member.has_data():
        _refuse_lost_majority(member, plans)
    try:
        if member.has_data() or plan.size == 1:
            member.start()
        else:
            await _join(member, plan, plans, wanted.timeout_s)
        await member.wait_listening(wanted.timeout_s)
    except asyncio.CancelledError:
        await member.stop(0)
        raise
    except StoreError:
        if not member.running and await _program_at(plan, 0.0) is _Program.ETCD:
            return None  # another launcher was faster
        await member.stop(0)
        raise
    return member


@contextlib.asynccontextmanager
async def _claim(plan: MemberPlan) -> AsyncIterator[bool]:
    """Keep this user's other launchers from starting the same member at the same time. Gives False if another one has
    been starting it for ``CLAIM_S``.

    Against launchers of other users, and where files cannot be locked, only etcd's own failure to bind the port
    protects.
    """
    lock = runtime_folder() / f"etcd-{plan.client_port}-{_network()}.lock"
    async with contextlib.AsyncExitStack() as held:
        claimed = True
        try:
            await held.enter_async_context(claim(lock, CLAIM_S))
        except TimeoutError:
            claimed = False
        except OSError:
            pass
        yield claimed


def _network() -> str:
    """Names this process's network namespace: containers and hosts may share the folder, but not the ports."""
    inode = 0
    with contextlib.suppress(OSError):
        inode = os.stat("/proc/self/ns/net").st_ino
    return f"{boot_id()[:8]}-{inode}"


def can_bind(address: str, port: int) -> bool:
    """Whether the address belongs to this host and the port is free; port 0 checks only the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:  # fails where the kernel has no IPv6, whatever names resolve to
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as etcd does: TIME_WAIT does not count
            probe.bind((address, port))
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Addresses:
    """The addresses that the host name of an endpoint resolves to."""

    own: tuple[str, ...] = ()
    """Those of this host, to listen on; empty: the name is another host's."""
    elsewhere: tuple[str, ...] = ()
    """The others, if this host has any of the same kind: those of other hosts, or of this one behind a NAT."""


async def _addresses_of(plan: MemberPlan, plans: Sequence[MemberPlan], seen_at: str = "") -> _Addresses:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(plan.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return _Addresses()
    resolved = list(dict.fromkeys(str(info[4][0]) for info in found))
    own = [address for address in resolved if can_bind(address, 0)]
    kinds = {_version(address) for address in own if not is_loopback(address)}
    elsewhere = [one for one in resolved if one not in own and not is_loopback(one) and _version(one) in kinds]
    if own and not means_loopback(plan.host) and all(map(is_loopback, own)):
        # Many an /etc/hosts maps the host's own name to 127.0.1.1, which is unreachable for others. Listen where they
        # see us.
        outward = filter(None, (*(_outward_address(other.host) for other in plans), seen_at))
        own += itertools.islice((address for address in outward if not is_loopback(address)), 1)
    return _Addresses(tuple(own), tuple(elsewhere))


async def _refuse_name_of_several_hosts(plan: MemberPlan, elsewhere: Sequence[str], log: Callable[[str], None]) -> None:
    """Raise ``SettingError`` if an etcd serves at another address of this endpoint's name, while the port is free here:
    there would be a store on each host of that name. Without one, the addresses may still be this host's."""
    versions = await asyncio.gather(*(_get_json(one, plan.peer_port, "/version", plan.identity) for one in elsewhere))
    serving = [one for one, found in zip(elsewhere, versions, strict=True) if isinstance(found, dict)]
    advice = "Name one host per store member, such as one pod of a headless service"
    if serving:
        what = f"{plan.host} is the name of several hosts, and {', '.join(serving)} serves a store already"
        raise SettingError("--rdzv-endpoint", plan.endpoint, what, advice)
    if elsewhere:
        log(
            f"--rdzv-endpoint={plan.endpoint}: {plan.host} also stands for {', '.join(elsewhere)}. If these are other "
            f"hosts, each of them would have a store of its own. {advice}"
        )


def _version(address: str) -> int:
    return ipaddress.ip_address(address.partition("%")[0]).version


def _outward_address(host: str) -> str | None:
    """This host's address as seen by ``host``; nothing is sent. None without a route."""
    try:
        return own_address_towards(host, 9)
    except OSError:
        return None


class _Program(enum.Enum):
    """What uses a port."""

    ETCD = enum.auto()
    OTHER = enum.auto()
    SILENT = enum.auto()
    """It accepts connections, or their packets are lost, and does not answer."""


async def _program_at(plan: MemberPlan, timeout_s: float = IDENTIFY_S) -> _Program:
    """What is on the member's ports. An etcd without a majority does not answer on the client port, so that one is only
    asked if nothing is on the peer port."""
    deadline_s = _now_s() + timeout_s
    while True:
        for port in (plan.peer_port, plan.client_port):
            try:
                version = await _fetch_json(plan.host, port, "/version", plan.identity, SILENT_S)
            except asyncio.TimeoutError:
                return _Program.SILENT
            except ConnectionRefusedError:
                continue
            except _NO_JSON:
                break
            if isinstance(version, dict) and "etcdserver" in version:
                return _Program.ETCD
            break
        if _now_s() >= deadline_s:
            return _Program.OTHER
        await asyncio.sleep(10 * POLL_S)


async def refuse_other_secret(endpoints: Sequence[str], identity: Identity | None) -> None:
    """Raise ``SettingError`` when a member's secret differs from ours, or only one side has a secret."""
    advice = "Give the job's own secret: a copy of its nodes' file (--secret-file=FILE), or EDL_SECRET"
    for host, port in (split_endpoint(endpoint) for endpoint in endpoints if not is_socket(endpoint)):
        theirs, ours = await secret_at(host, port), identity.fingerprint if identity is not None else None
        where = address(host, port)
        if theirs is not None and theirs != ours:
            mine = "none is given here" if ours is None else f"the one given here has {ours}"
            what = f"the job at {where} has a secret with the fingerprint {theirs}, and {mine}"
            raise SettingError("--secret-file", None, what, advice)
        if theirs is None and ours is not None and await _get_json(host, port, "/version", None):
            what = f"the job at {where} has no secret, but one is given here (fingerprint {ours})"
            raise SettingError("--secret-file", None, what, "Leave it out, or give one to all nodes of the job")


_NO_JSON = (OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError)
"""Errors of ``_fetch_json``."""


async def _get_json(host: str, port: int, path: str, identity: Identity | None) -> Any:
    """The JSON that a GET returns within ``PROBE_S``, or None for any other result."""
    try:
        return await _fetch_json(host, port, path, identity, PROBE_S)
    except _NO_JSON:
        return None


async def _fetch_json(host: str, port: int, path: str, identity: Identity | None, limit_s: float) -> Any:
    """The JSON that a GET returns; None for another status. etcd's own HTTP pages are small and plain. Raises what is
    in ``_NO_JSON``."""

    async def fetch() -> Any:
        context = identity.context() if identity is not None else None
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
            # Do not read until EOF: etcd's peer port often leaves the connection open, whatever the request.
            status, *fields = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            length = next((int(field[15:]) for field in fields if field.startswith(b"content-length:")), 0)
            return json.loads(await reader.readexactly(length)) if b" 200 " in status else None
        finally:
            writer.close()

    return await asyncio.wait_for(fetch(), limit_s)


@dataclass(frozen=True, slots=True)
class _Known:
    """A member as listed by the others."""

    id: int
    name: str
    """Empty when it was added later and has not run yet."""
    peer_url: str
    has_run: bool
    """Whether it was ever up together with a majority; only then are its client URLs known."""


async def _seen_by_others(plan: MemberPlan, plans: Sequence[MemberPlan]) -> dict[str, list[_Known]]:
    """The endpoints of the other members that answer, each with the members that it knows.

    The peer port is asked, since it answers at once, while a client call hangs until there is a majority.
    """
    others = [other for other in plans if other.endpoint != plan.endpoint]
    answers = await asyncio.gather(
        *(_get_json(other.host, other.peer_port, "/members", plan.identity) for other in others)
    )
    return {
        other.endpoint: _parse_members(answer)
        for other, answer in zip(others, answers, strict=True)
        if isinstance(answer, list)
    }


def _newest(seen: Mapping[str, list[_Known]]) -> list[_Known]:
    """The longest of the lists: a member that lags behind knows of fewer members. Empty if there is none."""
    return max(seen.values(), key=_count_that_ran, default=[])


def _count_that_ran(members: Sequence[_Known]) -> int:
    return sum(member.has_run for member in members)


def _parse_members(answer: Sequence[Mapping[str, Any]]) -> list[_Known]:
    return [
        _Known(
            id=int(item.get("id", 0)),
            name=str(item.get("name", "")),
            peer_url=str((item.get("peerURLs") or [""])[0]),
            has_run=bool(item.get("clientURLs")),
        )
        for item in answer
    ]


async def _is_outdated(member: EtcdMember, plan: MemberPlan, plans: Sequence[MemberPlan], run_at: RunAt) -> bool:
    """Whether this member's data are of another run than the store that the other members serve. They are left when a
    node has left a job that went on without it: the members that remained deleted theirs when the job ended.

    Such data must not be used: all runs of a job have the same cluster id, so the members would take the old log for
    one of their own. Deleting them loses nothing: the others are a majority, with which this member begins anew.
    """
    run = member.run_before() if member.has_data() else ""
    if not run or 2 * len(await _seen_by_others(plan, plans)) <= plan.size:
        return False
    try:
        stored = await run_at([other.endpoint for other in plans if other.endpoint != plan.endpoint])
    except StoreError:
        return False  # they have no majority without this member, whose data may be the newest
    return stored not in ("", run)  # without a run, the job has just ended there, or it is the store of another job


def _refuse_lost_majority(member: EtcdMember, plans: Sequence[MemberPlan]) -> None:
    """Raise ``SettingError`` if half or more of the members that this member's data knows are not in the endpoints. It
    would wait for a majority for ever."""
    listed = {other.peer_url.partition("://")[2] for other in plans}
    known = member.peers_before()
    missing = [one for one in known if one not in listed]
    if known and 2 * len(missing) >= len(known):
        raise SettingError(
            "--rdzv-endpoint",
            ",".join(other.endpoint for other in plans),
            f"the data in {member.data_dir} is that of a store with {len(known)} members, of which {len(missing)} are "
            f"not in this list (peer addresses: {', '.join(missing)}), so it would have no majority",
            "List its members again, take another --rdzv-id, or delete that folder to start with an empty store",
        )


async def _join(member: EtcdMember, plan: MemberPlan, plans: Sequence[MemberPlan], timeout_s: float) -> None:
    """Start a member that has no data: together with the others for the first time, or as a replacement.

    A cluster that has run before does not accept a member without its data, since that member may have voted for or
    acknowledged something that it has forgotten. So the old member is removed and a new one added.
    """
    others = [other.endpoint for other in plans if other.endpoint != plan.endpoint]
    deadline_s = _now_s() + timeout_s
    while True:
        seen = await _seen_by_others(plan, plans)
        known = _newest(seen)
        if not any(item.has_run for item in known):
            member.start()  # no member has ever been up: this is the first start
            return
        mine = next((item for item in known if item.peer_url == plan.peer_url), None)
        if mine is not None and not mine.has_run:
            names = {other.peer_url: other.name for other in plans}
            cluster = ",".join(f"{names.get(item.peer_url, item.name)}={item.peer_url}" for item in known)
            member.start(initial_cluster=cluster, existing=True)
            return
        try:
            await (_add(plan, others) if mine is None else _remove(mine, others, plan.identity))
        except StoreError as error:
            # Whatever the answer, the next look at the members shows the state. A refusal may also pass: a member's id
            # is derived from its address and the current second, so one removed in this second cannot be added again
            # yet.
            if _now_s() >= deadline_s:
                before = [other for other in plans if _count_that_ran(seen.get(other.endpoint, ()))]
                raise StoreUnavailable(_no_majority(member, before, error)) from error
        await asyncio.sleep(5 * POLL_S)


def _no_majority(member: EtcdMember, before: Sequence[MemberPlan], error: StoreError) -> str:
    """Why a member without data cannot join ``before``, members that have data: either its own are lost, or theirs are
    of an earlier run."""
    theirs = ", ".join(f"{other.endpoint} ({member.data_dir.parent / other.name})" for other in before)
    return (
        f"the etcd member {member.endpoint} has no data ({member.data_dir}), but these members have data of a store "
        f"that it took part in, each in the folder named here unless its data_dir differs: {theirs}. "
        "If the job goes on, this member can only be replaced while more than half of the members are up: start the "
        "other launchers first. If this is a new run, those data are of an earlier one: stop those launchers, delete "
        f"these folders on their hosts, and start all launchers again. {error}"
    )


async def _add(plan: MemberPlan, others: Sequence[str]) -> None:
    request = rpc_pb2.MemberAddRequest(peerURLs=[plan.peer_url])
    await _change_cluster(others, "MemberAdd", request, plan.identity)


async def _remove(known: _Known, others: Sequence[str], identity: Identity | None) -> None:
    await _change_cluster(others, "MemberRemove", rpc_pb2.MemberRemoveRequest(ID=known.id), identity)


async def _change_cluster(others: Sequence[str], method: str, request: Any, identity: Identity | None) -> None:
    connections = Connections(others, 2 * PROBE_S, identity)

    def attempt(endpoint: Endpoint, timeout_s: float, metadata: Metadata) -> Any:
        return getattr(endpoint.cluster, method)(request, timeout=timeout_s, metadata=metadata)

    try:
        await connections.call(attempt, repeatable=False)
    finally:
        await connections.close()
