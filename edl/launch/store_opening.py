"""Opens the job's store: connects to etcd, and runs this launcher's member of an embedded store."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from edl.adapters.clock import SystemClock
from edl.adapters.etcd_cluster import (
    hosts_without_address,
    refuse_other_secret,
    start_local_member,
    start_private_member,
)
from edl.adapters.etcd_disk import roomy_parent
from edl.adapters.etcd_server import EtcdMember
from edl.adapters.leftovers import disown, own, sweep
from edl.adapters.runtime_folder import runtime_folder, socket_folder
from edl.errors import SettingError, StoreRefused, StoreUnavailable
from edl.launch.addresses import etcd_store, seen_at, store_identity
from edl.launch.settings import Backend, LaunchSettings, StoreSettings
from edl.launch.stored_runs import stored_run
from edl.ports import Store
from edl.types import JobId
from edl.wire.keys import JobKeys

T = TypeVar("T")

STORE_RETRY_S = 0.1
"""Pause in seconds before the store is tried again."""
RUN_S = 5.0
"""Time limit in seconds for asking the other members of the store for the job's run: they may be electing a leader."""
FOUNDING_S = 2.0
"""Seconds in which launchers whose store has just begun found the job."""
NAMES_RETRY_S = 1.0
"""Least time in seconds between two lookups of store hosts whose names do not resolve yet."""


class OpenedStore(NamedTuple):
    """The job's store, as this launcher reaches it."""

    store: Store
    member: EtcdMember | None
    """This launcher's member of an embedded store; None if it runs none."""
    endpoints: tuple[str, ...]
    members: int
    """Number of members of the embedded store if one of them runs here; otherwise 0."""


async def open_store(
    settings: LaunchSettings, cleanup: contextlib.AsyncExitStack, log: Callable[[str], None]
) -> OpenedStore:
    """Connect to etcd; first start this launcher's member if the store is embedded. ``cleanup`` stops the member and
    closes the connection. Raises ``StoreUnavailable`` or ``StoreRefused``."""
    wanted = settings.store
    endpoints, member, serve = wanted.endpoints, None, _serve_nothing
    if wanted.backend is Backend.EMBEDDED:
        folder = data_folder(wanted, settings.spec.job)
        if not wanted.data_dir:
            cleanup.callback(_remove_if_empty, folder)
        serve = functools.partial(_serve, settings, folder, cleanup, log)
        member = await serve()
        if member is not None and not endpoints:
            endpoints = (member.endpoint,)
    store = etcd_store(wanted, endpoints)
    cleanup.push_async_callback(store.close)
    if member is not None:
        store.expect(await member.cluster_id())
    member = await _reach(store, settings, endpoints, member, serve, log)
    members = len(wanted.endpoints or endpoints) if member is not None else 0
    return OpenedStore(store, member, endpoints, members)


async def _serve_nothing() -> EtcdMember | None:
    return None


async def _serve(
    settings: LaunchSettings, folder: Path, cleanup: contextlib.AsyncExitStack, log: Callable[[str], None]
) -> EtcdMember | None:
    """Start this launcher's member of the embedded store; None if it should not run one."""
    wanted = settings.store
    if wanted.endpoints:
        member = await start_local_member(
            *(wanted.endpoints, folder),
            token=settings.spec.job,
            identity=store_identity(wanted),
            run_at=functools.partial(_run_at, settings),
            seen_at=seen_at(settings.node.local_addr, settings.spec.nodes.maximum),
            log=log,
        )
    else:
        for parent in {runtime_folder(), folder.parent}:
            for left in await asyncio.to_thread(sweep, parent):
                log(f"removed {left}: its launcher is gone")
        if folder.parent != runtime_folder() and not wanted.data_dir:
            log(f"{tempfile.gettempdir()} has no room for the store; using {folder}")
        sockets = socket_folder()
        own(sockets)
        cleanup.callback(shutil.rmtree, sockets, ignore_errors=True)
        member = await start_private_member(folder, sockets, token=settings.spec.job)
    if member is not None:
        if not (wanted.endpoints or wanted.data_dir):
            cleanup.callback(member.discard)  # a private store is useless without its launcher
        # Enough to transfer etcd's leadership to another member; without a majority waiting longer does not help.
        cleanup.push_async_callback(member.stop, 1.0)
        opened = wanted.endpoints and wanted.secret is None
        advice = (
            ", open to anyone who can reach its ports; use --secret-file to close it (docs/security.md)"
            if opened
            else ""
        )
        log(f"serving the store at {member.endpoint} (embedded etcd){advice}")
        for text in filter(None, (even_members(len(wanted.endpoints)), member.flaw)):
            log(text)
    return member


async def _run_at(settings: LaunchSettings, endpoints: Sequence[str]) -> str:
    """The fingerprint of the job's run in the store at these endpoints; empty: it has none, even after a moment in
    which other launchers may found one. Raises ``StoreError``."""
    clock = SystemClock()
    deadline_s = clock.now_s() + FOUNDING_S
    store = etcd_store(dataclasses.replace(settings.store, request_timeout_s=RUN_S), endpoints)
    try:
        while True:
            found = await stored_run(store, settings.store.secret, settings.spec.job)
            if found or clock.now_s() >= deadline_s:
                return found
            await asyncio.sleep(STORE_RETRY_S)
    finally:
        await store.close()


def even_members(count: int) -> str:
    """What an even number of store members means for the job, for the log; empty if it is odd, or 0."""
    if not count or count % 2:
        return ""
    need = count // 2 + 1
    lost, fewer = count - need, count - 1
    survives = (
        f"survives the loss of {lost} of their hosts, as with {fewer}" if lost else "survives the loss of neither host"
    )
    return (
        f"--rdzv-endpoint lists {count} store members, of which {need} must run: the job {survives}. List {fewer} or "
        f"{count + 1}"
    )


def data_folder(wanted: StoreSettings, job: JobId) -> Path:
    """Create the data folder of this launcher's member of an embedded store; returns its path.

    A private store gets a new folder, because several jobs of the same name may run on one host, each with its own
    private store.
    """
    if not (wanted.data_dir or wanted.endpoints):
        private = Path(tempfile.mkdtemp(prefix=f"{job}-", dir=runtime_folder(roomy_parent())))
        own(private)
        return private
    folder = Path(wanted.data_dir) if wanted.data_dir else runtime_folder() / job
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot create it: {error.strerror}"
        raise SettingError("--rdzv-conf data_dir", folder, what, "Name a folder that can be written to") from error
    return folder


def _remove_if_empty(folder: Path) -> None:
    disown(folder)
    with contextlib.suppress(OSError):  # other members on this host may have their data there
        folder.rmdir()


async def _reach(
    store: Store,
    settings: LaunchSettings,
    endpoints: tuple[str, ...],
    member: EtcdMember | None,
    serve: Callable[[], Awaitable[EtcdMember | None]],
    log: Callable[[str], None],
) -> EtcdMember | None:
    """Wait for the store's first answer; start this launcher's member as soon as possible.

    A host in the endpoints of an embedded store whose name does not resolve yet may be this host: as soon as the name
    resolves to it, ``serve`` starts the member. Returns the member that runs here. Raises ``StoreUnavailable`` or
    ``StoreRefused``.
    """
    clock = SystemClock()
    timeout_s = _timeout_s(settings)
    embedded = settings.store.backend is Backend.EMBEDDED and bool(settings.store.endpoints)
    deadline_s, said, look_s = clock.now_s() + timeout_s, False, clock.now_s()
    nameless = endpoints if embedded and member is None else ()
    while True:
        try:
            await store.read(JobKeys(settings.spec.job).master)
            return member
        except StoreRefused:
            if embedded:
                await refuse_other_secret(endpoints, store_identity(settings.store))
            raise
        except StoreUnavailable as error:
            if embedded and member is None:
                await refuse_other_secret(endpoints, store_identity(settings.store))
            if member is None and nameless and clock.now_s() >= look_s:
                nameless, look_s = await hosts_without_address(endpoints), clock.now_s() + NAMES_RETRY_S
                member = await serve()
            unknown = f" (no address yet for {', '.join(nameless)})" if nameless and member is None else ""
            if clock.now_s() >= deadline_s:
                raise StoreUnavailable(f"gave up after {timeout_s:g} s{unknown}: {error}") from error
            if not said and clock.now_s() > deadline_s - timeout_s + 3:
                said = True
                log(f"waiting for the store at {', '.join(endpoints)}{unknown}{_needed(endpoints) if embedded else ''}")
        await asyncio.sleep(STORE_RETRY_S)
        if member is not None and not member.running:
            raise member.failure()


def _needed(endpoints: Sequence[str]) -> str:
    """What has to run for an embedded store to answer."""
    if len(endpoints) == 1:
        return ": a launcher must run there"
    return f": launchers must run at {len(endpoints) // 2 + 1} of these {len(endpoints)} addresses"


async def retried(action: Callable[[], Awaitable[T]], settings: LaunchSettings) -> T:
    """Repeat an idempotent action until the store answers. Raises ``StoreUnavailable`` after the time limit of a
    start."""
    clock = SystemClock()
    deadline_s = clock.now_s() + _timeout_s(settings)
    while True:
        try:
            return await action()
        except StoreUnavailable:
            if clock.now_s() >= deadline_s:
                raise
        await asyncio.sleep(STORE_RETRY_S)


def _timeout_s(settings: LaunchSettings) -> float:
    """How long the store may be unavailable at the start, in seconds. Launchers that run the store themselves wait for
    one another."""
    if settings.store.backend is Backend.EMBEDDED and settings.store.endpoints:
        return max(settings.store.connect_timeout_s, settings.spec.timeouts.recover_s)
    return settings.store.connect_timeout_s
