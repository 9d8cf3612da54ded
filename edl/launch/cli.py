"""The launcher's command line: turns resolved options into the settings of a launcher."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import click

from edl.config import (
    CREDENTIALS,
    AutoscaleRules,
    HyperPolicy,
    JobSpec,
    NodeRange,
    Replicas,
    SlotRules,
    Timeouts,
    VerifyRules,
    check_job_id,
    environment,
    parse_nnodes,
)
from edl.errors import SettingError
from edl.job_records import DataFiles, HealthRules, SchedulerChoice, StragglerRules
from edl.launch.data_option import data_sets, functions_from
from edl.launch.denylist_options import denylist_from, host_id_from
from edl.launch.effective_options import effective
from edl.launch.history_options import history_from
from edl.launch.http_options import http_from
from edl.launch.leave_options import leave_from
from edl.launch.log_options import log_plan, server_folder
from edl.launch.notify_options import notify_from
from edl.launch.options import OPTIONS, record, value
from edl.launch.otlp_options import otlp_from
from edl.launch.ps_options import sizes_with_servers, wants_servers
from edl.launch.replica_options import replicas_from
from edl.launch.resolved_options import ResolvedOptions
from edl.launch.scale_options import node_index, node_name, wanted_from
from edl.launch.script_check import worker_command
from edl.launch.script_servers import sizes_with_script_servers
from edl.launch.settings import (
    Backend,
    HelperSettings,
    Invocation,
    LaunchSettings,
    NodeSettings,
    PserverSettings,
    ReaderPool,
    ReaderSettings,
    ReportSettings,
    Sizes,
    StateSettings,
    StoreSettings,
)
from edl.launch.slot_options import slots_from, with_spares
from edl.launch.spelling import Spelling, one_spelling
from edl.launch.store_options import endpoints_from, job_and_store, store_from
from edl.launch.sync_options import sync_from
from edl.launch.torchrun_options import OWN_ROLES, workers_from
from edl.launch.torchrun_table import NAMES
from edl.types import JobId, NodeId

NO_SCRIPT = "Name the script that the workers run: edl-run --nproc-per-node=2 train.py"


def settings_of(
    resolved: ResolvedOptions, invocation: Invocation | None = None
) -> LaunchSettings | ReaderSettings | PserverSettings:
    """The settings of this launcher. Everything that can be checked before anything is started is checked here. Raises
    ``UsageError``."""
    options, role = resolved.values, resolved.values["role"]
    if role in ("reader", "pserver") and resolved.script:
        raise click.UsageError(f"--role={role} runs no script: drop {resolved.script}")
    if role == "reader":
        return reader_settings_from(options)
    sizes = _sizes(options)
    if role == "pserver" or (role not in OWN_ROLES and not sizes.slots):
        return pserver_settings_from(options, sizes)
    return _launch_settings(resolved, sizes, invocation or Invocation())


def _sizes(options: Mapping[str, Any]) -> Sizes:
    """The numbers of nodes, workers and pservers. Raises ``SettingError``."""
    sizes = sizes_with_script_servers(options)
    if sizes is None and wants_servers(options):
        sizes = sizes_with_servers(options)
    if sizes is None:
        nodes = parse_nnodes(options["nnodes"], options["node_unit"])
        sizes = Sizes(nodes, slots_from(options["nproc_per_node"]))
    return sizes


def _launch_settings(resolved: ResolvedOptions, sizes: Sizes, invocation: Invocation) -> LaunchSettings:
    options, env = resolved.values, environment()
    if invocation.report_file and options["scheduler"] == "process":
        what = "needs a command line to start more launchers with, and a job started from Python has none"
        raise SettingError("--scheduler", "process", what, "Start it with edl-run")
    if not resolved.script and invocation.command is None:
        raise click.MissingParameter(NO_SCRIPT, param_type="argument", param_hint="'SCRIPT'")
    here = with_spares(options, sizes.slots)
    replicas, sizes = replicas_from(options, sizes, here.workers)
    state, scheduler = record(StateSettings, options), wanted_from(options)
    job, store = job_and_store(options, sizes.nodes, state.checkpoint_dir)
    spec = _spec(options, job, sizes, here.workers, scheduler, replicas)
    node = _node(options, sizes.nodes, scheduler, env)
    http, leave, sync = http_from(options), leave_from(options), sync_from(options, spec)
    notify = notify_from(options, env)
    command = invocation.command or worker_command(
        options["module"], options["no_python"], resolved.script, resolved.arguments
    )
    workers = workers_from(
        *(options, command, here.workers + here.spare, env),
        variables={**dict.fromkeys(CREDENTIALS), **resolved.for_workers},
        scripts=sizes.scripts,
    )
    return LaunchSettings(
        spec=spec,
        store=store,
        workers=workers,
        slots=here.workers,
        spare_slots=here.spare,
        node=node,
        state=state,
        sync=sync,
        history=history_from(options, state.checkpoint_dir, sync.roots),
        denylist=denylist_from(options, store),
        readers=_readers(options, spec.data),
        servers=sizes.servers,
        http=http,
        leave=leave,
        limits=value("watch", options),
        otlp_endpoint=otlp_from(options),
        health_probes=value("health_probe", options),
        notify=notify,
        report=ReportSettings(
            env.get("TORCHELASTIC_ERROR_FILE", ""), invocation.report_file, options["exit_code"] == "worker"
        ),
        arguments=invocation.arguments,
        options=effective(resolved),
        allowed=value("allow_differences", options),
        remarks=tuple(
            filter(
                None,
                (*resolved.remarks, here.remark, _cannot_grow(store, sizes.nodes, scheduler, options["standalone"])),
            )
        ),
        # Last, because it creates a folder: nothing is created before everything has been checked.
        logs=log_plan(options, job, node.name, here.workers, command, env, servers=sizes.scripts.servers),
    )


def _cannot_grow(store: StoreSettings, nodes: NodeRange, scheduler: SchedulerChoice | None, standalone: bool) -> str:
    """A remark for a job whose range of nodes allows growth although no other node can find its store; empty if it can
    grow. Only launchers on this host can reach a private store. Raises ``SettingError`` with Slurm, whose jobs would
    end without it, and be submitted again."""
    private = store.backend is Backend.EMBEDDED and not store.endpoints and not standalone
    if not private or nodes.highest == 1 or (scheduler is not None and scheduler.kind == "process"):
        return ""
    if scheduler is not None and scheduler.kind == "slurm":
        advice = "Give --rdzv-endpoint=HOST:PORT"
        raise SettingError("--scheduler", scheduler.text, "its jobs could not reach this host's private store", advice)
    return (
        f"--nnodes={nodes}: no other node can join, because the store is private to this launcher. "
        "To add nodes, give all launchers the same --rdzv-endpoint=HOST:PORT"
    )


def _spec(
    options: Mapping[str, Any],
    job: JobId,
    sizes: Sizes,
    workers: int,
    scheduler: SchedulerChoice | None,
    replicas: Replicas,
) -> JobSpec:
    """The settings that all launchers of the job must agree on. Raises ``SettingError``."""
    return record(
        *(JobSpec, options),
        job=job,
        nodes=sizes.nodes,
        timeouts=record(Timeouts, options),
        data=data_sets(options["data"]),
        hyper=_hyper(options, sizes.nodes, workers),
        servers=sizes.training,
        script_servers=sizes.script_servers,
        scheduler=scheduler,
        autoscale=_autoscale(options, sizes.nodes),
        slots=record(SlotRules, options),
        health=record(HealthRules, options),
        replicas=replicas,
        verify=record(VerifyRules, options),
        stragglers=record(StragglerRules, options),
        sync_dirs=tuple(options["sync_dir"]),
    )


def _hyper(options: Mapping[str, Any], nodes: NodeRange, workers: int) -> HyperPolicy:
    """The policy for batch and learning rate, for nodes with ``workers`` workers each. Raises ``SettingError``."""
    policy = record(HyperPolicy, options)
    most = nodes.highest * workers
    if policy.logical_ranks and most > policy.logical_ranks:
        raise SettingError(
            "--logical-ranks",
            policy.logical_ranks,
            f"{nodes.highest} nodes with {workers} workers each are {most} workers, and each needs a logical rank",
            "Raise --logical-ranks, or lower the maximum of --nnodes",
        )
    return policy


def _autoscale(options: Mapping[str, Any], nodes: NodeRange) -> AutoscaleRules:
    """The rules of the autoscale policy. Raises ``SettingError``."""
    rules = record(AutoscaleRules, options, enabled=options["autoscale"] != "off")
    if rules.enabled and nodes.lowest == nodes.highest:
        raise SettingError(
            "--autoscale",
            options["autoscale"],
            f"--nnodes={nodes} leaves no choice of size",
            "Give a range such as --nnodes=1:8, or drop one of the two options",
        )
    return rules


def _readers(options: Mapping[str, Any], data: Iterable[DataFiles], least: int = 0) -> ReaderPool:
    functions = functions_from(options["reader_functions"], data)
    return ReaderPool(max(least, value("readers", options)), value("reader_capacity", options), functions)


def reader_settings_from(options: Mapping[str, Any]) -> ReaderSettings:
    """The settings for ``--role=reader``: only options about the store, the readers and the job's name count. Raises
    ``UsageError``."""
    helper = _helper_settings(options, "readers")
    return ReaderSettings(helper, _readers(options, data_sets(options["data"]), least=1))


def pserver_settings_from(options: Mapping[str, Any], sizes: Sizes) -> PserverSettings:
    """The settings for ``--role=pserver``: only options about the store, the pservers and the job's name count. Raises
    ``UsageError``."""
    helper = _helper_settings(options, "pservers")
    if not sizes.servers.count:
        raise SettingError("--servers-per-node", 0, "--role=pserver needs at least 1")
    return PserverSettings(helper, sizes.servers, value("checkpoint_dir", options), server_folder(options))


def _helper_settings(options: Mapping[str, Any], what: str) -> HelperSettings:
    """The settings that ``--role=reader`` and ``--role=pserver`` share. ``what``: the role in the plural, for messages.
    Raises ``UsageError``."""
    role = what[:-1]
    if options["standalone"] or not endpoints_from(options):
        advice = "Name the store of the job: --rdzv-endpoint=HOST:PORT"
        raise SettingError("--role", role, f"{what} join a job that runs elsewhere", advice)
    if not options["rdzv_id"]:
        raise SettingError("--rdzv-id", "''", f"--role={role} needs the name of the job", "Give the job's --rdzv-id")
    check_job_id(options["rdzv_id"])
    job, timeouts = JobId(options["rdzv_id"]), record(Timeouts, options)
    return HelperSettings(
        job=job,
        store=store_from(options, job),
        node=_node_name(options),
        local_addr=options["local_addr"],
        recover_s=timeouts.recover_s,
        grace_s=timeouts.shutdown_s,
    )


def _node(
    options: Mapping[str, Any], nodes: NodeRange, scheduler: SchedulerChoice | None, env: Mapping[str, str]
) -> NodeSettings:
    """The name, rank, index and addresses of this node. Raises ``SettingError``."""
    rank = value("node_rank", options)
    if not -1 <= rank < nodes.maximum:
        allowed = f"must be from 0 to {nodes.maximum - 1}, below the maximum of --nnodes={nodes}"
        raise SettingError("--node-rank", rank, allowed, "Or omit it: nodes get ranks in the order they join")
    name = _node_name(options, node_name(scheduler, env))
    host_id = host_id_from(options["host_id"], env)
    return record(NodeSettings, options, name=name, index=node_index(options, scheduler, env), host_id=host_id)


def _node_name(options: Mapping[str, Any], scheduled: str = "") -> NodeId:
    """The name of this node. ``scheduled``: its name in the scheduler; empty: none. Raises ``SettingError``."""
    node = options["node_id"] or scheduled or f"{socket.gethostname()}-{secrets.token_hex(2)}"
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", node):
        raise SettingError("--node-id", repr(node), "use 1 to 128 letters, digits, '.', '_' and '-'")
    return NodeId(node)


def with_both_spellings(arguments: list[str]) -> list[str]:
    """The command line with each option spelled by its full name; see ``spelling``. Raises ``UsageError``."""
    options = [Spelling((option.flag, *option.others), not option.flag_only) for option in OPTIONS]
    # These two come from click.
    options += [Spelling((name,), False) for name in ("--help", "--version")]
    return one_spelling(arguments, options, NAMES)
