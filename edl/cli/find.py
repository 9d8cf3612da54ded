"""From what a person typed to the Master of a job."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_rpc import EtcdTls
from edl.adapters.host_notes import notes
from edl.adapters.transport import MasterClient
from edl.errors import SettingError, UsageError
from edl.master.election import Ruler
from edl.ports import Store
from edl.types import JobId
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import Finish


@dataclass(frozen=True, slots=True)
class Where:
    """Which job, and where its store is; empty fields are found out from the launchers of this host."""

    job: str = ""
    endpoints: tuple[str, ...] = ()
    tls: EtcdTls | None = None
    user: str | None = None
    password: str | None = None


class NoMaster(UsageError):
    """The job exists but nobody rules it at this moment, or it has ended."""

    def __init__(self, message: str, outcome: Finish | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class JobClient(MasterClient):
    """Asks the Master of a job, and knows how it was found."""

    def __init__(self, job: JobId, ruler: Ruler, token: str) -> None:
        super().__init__(ruler.host, ruler.port, token)
        self.job = job
        self.token = token
        """The job's own."""
        self.http = ruler.http
        """Address of the Master's HTTP side; empty: it has none."""


@contextlib.asynccontextmanager
async def master_of(where: Where) -> AsyncIterator[JobClient]:
    """A client to the job's Master. Raises ``UsageError`` with what to do when there is none."""
    endpoints, named = (where.endpoints, where.job) if where.endpoints else _job_here(where.job)
    store = EtcdStore(endpoints, tls=where.tls, user=where.user, password=where.password)
    try:
        job = JobId(named or await _only_job(store))
        client = await _client(store, JobKeys(job))
    finally:
        await store.close()
    try:
        yield client
    finally:
        await client.close()


def _job_here(job: str) -> tuple[tuple[str, ...], str]:
    """Store and name of the job that has a launcher on this host."""
    here = {note.job: note.endpoints for note in notes()}
    wanted = [name for name in here if job in ("", name)]
    if len(wanted) == 1:
        return here[wanted[0]], wanted[0]
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


async def _client(store: Store, keys: JobKeys) -> JobClient:
    values = {entry.key: entry.value for entry in (await store.read(keys.prefix)).entries}
    if keys.master in values and keys.token in values:
        ruler = plain.loads(Ruler, values[keys.master])
        return JobClient(keys.job, ruler, values[keys.token].decode())
    for entry in (entry for entry in (await store.read(keys.farewell)).entries if entry.key == keys.farewell):
        outcome = plain.loads(Finish, entry.value)
        raise NoMaster(f"job {keys.job} has ended with exit code {outcome.exit_code}: {outcome.reason}", outcome)
    if values:
        raise NoMaster(f"job {keys.job} has no Master at this moment; its launchers elect one. Try again in a second")
    raise NoMaster(f"no job {keys.job} in this store. Check --rdzv-id and --rdzv-endpoint")
