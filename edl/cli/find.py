"""From what a person typed to the Master of a job."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_cluster import refuse_other_secret
from edl.adapters.etcd_plan import is_socket, split_endpoint
from edl.adapters.etcd_rpc import EtcdTls
from edl.adapters.host_notes import HostNote, notes
from edl.adapters.identity import Identity, identity_of, secret_at
from edl.adapters.secret_file import secret_from
from edl.adapters.transport import MasterClient
from edl.errors import SettingError, StoreUnavailable, UsageError
from edl.master.election import Ruler
from edl.ports import Store
from edl.types import JobId, NodeId
from edl.wire import plain
from edl.wire.address import address
from edl.wire.keys import JobKeys
from edl.wire.messages import Finish
from edl.wire.secret import Secret, described, own_words, token_of

SHOWN_NODES = 8
"""Of a longer list, in a message."""


@dataclass(frozen=True, slots=True)
class Where:
    """Which job, and where its store is; empty fields are found out from the launchers of this host."""

    job: str = ""
    endpoints: tuple[str, ...] = ()
    tls: EtcdTls | None = None
    user: str | None = None
    password: str | None = None
    secret_file: str = ""
    secret: str = ""
    """The secret itself."""


class NoMaster(UsageError):
    """The job exists but nobody rules it at this moment, or it has ended."""

    def __init__(self, message: str, outcome: Finish | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class NoAnswer(StoreUnavailable):
    """The Master that the store names does not answer."""


class JobClient(MasterClient):
    """Asks the Master of a job, and knows how it was found."""

    def __init__(self, job: JobId, ruler: Ruler, token: str, identity: Identity | None = None) -> None:
        super().__init__(ruler.host, ruler.port, token, identity=identity)
        self.node = ruler.node
        self.place = address(ruler.host, ruler.port)
        self.door = ""
        """Who else can reach the job, in one line."""
        self.job = job
        self.token = token
        """The job's own."""
        self.http = ruler.http
        """Address of the Master's HTTP side; empty: it has none."""


@contextlib.asynccontextmanager
async def master_of(where: Where) -> AsyncIterator[JobClient]:
    """A client to the job's Master. Raises ``UsageError`` with what to do when there is none."""
    note = HostNote(JobId(where.job), NodeId(""), where.endpoints) if where.endpoints else _job_here(where.job)
    file = where.secret_file or ("" if where.secret else note.secret_file)
    secret, _ = secret_from(file, where.secret, note.job)
    identity = identity_of(secret) if secret is not None else None
    tls = where.tls or await _proof(note.endpoints, identity)
    store = EtcdStore(note.endpoints, tls=tls, user=where.user, password=where.password)
    try:
        job = JobId(note.job or await _only_job(store))
        client = await _client(store, JobKeys(job), secret, identity)
        client.door = door_of(note.endpoints, secret, own=tls is None or tls is not identity)
    except StoreUnavailable:
        if tls is None:
            await refuse_other_secret(note.endpoints, None)
        raise
    finally:
        await store.close()
    try:
        yield client
    except grpc.aio.AioRpcError as error:
        raise NoAnswer(_silence(client, error)) from error
    finally:
        await client.close()


def _who_elects(values: Mapping[str, bytes], keys: JobKeys) -> str:
    """What to expect, and what to do if it does not come."""
    nodes = sorted(key[len(keys.nodes) :] for key in values if key.startswith(keys.nodes))
    if not nodes:
        return "None of its launchers is registered: they have ended, or are cut off from this store. Start them again"
    some = ", ".join(nodes[:SHOWN_NODES]) + (", …" if len(nodes) > SHOWN_NODES else "")
    return (
        f"Its launchers ({some}) elect one, which takes about a second. If it stays so, one of their outputs says why: "
        "the store may be full"
    )


def _silence(client: JobClient, error: grpc.aio.AioRpcError) -> str:
    """A Master that has gone, one that is frozen, and one that knows somebody else's secret."""
    code, where = error.code(), f"the Master of job {client.job} on node {client.node} ({client.place})"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{where} does not know this token: the job has been started anew. Try again"
    if code is grpc.StatusCode.UNAVAILABLE and "refused" in (error.details() or ""):
        return f"{where} has gone; another launcher takes over within a lease. Try again"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return (
            f"{where} does not answer: its host or its launcher is frozen, overloaded or cut off. When its lease ends "
            f"another launcher takes over. Try again in some seconds ({code.name.lower()}: {error.details()})"
        )
    return f"{where} refuses: {code.name.lower()}: {error.details()}"


def door_of(endpoints: Sequence[str], secret: Secret | None, *, own: bool) -> str:
    """Whether the job is open to its network. ``secret``: the job's, which is known to be the right one. ``own``: its
    store is an etcd that asks for something else than the secret, or for nothing."""
    listed = ", ".join(endpoints)
    if endpoints and all(is_socket(one) for one in endpoints):
        return "closed: its store is on a private socket, which only its user reaches"
    if secret is not None:
        rest = f", but the etcd at {listed} has rules of its own" if own else ""
        return f"closed: only who holds its secret (fingerprint {secret.fingerprint}) reaches it{rest}"
    return f"open: whoever may read its store at {listed} can do everything; --secret-file closes it (docs/security.md)"


async def _proof(endpoints: Sequence[str], identity: Identity | None) -> Identity | None:
    """``identity``, where the members of the store ask for one; an etcd that belongs to no job does not."""
    for endpoint in endpoints if identity is not None else ():
        if not is_socket(endpoint) and await secret_at(*split_endpoint(endpoint)) is not None:
            await refuse_other_secret([endpoint], identity)
            return identity
    return None


def _job_here(job: str) -> HostNote:
    """A note of the job that has a launcher on this host."""
    here: dict[str, HostNote] = {note.job: note for note in notes()}
    wanted = [name for name in here if job in ("", name)]
    if len(wanted) == 1:
        return here[wanted[0]]
    if not here:
        advice = "Name the store of one that runs elsewhere: --rdzv-endpoint=HOST:PORT"
        raise UsageError(f"no launcher runs on this host. {advice}. Of a job that has ended its log folder is left")
    listed = ", ".join(sorted(here))
    if wanted:
        raise SettingError("--rdzv-id", "''", f"jobs on this host: {listed}", "Name one with --rdzv-id")
    raise SettingError("--rdzv-id", job, f"not on this host, where there is {listed}", "Add --rdzv-endpoint=HOST:PORT")


async def _only_job(store: Store) -> str:
    keys = (entry.key.split("/") for entry in (await store.read("/edl/")).entries)
    names = sorted({parts[2] for parts in keys if parts[3] == "nodes"})  # others are remains of killed jobs
    if len(names) == 1:
        return names[0]
    listed = ", ".join(names) if names else "none"
    raise SettingError("--rdzv-id", "''", f"jobs in this store: {listed}", "Name one with --rdzv-id")


async def _client(store: Store, keys: JobKeys, secret: Secret | None, identity: Identity | None) -> JobClient:
    values = {entry.key: entry.value for entry in (await store.read(keys.prefix)).entries}
    if keys.master in values and keys.token in values:
        ruler = plain.loads(Ruler, values[keys.master])
        token = token_of(values[keys.token], secret, keys.job)
        if token is None:
            what = f"job {keys.job} has {described(values[keys.token])}, and this command has {own_words(secret)}"
            raise SettingError("--secret-file", "''", what, "Give the job's --secret-file, or EDL_SECRET")
        return JobClient(keys.job, ruler, token, identity)
    for entry in (entry for entry in (await store.read(keys.farewell)).entries if entry.key == keys.farewell):
        outcome = plain.loads(Finish, entry.value)
        raise NoMaster(f"job {keys.job} has ended with exit code {outcome.exit_code}: {outcome.reason}", outcome)
    if values:
        raise NoMaster(f"job {keys.job} has no Master at this moment. {_who_elects(values, keys)}")
    raise NoMaster(f"no job {keys.job} in this store. Check --rdzv-id and --rdzv-endpoint")
