"""Finds the Master of a job from command-line options."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import click
import grpc
import grpc.aio

from edl import __version__
from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_cluster import refuse_other_secret
from edl.adapters.etcd_plan import is_socket, split_endpoint
from edl.adapters.etcd_rpc import EtcdTls
from edl.adapters.identity import Identity, identity_of, secret_at
from edl.adapters.local_jobs import LocalJob, local_jobs
from edl.adapters.secret_file import secret_from
from edl.adapters.transport import MasterClient, NodeClient
from edl.errors import EdlError, SettingError, StoreUnavailable, UsageError
from edl.master.election import MasterInfo
from edl.ports import Store
from edl.types import JobId
from edl.wire import plain
from edl.wire.address import address
from edl.wire.keys import JobKeys
from edl.wire.messages import NOT_THE_MASTER, Finish
from edl.wire.records import NodeInfo
from edl.wire.release import founder_of, remark
from edl.wire.secret import Secret, described, described_own, token_of

SHOWN_NODES = 8
"""Nodes of a longer list that are shown in a message."""
LOOK_FAILURES: tuple[type[Exception], ...] = (EdlError, OSError, grpc.aio.AioRpcError)
"""What looking for a Master, or a call to it, may raise, after which a later attempt may succeed. ``OSError``: no file
descriptor is left, for example."""


@dataclass(frozen=True, slots=True)
class Where:
    """Which job, and where its store is; empty fields are looked up from the launchers of this host."""

    job: str = ""
    endpoints: tuple[str, ...] = ()
    tls: EtcdTls | None = None
    user: str | None = None
    password: str | None = None
    secret_file: str = ""
    secret: str = ""
    """The text of the secret itself."""
    quiet: bool = False
    """Whether to say nothing about a job of another version of edl."""


class NoMaster(UsageError):
    """The job exists but has no Master at the moment, or it has ended."""

    def __init__(self, message: str, outcome: Finish | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class NoAnswer(StoreUnavailable):
    """The Master named in the store does not answer."""


class JobClient(MasterClient):
    """Sends requests to the Master of a job, and knows how it was found."""

    def __init__(self, job: JobId, master: MasterInfo, token: str, identity: Identity | None = None) -> None:
        super().__init__(master.host, master.port, token, identity=identity)
        self.node = master.node
        self.place = address(master.host, master.port)
        self.door = ""
        """Who else can access the job, in one line."""
        self.job = job
        self.token = token
        """The job's own token."""
        self.http = master.http
        """Address of the Master's HTTP server; empty: it has none."""
        self.launchers: tuple[NodeInfo, ...] = ()
        """All registered nodes, with the addresses of their launchers."""
        self._identity = identity

    def launcher(self, info: NodeInfo) -> NodeClient:
        """A client of one node's launcher."""
        return NodeClient(info.host, info.port, self.token, identity=self._identity)


@contextlib.asynccontextmanager
async def master_of(where: Where) -> AsyncIterator[JobClient]:
    """A client of the job's Master. Raises ``UsageError`` with advice when there is none."""
    where = located(where)
    secret, _ = secret_from(where.secret_file, where.secret, where.job, create=False)
    identity = identity_of(secret) if secret is not None else None
    tls = where.tls or await _proof(where.endpoints, identity)
    store = EtcdStore(where.endpoints, tls=tls, user=where.user, password=where.password)
    try:
        job = JobId(where.job or await _only_job(store))
        client = await _client(store, JobKeys(job), secret, identity, _be_silent if where.quiet else _say_once)
        client.door = door_of(where.endpoints, secret, own=tls is None or tls is not identity)
    except StoreUnavailable:
        if tls is None:
            await refuse_other_secret(where.endpoints, None)
        raise
    finally:
        await store.close()
    try:
        yield client
    except grpc.aio.AioRpcError as error:
        raise NoAnswer(_silence(client, error)) from error
    finally:
        await client.close()


@functools.cache
def _say_once(text: str) -> None:
    """Print on stderr, once: some commands look at a job again and again."""
    click.echo(f"edl: {text}", err=True)


def _be_silent(text: str) -> None:
    """Print nothing."""


@contextlib.asynccontextmanager
async def store_of(where: Where) -> AsyncIterator[Store]:
    """The store itself, whatever jobs it has. Raises ``UsageError`` for a secret that cannot be read."""
    secret, _ = secret_from(where.secret_file, where.secret, where.job, create=False)
    tls = where.tls or await _proof(where.endpoints, identity_of(secret) if secret is not None else None)
    store = EtcdStore(where.endpoints, tls=tls, user=where.user, password=where.password)
    try:
        yield store
    finally:
        await store.close()


def located(where: Where) -> Where:
    """Fill in job, store and secret file from the launchers of this host, unless the store is given. A command that
    asks repeatedly does this once, so that it goes on when the launcher of this host has ended. Raises
    ``UsageError``."""
    if where.endpoints:
        return where
    note = _job_here(where.job)
    file = where.secret_file or ("" if where.secret else note.secret_file)
    return replace(where, job=note.job, endpoints=tuple(note.endpoints), secret_file=file)


def _who_elects(values: Mapping[str, bytes], keys: JobKeys) -> str:
    """Explains why there is no Master, and how to proceed if none is elected."""
    nodes = sorted(key[len(keys.nodes) :] for key in values if key.startswith(keys.nodes))
    if not nodes:
        return (
            "None of its launchers is registered: they have ended, or cannot reach this store. Those that still run "
            "register by themselves once they reach it; start the others again"
        )
    some = ", ".join(nodes[:SHOWN_NODES]) + (", …" if len(nodes) > SHOWN_NODES else "")
    return (
        f"Its launchers ({some}) are electing one, which takes about a second. If none appears, see their output: "
        "the store may be full"
    )


def _silence(client: JobClient, error: grpc.aio.AioRpcError) -> str:
    """Explain an error: a Master that has exited, one that has stepped down, one that is frozen, or one with a
    different secret."""
    code, where = error.code(), f"the Master of job {client.job} on node {client.node} ({client.place})"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{where} does not accept this token: the job has been restarted. Try again"
    if code is grpc.StatusCode.UNAVAILABLE and "refused" in (error.details() or ""):
        return f"{where} has exited; another launcher takes over when its lease expires. Try again"
    if code is grpc.StatusCode.UNAVAILABLE and NOT_THE_MASTER in (error.details() or ""):
        return (
            f"{where} has stepped down, or cannot take office because the store is slow or full. Another launcher may "
            "take over. Try again in a few seconds; if it lasts, see the logs of the launchers"
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return (
            f"{where} does not answer: its host or its launcher is frozen, overloaded or unreachable. Another launcher "
            f"takes over when its lease expires. Try again in a few seconds ({code.name.lower()}: {error.details()})"
        )
    return f"{where} refuses: {code.name.lower()}: {error.details()}"


def door_of(endpoints: Sequence[str], secret: Secret | None, *, own: bool) -> str:
    """Describe who can access the job. ``secret``: the job's, which is known to be correct. ``own``: the store is an
    etcd that requires credentials other than the secret, or none."""
    listed = ", ".join(endpoints)
    if endpoints and all(is_socket(one) for one in endpoints):
        return "closed: its store is on a private socket, which only its user can access"
    if secret is not None:
        rest = f", but the etcd at {listed} has its own access rules" if own else ""
        return f"closed: only holders of its secret (fingerprint {secret.fingerprint}) can access it{rest}"
    return f"open: anyone who can read its store at {listed} controls it; --secret-file closes it (docs/security.md)"


async def _proof(endpoints: Sequence[str], identity: Identity | None) -> Identity | None:
    """Return ``identity`` if the members of the store require one; an etcd that belongs to no job does not."""
    for endpoint in endpoints if identity is not None else ():
        if not is_socket(endpoint) and await secret_at(*split_endpoint(endpoint)) is not None:
            await refuse_other_secret([endpoint], identity)
            return identity
    return None


def _job_here(job: str) -> LocalJob:
    """The job of a launcher on this host. Raises ``UsageError`` when there is not exactly one job."""
    here: dict[str, LocalJob] = {local.job: local for local in local_jobs()}
    wanted = [name for name in here if job in ("", name)]
    if len(wanted) == 1:
        return here[wanted[0]]
    if not here:
        elsewhere = "For a job that runs elsewhere, name its store: --rdzv-endpoint=HOST:PORT"
        ended = "For one that has ended, see edl history and its log folder"
        raise UsageError(f"no launcher runs on this host, or it still waits for its store. {elsewhere}. {ended}")
    listed = ", ".join(sorted(here))
    if wanted:
        raise SettingError("--rdzv-id", "''", f"jobs on this host: {listed}", "Name one with --rdzv-id")
    raise SettingError("--rdzv-id", job, f"not on this host; jobs here: {listed}", "Add --rdzv-endpoint=HOST:PORT")


async def _only_job(store: Store) -> str:
    keys = (entry.key.split("/") for entry in (await store.read("/edl/")).entries)
    # Others are leftovers of killed jobs, or not of edl.
    names = sorted({parts[2] for parts in keys if parts[3:4] == ["nodes"]})
    if len(names) == 1:
        return names[0]
    listed = ", ".join(names) if names else "none"
    raise SettingError("--rdzv-id", "''", f"jobs in this store: {listed}", "Name one with --rdzv-id")


async def _client(
    store: Store,
    keys: JobKeys,
    secret: Secret | None,
    identity: Identity | None,
    say: Callable[[str], None] = _be_silent,
) -> JobClient:
    """``say``: called if the job runs a version of edl with which this one may misunderstand it."""
    values = {entry.key: entry.value for entry in (await store.read(keys.prefix)).entries}
    skew = remark(keys.job, __version__, founder_of(values.get(keys.origin, b"")))
    if skew:
        say(skew)
    if keys.master in values and keys.token in values:
        master = plain.loads(MasterInfo, values[keys.master])
        token = token_of(values[keys.token], secret, keys.job)
        if token is None:
            its, none = described(values[keys.token]), described(b"")
            what = f"job {keys.job} has {its}, and this command has {described_own(secret)}"
            advice = "Give the job's --secret-file, or EDL_SECRET"
            if its == none:
                advice = "Leave out --secret-file and EDL_SECRET"
            raise SettingError("--secret-file", None, what, advice)
        client = JobClient(keys.job, master, token, identity)
        registered = sorted(key for key in values if key.startswith(keys.nodes))
        client.launchers = tuple(plain.loads(NodeInfo, values[key]) for key in registered)
        return client
    for entry in (entry for entry in (await store.read(keys.farewell)).entries if entry.key == keys.farewell):
        outcome = plain.loads(Finish, entry.value)
        raise NoMaster(f"job {keys.job} has ended with exit code {outcome.exit_code}: {outcome.reason}", outcome)
    if values:
        raise NoMaster(f"job {keys.job} has no Master at this moment. {_who_elects(values, keys)}")
    raise NoMaster(f"no job {keys.job} in this store. Check --rdzv-id and --rdzv-endpoint")
