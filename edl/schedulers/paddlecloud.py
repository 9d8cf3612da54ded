"""PaddleCloud: the number of nodes is a key in etcd, ``/paddle/<PADDLE_ELASTIC_JOB_ID>/np``.

PaddleCloud's controller writes ``spec.worker.replicas`` to that key on each change, but only if the key exists; so edl
creates it at the start. With ``--scale-owner=master`` the Master writes the key, and with ``paddlejob=NAME`` in
``--scheduler-conf`` it also changes that PaddleJob, which creates the pods. A value that is not a number of nodes is
logged and ignored.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from edl.config import environment
from edl.errors import SchedulerError, SettingError, StoreError, StoreRefused, StoreUnavailable
from edl.job_records import SchedulerChoice
from edl.ports import Change, ChangeKind, CreatedAt, KeyValue, ModifiedAt, Put, Store
from edl.schedulers.deps import SchedulerDeps
from edl.schedulers.port import Disruption, Observation, Scheduler, SchedulerSize, Sized
from edl.tasks import end

T = TypeVar("T")

SERVER = "PADDLE_ELASTIC_SERVER"
JOB_ID = "PADDLE_ELASTIC_JOB_ID"
NODES = "PADDLE_ELASTIC_NP"
MOST_NODES = 1_000_000
SHOWN = 40
"""Limit on the length of a value, and of its quotation in a message, in characters."""
RETRY_S = 1.0
"""Pause in seconds before a watch is started again after it has ended or failed."""
REFUSED_S = 60.0
"""The same after a refusal to watch the pods, which an operator may have ended by then."""
TRIES = 5
"""Number of attempts to write the key while others write it as well."""
_OURS = ("server", "paddlejob")
"""Keys of ``--scheduler-conf`` that are not passed on to the PaddleJob's adapter."""


def check(wanted: SchedulerChoice) -> None:
    """Check the addresses and settings. Raises ``SettingError``."""
    _endpoints(wanted.conf, environment())
    inner = _paddlejob(wanted)
    if inner is not None:
        from edl.schedulers import kubernetes

        kubernetes.check(inner)
    elif rest := [key for key in wanted.conf if key not in _OURS]:
        raise SettingError(
            "--scheduler-conf", rest[0], "has no effect without paddlejob=NAME", "Add it, or remove this key"
        )


def make(deps: SchedulerDeps) -> PaddleCloud:
    """Create the adapter for one Master's term."""
    environment = deps.environment
    inner, endpoints = _paddlejob(deps.wanted), _endpoints(deps.wanted.conf, environment)
    pods: Scheduler | None = None
    if inner is not None:
        from edl.schedulers import kubernetes

        pods = kubernetes.make(dataclasses.replace(deps, wanted=inner))
    first = read_nodes(environment.get(NODES, "")) or deps.nodes.maximum
    store = deps.open_store(endpoints) if endpoints else deps.store
    key = key_of(environment.get(JOB_ID, "") or deps.job)
    return PaddleCloud(store, key, first, deps.log, pods, mine=bool(endpoints))


def key_of(job: str) -> str:
    """The etcd key that holds the number of a job's nodes."""
    return f"/paddle/{job}/np"


def read_nodes(text: str) -> int:
    """Parse a number of nodes; 0: the text is not one."""
    bare = text.strip()
    number = int(bare) if re.fullmatch(r"[0-9]{1,7}", bare) else 0
    return number if number <= MOST_NODES else 0


def _paddlejob(wanted: SchedulerChoice) -> SchedulerChoice | None:
    """The settings of the adapter for the PaddleJob that creates the pods; None: no PaddleJob is named."""
    name = wanted.conf.get("paddlejob", "")
    conf = {key: value for key, value in wanted.conf.items() if key not in _OURS}
    return SchedulerChoice("paddlejob", name, conf, wanted.owner) if name else None


def _endpoints(conf: Mapping[str, str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Addresses of PaddleCloud's etcd; empty: the job's own store. Raises ``SettingError``."""
    name = "--scheduler-conf server" if "server" in conf else SERVER
    text = conf.get("server", "") or environment.get(SERVER, "")
    # A comma would end the value in --scheduler-conf, so a semicolon is accepted as well.
    parts = [part.strip().rstrip("/") for part in re.split("[,;]", text)]
    found = []
    for part in filter(None, parts):
        bare = re.sub(r"^(etcds?|https?)://", "", part)
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})", bare)
        if match is None or not 0 < int(match[2]) < 65536:
            raise SettingError(name, text, f"{part!r} is not an address", "Write HOST:PORT, such as etcd:2379")
        found.append(bare)
    return tuple(found)


class PaddleCloud:
    """Implements ``port.Scheduler`` with a key in etcd."""

    ask_none_at_end = False

    def __init__(
        self, store: Store, key: str, first: int, log: Callable[[str], None], pods: Scheduler | None, *, mine: bool
    ) -> None:
        """``first``: the number to write if the key does not exist. ``pods``: the adapter of the PaddleJob; None:
        others create the pods. ``mine``: whether to close the store at the end."""
        self._store = store
        self._key = key
        self._nodes = first
        self._invalid = ""
        """The value in the key, quoted, if it is not a number of nodes."""
        self._log = log
        self._pods = pods
        self._mine = mine
        self.indexed = pods is not None
        """A PaddleJob's controller removes the pods with the highest indexes. Without one any node may leave."""
        self.name = f"PaddleCloud ({key})"

    async def current(self) -> SchedulerSize:
        """The number in the key; creates the key if it does not exist. Raises ``SchedulerError``."""
        entry = await self._reached(self._entry())
        if entry is None:
            await self._reached(self._store.write([Put(self._key, b"%d" % self._nodes)], [CreatedAt(self._key, 0)]))
            entry = await self._reached(self._entry())
        if entry is not None:
            self._read(entry.value)
        detail = f"the key holds {self._invalid}, which is not a number of nodes" if self._invalid else ""
        return SchedulerSize(self._nodes, detail=detail)

    async def request(self, nodes: int, reason: str) -> None:
        """Raise the number in the key, and first that of the PaddleJob, if one is configured. Raises
        ``SchedulerError``."""
        if self._pods is not None:
            await self._pods.request(nodes, reason)
        await self._write(nodes, max)

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Lower the number in the key, and first that of the PaddleJob, if one is configured. Raises
        ``SchedulerError``."""
        if self._pods is not None:
            await self._pods.release(names, nodes, reason)
        if nodes:  # in PaddleCloud a job has at least one node
            await self._write(nodes, min)

    async def watch(self) -> AsyncIterator[Observation]:
        """Yields numbers that others write to the key, and, with a PaddleJob, pods that will be removed. Raises
        ``SchedulerError``."""
        found: asyncio.Queue[Observation | SchedulerError] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._watch_key(found))]
        if self._pods is not None:
            tasks.append(asyncio.ensure_future(_watch_pods(self._pods, found, self._log)))
        for task in tasks:
            task.add_done_callback(lambda ended: _report_end(ended, found))
        try:
            while True:
                observation = await found.get()
                if isinstance(observation, SchedulerError):
                    raise observation
                yield observation
        finally:
            for task in tasks:
                await end(task)

    async def close(self) -> None:
        """Close connections; the key stays."""
        if self._pods is not None:
            await self._pods.close()
        if self._mine:
            await self._store.close()

    # --- the key -----------------------------------------------------------------------------------------------------

    async def _write(self, wanted: int, choose: Callable[[int, int], int]) -> None:
        """Write the number to the key. ``choose``: max or min of the number there and the wanted one, so that a request
        never lowers it and a release never raises it. Raises ``SchedulerError``."""
        for _ in range(TRIES):
            entry = await self._reached(self._entry())
            there = read_nodes(entry.value.decode(errors="replace")) if entry is not None else 0
            nodes = choose(there, wanted) if there else wanted
            if nodes == there:
                break
            condition = ModifiedAt(self._key, entry.mod_revision if entry is not None else 0)
            if await self._reached(self._store.write([Put(self._key, b"%d" % nodes)], [condition])) is not None:
                break
        else:
            raise SchedulerError(f"{self.name}: others are writing the key at the same time", retry=True)
        self._nodes, self._invalid = nodes, ""

    async def _watch_key(self, found: asyncio.Queue[Observation | SchedulerError]) -> None:
        while True:
            try:
                found.put_nowait(Sized(await self.current()))
                snapshot = await self._store.read(self._key)
                reported = self._nodes
                for entry in snapshot.entries:
                    reported = self._report(Change(ChangeKind.PUT, entry), reported, found)
                async for change in self._store.watch(self._key, snapshot.revision):
                    reported = self._report(change, reported, found)
                    if change.kind is ChangeKind.DELETE and change.entry.key == self._key:
                        self._log(f"{self.name}: the key has been deleted; writing it again with {self._nodes}")
                        await self.current()
            except SchedulerError as error:
                if not error.retry:
                    found.put_nowait(error)
                    return
            except StoreRefused as error:
                found.put_nowait(SchedulerError(f"{self.name}: {error}", retry=False))
                return
            except StoreError:
                pass  # read again, because changes may have been missed
            await asyncio.sleep(RETRY_S)

    def _report(self, change: Change, reported: int, found: asyncio.Queue[Observation | SchedulerError]) -> int:
        """Report a changed number. ``reported``: the last reported number; returns the new one."""
        if change.entry.key == self._key and change.kind is ChangeKind.PUT and self._read(change.entry.value):
            if self._nodes != reported:
                found.put_nowait(Sized(SchedulerSize(self._nodes)))
            return self._nodes
        return reported

    def _read(self, value: bytes) -> bool:
        """Take over the value of the key; returns whether it is a number of nodes. If not, the previous number stays
        valid, and the value is logged once."""
        nodes = read_nodes(value[:SHOWN].decode(errors="replace")) if len(value) <= SHOWN else 0
        invalid = "" if nodes else repr(value[:SHOWN].decode(errors="replace"))
        if invalid and invalid != self._invalid:
            self._log(f"{self.name} holds {invalid}, which is not a number of nodes; keeping {self._nodes}")
        self._invalid = invalid
        self._nodes = nodes or self._nodes
        return bool(nodes)

    async def _entry(self) -> KeyValue | None:
        snapshot = await self._store.read(self._key)
        return next((entry for entry in snapshot.entries if entry.key == self._key), None)

    async def _reached(self, work: Awaitable[T]) -> T:
        """Await a call to the store. Raises its errors as ``SchedulerError``."""
        try:
            return await work
        except StoreUnavailable as error:
            raise SchedulerError(f"{self.name}: {error}", retry=True) from error
        except StoreError as error:
            raise SchedulerError(f"{self.name}: {error}", retry=not isinstance(error, StoreRefused)) from error


def _report_end(ended: asyncio.Future[None], found: asyncio.Queue[Observation | SchedulerError]) -> None:
    """Report that a task has ended with an unexpected exception, so that the reader does not wait forever."""
    error = None if ended.cancelled() else ended.exception()
    if error is not None:
        found.put_nowait(SchedulerError(f"the watch has ended: {error!r}", retry=True))


async def _watch_pods(
    pods: Scheduler, found: asyncio.Queue[Observation | SchedulerError], log: Callable[[str], None]
) -> None:
    """Report pods that will be removed, but no sizes, which come from the key."""
    said = ""
    while True:
        pause_s = RETRY_S
        try:
            async for observation in pods.watch():
                if isinstance(observation, Disruption):
                    found.put_nowait(observation)
        except SchedulerError as error:
            pause_s = RETRY_S if error.retry else REFUSED_S
            if not error.retry and str(error) != said:
                said = str(error)
                log(f"{said} (retrying every {pause_s:g} s; notices of pods that will be removed come later)")
        await asyncio.sleep(pause_s)
