"""The main path of a launcher, once ``__main__`` and ``cli`` have made its settings. With ``store_opening`` and
``node_checkpoints`` it chooses the adapters.

A launcher

1. begins to warm its fork server, the process that will fork the workers (``ForkServerProcesses``);
2. connects to the job's store, starting an embedded etcd member first if it should run one (``store_opening.py``);
3. agrees with the other launchers on the job's settings and takes a name under a lease (``Registration``);
4. runs for election (``Candidate``); the winner runs the Master (``MasterShell`` around the pure
   ``edl.master.machine``);
5. runs its agent (``AgentShell`` around the pure ``edl.agent.machine``), which attaches to the Master, reports that it
   is ready, and starts and stops workers as the Master orders;
6. ends when the agent does, and cleans up (``Launcher._say_farewell``).

``_launch`` does 1 to 3; ``_put_together`` builds what 4 to 6 need, ``wire`` (``wiring.py``) connects it, and
``Launcher.run`` (``launcher.py``) runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from data_service.leases.machine import LeaseMachine
from edl.adapters.clock import SystemClock, wall_clock_s
from edl.adapters.garbage import collect_rarely
from edl.adapters.knocking import answers
from edl.adapters.local_jobs import LocalJob
from edl.adapters.processes import ForkServerProcesses
from edl.adapters.remote_files import open_files
from edl.adapters.run_states import run_states
from edl.adapters.system_threads import SYSTEM_THREADS
from edl.adapters.transport import Connection, MasterServer, refuses
from edl.agent.deps import AgentDeps
from edl.agent.health_probe import HealthProbe, ProbeSettings
from edl.agent.machine.events import AlarmsChanged
from edl.agent.machine.state import AgentState
from edl.agent.shell import AgentShell
from edl.agent.switches import Switches
from edl.agent.worker_server import WorkerServer
from edl.agent.workers.environment import WorkerGroupDeps, fork_server_environment
from edl.agent.workers.outputs import claim
from edl.agent.workers.ports import PortReservation
from edl.agent.workers.workers import WorkerGroup
from edl.checkpoint.manager import CheckpointManager
from edl.config import JobSpec, LogPlan, changed, environment
from edl.errors import EdlError
from edl.launch import denylist_companion, log_options, pservers, readers, scaling, watching
from edl.launch.accelerators import paddle_devices, slot_identities, visible_devices
from edl.launch.addresses import etcd_leases, identity_for, only_here, reachable_address
from edl.launch.console import console, listen_to_modules
from edl.launch.descriptors import for_peers, take_all
from edl.launch.disk_watch import DiskWatch, directories_of
from edl.launch.hang_sources import LocalHangSources
from edl.launch.helpers import HelperDeps, HelperKind, HelperProcesses
from edl.launch.launcher import Launcher, LauncherDeps, Sidecar, ended_before
from edl.launch.lease_guard import LeaseGuard
from edl.launch.leave_signals import cancelled_by_signals
from edl.launch.node_answers import NodeAnswers
from edl.launch.node_checkpoints import CheckpointReports, open_checkpoints
from edl.launch.origin import origin_of
from edl.launch.preemption_notices import poller_of
from edl.launch.recorders import Recorders, recorders
from edl.launch.registration import JobEnded, Registration
from edl.launch.reporting import Reporter
from edl.launch.settings import LaunchSettings
from edl.launch.store_opening import OpenedStore, open_store, retried
from edl.launch.stored_runs import fingerprint
from edl.launch.temporary_files import temporary_files
from edl.launch.watchdog import LoopWatch
from edl.launch.wiring import Wired, wire
from edl.master.candidate import Candidate
from edl.master.election import MasterInfo
from edl.master.service import Service
from edl.master.shell import MasterDeps, MasterShell
from edl.ports import CommandKind, Files, HelperConnections, HelperListener
from edl.tasks import end
from edl.types import FencingToken, Incarnation, NodeId
from edl.watch import disks
from edl.wire.keys import JobKeys
from edl.wire.messages import Kept
from edl.wire.records import NodeInfo

if TYPE_CHECKING:
    from edl.launch.synced_dirs import SyncedDirs
    from edl.web.front import Web

# Modules that only some jobs need are imported where they are used, because most of a launcher's start is imports.

READERS_GRACE_S = 5.0
"""Seconds that readers may take to finish open streams when a launcher with workers ends."""
RETURN_S = 2.0
"""Seconds beyond a lease that the Master waits for the key of a pserver without which rows are lost."""


async def launch(settings: LaunchSettings) -> int:
    """Take part in the job that ``settings`` describe; returns the exit status. Raises ``EdlError``."""
    collect_rarely()
    log = console(settings.node.name)
    return await cancelled_by_signals(_launch(settings, log), log, settings.leave)


async def _launch(settings: LaunchSettings, log: Callable[[str], None]) -> int:
    files_before = take_all(settings, log)
    _check_packages(settings)
    files, switches = await _checkpoint_directory(settings, log)
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(listen_to_modules(log))
        cleanup.callback(LoopWatch(log).end)
        logs, report = claim(settings.logs), settings.report
        reporter = Reporter(settings.spec.job, settings.node.name, logs, report.error_file, log, report.file)
        cleanup.callback(reporter.close)  # registered early, so that it runs late
        for remark in (*settings.remarks, *log_options.remarks(logs)):
            log(remark)
        # The fork server's imports take longest, so they start first; the agent waits for them later.
        base = changed(environment(), settings.workers.variables)
        processes = _fork_server(settings, base, files_before, log)
        cleanup.push_async_callback(processes.close)
        warming = asyncio.ensure_future(processes.warm())
        cleanup.push_async_callback(end, warming)
        opened = await open_store(settings, cleanup, log)
        deps = _NodeDeps(opened, _registration(settings, opened, log), files, switches, reporter, logs, base)
        deps.web = _web(settings, deps, log)
        if deps.web is not None:
            cleanup.push_async_callback(deps.web.leave)
        try:
            await _join(settings, deps, cleanup, log)
        except JobEnded as error:
            return ended_before(error, log, worker_status=report.worker_status)
        deps.recorders = recorders(settings, deps.registration.run, log)
        cleanup.push_async_callback(deps.recorders.end)
        cleanup.push_async_callback(deps.server.stop)
        for helpers in _helpers(settings, deps, log):
            deps.sidecars.append(helpers)
            cleanup.push_async_callback(helpers.leave)
        return await _put_together(settings, deps, processes, warming, log).run()


def _check_packages(settings: LaunchSettings) -> None:
    """Check that the packages that the job's helpers need are installed. Raises ``SettingError``."""
    readers.check_packages(settings.readers.count)
    if settings.spec.servers:
        pservers.check_packages()


async def _checkpoint_directory(
    settings: LaunchSettings, log: Callable[[str], None]
) -> tuple[Files | None, Switches | None]:
    """The checkpoint directory and its switch files; None without one. Raises ``Killed`` while it holds
    ``KILL``, and ``CheckpointError`` if it cannot be read."""
    if not settings.state.checkpoint_dir:
        return None, None
    files = open_files(settings.state.checkpoint_dir)
    switches = Switches(files, log)
    await asyncio.to_thread(switches.refuse_if_killed)
    return files, switches


def _registration(settings: LaunchSettings, opened: OpenedStore, log: Callable[[str], None]) -> Registration:
    name, workers = settings.node.name, settings.workers
    return Registration(
        *(opened.store, JobKeys(settings.spec.job), settings.spec, name, refuses, answers, log),
        secret=settings.store.secret,
        origin=origin_of(workers.command, name, workers.python),
        allowed=settings.allowed,
    )


def _shares_cores(settings: LaunchSettings) -> bool:
    return settings.workers.command.kind is not CommandKind.CALL


def _fork_server(
    settings: LaunchSettings, base: Mapping[str, str], files: tuple[int, int], log: Callable[[str], None]
) -> ForkServerProcesses:
    """The fork server. ``base``: the workers' environment. ``files``: their limits (soft, hard) on open files."""
    workers = settings.workers
    variables = fork_server_environment(base, settings.slots, share_cores=_shares_cores(settings))
    return ForkServerProcesses(
        *(workers.command, workers.standby, settings.slots, variables, workers.preload, log),
        python=workers.python or sys.executable,
        answer_s=settings.spec.timeouts.spawn_s,
        files=files,
        learn_bytes=workers.learn_bytes if workers.learn else 0,
    )


@dataclass(slots=True)
class _NodeDeps:
    """What this launcher uses to take part in the job; filled in as the launcher starts."""

    opened: OpenedStore
    registration: Registration
    files: Files | None
    """The checkpoint directory."""
    switches: Switches | None
    """The switch files in the checkpoint directory (``SAVE``, ``KILL``); None without a directory."""
    reporter: Reporter
    logs: LogPlan
    """Where the output of workers goes; includes the folder of this launch."""
    base: Mapping[str, str]
    """The environment variables that all workers of this node share."""
    sidecars: list[Sidecar] = field(default_factory=list)
    """The processes of this launcher that are not workers."""
    web: Web | None = None
    """The HTTP server; None without ``--http-port``."""
    server: MasterServer = field(init=False)
    info: NodeInfo = field(init=False)
    checkpoint_manager: CheckpointManager = field(init=False)
    reports: CheckpointReports = field(default_factory=CheckpointReports)
    synced: SyncedDirs | None = None
    """The synchronised directories; None without ``--sync-dir``."""
    recorders: Recorders = field(default_factory=Recorders)
    """What records the steps of the Master."""


async def _join(
    settings: LaunchSettings, deps: _NodeDeps, cleanup: contextlib.AsyncExitStack, log: Callable[[str], None]
) -> None:
    """Agree on the job's settings, start listening, and register under a name. Raises ``JobEnded`` if this node's
    previous launcher belonged to a job that has just ended."""
    registration = deps.registration
    await retried(registration.agree, settings)
    if deps.opened.member is not None:
        deps.opened.member.note_run(fingerprint(registration.run))
    deps.synced = await _synced_dirs(settings, deps, cleanup, log)
    source = deps.synced.sync if deps.synced is not None else None
    memory, deps.checkpoint_manager = await open_checkpoints(
        settings, deps.files, lambda: registration.token, registration.run, deps.reports, log, source
    )
    cleanup.push_async_callback(memory.close)
    lease_ttl_s, identity = settings.spec.timeouts.lease_ttl_s, identity_for(settings.store)
    deps.server = MasterServer(lambda: registration.token, lease_ttl_s, identity, for_peers(settings))
    host = reachable_address(settings.node.local_addr, deps.opened.endpoints, settings.spec.nodes.maximum, log)
    port = await deps.server.start(host)
    if trouble := only_here(host, deps.opened.endpoints):
        log(trouble)
    try:
        if deps.web is not None:
            deps.web.listen(host)
        info = NodeInfo(
            settings.node.name,
            Incarnation(0),
            host,
            port,
            settings.slots,
            settings.node.rank,
            state_port=memory.start(host),
            rack=settings.node.rack,
            index=settings.node.index,
            members=deps.opened.members,
            spare_slots=settings.spare_slots,
            devices=slot_identities(visible_devices(), settings.slots + settings.spare_slots),
            role=settings.workers.role,
            host_id=settings.node.host_id,
        )
        deps.info = await retried(lambda: registration.join(info), settings)
    except EdlError:
        await deps.server.stop()
        raise
    if deps.synced is not None:
        deps.synced.begin(deps.opened.store, JobKeys(settings.spec.job))
        deps.sidecars.append(deps.synced)


async def _synced_dirs(
    settings: LaunchSettings, deps: _NodeDeps, cleanup: contextlib.AsyncExitStack, log: Callable[[str], None]
) -> SyncedDirs | None:
    """The synchronised directories; None without ``--sync-dir``. Raises ``CheckpointError``."""
    if not settings.sync.roots:
        return None
    from edl.launch.synced_dirs import SyncedDirs

    synced = SyncedDirs(settings.sync, settings.node.name, secrets.token_hex(8), lambda: deps.registration.token, log)
    cleanup.callback(synced.sync.close)
    await synced.open()
    return synced


def _web(settings: LaunchSettings, deps: _NodeDeps, log: Callable[[str], None]) -> Web | None:
    """The HTTP server, not listening yet; None without ``--http-port``."""
    if settings.http is None:
        return None
    from edl.web.front import Web, WebDeps

    return Web(WebDeps(settings.spec.job, settings.http, lambda: deps.registration.token, log, SystemClock().now_s))


def _helpers(settings: LaunchSettings, deps: _NodeDeps, log: Callable[[str], None]) -> Iterator[HelperProcesses]:
    """The helper processes that run beside the workers, one group for each kind."""
    kinds: list[HelperKind] = []
    spec, folder = settings.spec, settings.state.checkpoint_dir
    if settings.readers.count:
        # They end after the workers, so a short grace period is enough.
        authority = readers.authority_of(settings.store.secret, spec.job)
        kinds.append(readers.ReaderHelpers(settings.readers, READERS_GRACE_S, authority))
    if settings.servers.count:
        kinds.append(
            pservers.Pservers(
                *(settings.servers, spec.job, pservers.secret_of(deps.registration.token)),
                checkpoint_dir=folder,
                shutdown_s=spec.timeouts.shutdown_s,
                lease_s=spec.timeouts.lease_ttl_s,
                log_folder=deps.logs.links,
            )
        )
    own = settings.node.name, deps.info.host
    for kind in kinds:
        yield HelperProcesses(
            HelperDeps(deps.opened.store, JobKeys(spec.job), spec.timeouts.lease_ttl_s, *own, log), kind
        )


def _put_together(
    settings: LaunchSettings,
    deps: _NodeDeps,
    processes: ForkServerProcesses,
    warming: asyncio.Future[str],
    log: Callable[[str], None],
) -> Launcher:
    """Build the candidate, the agent and the launcher; only callbacks connect them."""
    spec, clock, info, store = settings.spec, SystemClock(), deps.info, deps.opened.store
    authority = readers.authority_of(settings.store.secret, spec.job)
    note = LocalJob(spec.job, info.node, deps.opened.endpoints, secret_file=settings.store.secret_file)
    candidate, agent, launcher = wire(
        MasterDeps(
            store=store,
            clock=clock,
            keys=JobKeys(spec.job),
            spec=watching.judged_by(spec, settings.limits),
            node=info.node,
            refuses=refuses,
            log=log,
            wall_clock_s=wall_clock_s,
            checkpoint_dir=settings.state.checkpoint_dir,
            services=_services(spec, authority, deps.registration.token),
            helper_connections=_helper_connections(spec, info.node, log),
            companions=_companions(settings, deps, log),
            written=deps.recorders.written,
        ),
        MasterInfo(info.node, info.host, info.port, deps.web.url if deps.web is not None else ""),
        elected=lambda shell: _elected(deps, shell),
        make_agent=lambda candidate, register: _agent(settings, deps, candidate, processes, warming, register, log),
        make_deps=lambda candidate, agent: LauncherDeps(
            job=spec.job,
            clock=clock,
            store=store,
            member=deps.opened.member,
            server=deps.server,
            registration=deps.registration,
            candidate=candidate,
            agent=agent,
            info=info,
            local_job=note,
            log=log,
            reporter=deps.reporter,
            sidecars=deps.sidecars,
            leave=settings.leave,
            temporary=_temporary(settings, deps, note),
            notices=poller_of(settings.leave.notice, log),
            worker_status=settings.report.worker_status,
            guard=lambda renewed: LeaseGuard(
                spec.timeouts.lease_ttl_s,
                etcd_leases(settings.store, deps.opened.endpoints, spec.timeouts.lease_ttl_s),
                processes.entitle_aside,
                renewed,
                log,
            ),
            kill_workers=processes.kill,
        ),
    )
    _begin_sidecars(settings, deps, Wired(candidate, agent, launcher))
    return launcher


def _drain(sidecars: Iterable[Sidecar]) -> None:
    for one in sidecars:
        one.drain()


def _temporary(settings: LaunchSettings, deps: _NodeDeps, note: LocalJob) -> tuple[Path, ...]:
    """What must outlive programs that clean up temporary folders."""
    others = note.path, scaling.nodes_folder(settings.spec.job)
    return temporary_files(settings.workers.command, deps.opened.member, deps.logs.folder, others)


def _begin_sidecars(settings: LaunchSettings, deps: _NodeDeps, wired: Wired) -> None:
    reports, agent = deps.reports, wired.agent
    reports.kept, reports.room, reports.copied = agent.kept, agent.room, agent.copied
    _begin_disk_watch(settings, deps, agent)
    _begin_web(settings, deps, wired)


def _companions(settings: LaunchSettings, deps: _NodeDeps, log: Callable[[str], None]) -> scaling.Companions:
    """What runs beside the Master: the scheduler's reconciler, watchdogs and notifications, the denylist, and what ends
    the live status."""
    store, run = deps.opened.store, deps.registration.run
    parts = (
        scaling.companions(settings, store, deps.opened.endpoints, log),
        watching.companions(settings, run, log),
        denylist_companion.companions(settings, store, run, log),
        lambda master: (deps.web.see_off(master),) if deps.web is not None else (),
    )
    return lambda master: tuple(work for part in parts for work in part(master))


def _begin_disk_watch(settings: LaunchSettings, deps: _NodeDeps, agent: AgentShell) -> None:
    """Watch this launcher's directories, and report to the Master through the agent."""
    directories = directories_of(settings, deps.logs.folder)
    if not directories or not any(settings.limits.on(name) for name in disks.NAMES):
        agent.post(AlarmsChanged(()))  # alarms that all nodes share end when all nodes have said that they have none
        return
    watch = DiskWatch(
        *(directories, settings.limits, deps.info.node, SystemClock(), SYSTEM_THREADS),
        changed=lambda alarms: agent.post(AlarmsChanged(alarms)),
    )

    def kept(message: Kept) -> None:
        watch.kept(message)
        agent.kept(message)

    deps.reports.kept = kept
    watch.begin()
    deps.sidecars.append(watch)


def _begin_web(settings: LaunchSettings, deps: _NodeDeps, wired: Wired) -> None:
    if deps.web is None:
        return
    from edl.launch.node_facts import NodeObserver
    from edl.launch.node_output import NodeOutput

    observer = NodeObserver(
        wired,
        deps.checkpoint_manager,
        {"checkpoints": settings.state.checkpoint_dir, "logs": deps.logs.folder},
        settings.spec.timeouts.lease_ttl_s,
    )
    keys, identity = JobKeys(settings.spec.job), identity_for(settings.store)
    output = NodeOutput(deps.opened.store, keys, lambda: deps.registration.token, identity)
    candidate = wired.candidate
    deps.web.begin(lambda: candidate.master.http if candidate.master is not None else None, observer.look, output)
    deps.sidecars.append(deps.web)


def _elected(deps: _NodeDeps, shell: MasterShell | None) -> None:
    """Called when this launcher becomes the Master (``shell``), or stops being the Master (None)."""
    deps.server.serve(shell)
    if deps.web is not None:
        deps.web.use_master(shell)


def _services(spec: JobSpec, readers_authority: str, token: str) -> Callable[[], tuple[Service, ...]]:
    """The factory of the services that the Master hosts. Their modules are imported now: a Master that has just been
    elected must not block its event loop by imports, which on a busy host take longer than its lease."""
    servers = spec.servers
    if not servers:
        return lambda: (LeaseMachine(readers_authority),)
    from ps.coordinator.machine import PlacementMachine
    from ps.coordinator.state import CoordinatorLimits

    times, secret = spec.timeouts, pservers.secret_of(token)
    limits = CoordinatorLimits(recover_s=times.recover_s, returns_s=times.lease_ttl_s + RETURN_S)
    return lambda: (LeaseMachine(readers_authority), PlacementMachine(servers, limits=limits, secret=secret))


def _helper_connections(
    spec: JobSpec, node: NodeId, log: Callable[[str], None]
) -> Callable[[FencingToken, HelperListener], HelperConnections] | None:
    """The factory of the Master's connections to pservers; None for a job without pservers."""
    if not spec.servers:
        return None
    from ps.net import master_connections  # imported late: it needs packages that other jobs do without

    deps = master_connections.MasterConnectionsDeps(spec.timeouts.lease_ttl_s, log, name=node)
    return lambda token, listener: master_connections.PserverConnections(deps, token, listener)


def _health_probe(
    settings: LaunchSettings, deps: _NodeDeps, processes: ForkServerProcesses, base: Mapping[str, str]
) -> HealthProbe:
    """The probe of this node for health checks. ``base``: the workers' environment."""
    slots, token = settings.slots + settings.spare_slots, deps.registration.token
    return HealthProbe(
        processes,
        ProbeSettings(
            deps.info.node,
            slots,
            fork_server_environment(base, settings.slots),
            lambda number: hashlib.sha256(f"health check {number} {token}".encode()).hexdigest(),
            settings.health_probes,
        ),
    )


def _group_deps(settings: LaunchSettings) -> WorkerGroupDeps:
    kind, count = paddle_devices()
    return WorkerGroupDeps(
        gpus=count,
        checkpoint_dir=settings.state.checkpoint_dir,
        slots=settings.slots + settings.spare_slots,
        devices=visible_devices(),
        paddle=kind,
        virtual=settings.workers.virtual_local_rank,
        signals=settings.leave.handled,
        cores=settings.workers.cores,
        scripts=settings.workers.scripts,
        share_cores=_shares_cores(settings),
    )


def _agent(
    settings: LaunchSettings,
    deps: _NodeDeps,
    candidate: Candidate,
    processes: ForkServerProcesses,
    warming: asyncio.Future[str],
    register: Callable[[], Awaitable[NodeInfo]],
    log: Callable[[str], None],
) -> AgentShell:
    spec, clock, node, registration = settings.spec, SystemClock(), deps.info.node, deps.registration
    base = {**deps.base, **pservers.environment_of(settings.servers)}
    workers = WorkerGroup(processes, spec, node, base, deps.logs, _group_deps(settings), log, wall_clock_s)
    deps.server.serve_node(NodeAnswers(workers, settings.options))
    return AgentShell(
        AgentDeps(
            clock=clock,
            processes=processes,
            warming=warming,
            workers=workers,
            worker_server=lambda heard, relay: WorkerServer(workers.place, deps.checkpoint_manager, heard, relay, log),
            ports=PortReservation(),
            checkpoints=deps.checkpoint_manager,
            secret=lambda number: hashlib.sha256(f"round {number} {registration.token}".encode()).hexdigest(),
            connect=lambda host, port: Connection(
                host, port, registration.token, spec.timeouts.lease_ttl_s, identity_for(settings.store)
            ),
            refuses=refuses,
            register=register,
            master_refused=candidate.master_refused,
            log=log,
            hangs=lambda address: LocalHangSources(workers, address, clock.now_s, deps.info.devices),
            run_states=run_states,
            switches=deps.switches,
            save_timeout_s=settings.state.save_timeout_s,
            synced=deps.synced,
            health=_health_probe(settings, deps, processes, base).probe,
            leaves=lambda: _drain(deps.sidecars),
        ),
        AgentState(
            deps.info,
            spec.timeouts,
            contact_s=clock.now_s(),
            independent=spec.independent,
            drained_exit_code=settings.leave.exit_code,
            by_device=bool(visible_devices()) and not settings.workers.virtual_local_rank,
        ),
    )
