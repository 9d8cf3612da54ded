"""The launcher's command line: turns resolved options into the settings of a launcher."""

from __future__ import annotations

import dataclasses
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import click

from edl.config import (
    CREDENTIALS,
    JobSpec,
    NodeRange,
    SlotRules,
    Timeouts,
    VerifyRules,
    check_job_id,
    environment,
)
from edl.errors import SettingError, UsageError
from edl.job_records import DataFiles, SchedulerChoice
from edl.launch.autoscale_options import autoscale_from
from edl.launch.data_option import data_sets, functions_from
from edl.launch.http_options import http_from
from edl.launch.hyper_options import policy_from
from edl.launch.leave_options import leave_from
from edl.launch.log_options import log_plan, server_folder
from edl.launch.naming import private_name
from edl.launch.options import OPTIONS, fields, record, value
from edl.launch.resolved_options import ResolvedOptions
from edl.launch.scale_options import node_index, node_name, wanted_from
from edl.launch.script_check import worker_command
from edl.launch.settings import (
    Backend,
    FunctionLaunch,
    HelperSettings,
    LaunchSettings,
    PserverSettings,
    ReaderPool,
    ReaderSettings,
    ReportSettings,
    StateSettings,
    StoreSettings,
)
from edl.launch.sizes import Sizes, sizes_from
from edl.launch.slot_options import with_spares
from edl.launch.spelling import Spelling, one_spelling
from edl.launch.store_options import backend_from, endpoints_from, store_from
from edl.launch.torchrun_options import OWN_ROLES, workers_from
from edl.launch.torchrun_table import NAMES
from edl.types import JobId


def settings_of(
    resolved: ResolvedOptions, function: FunctionLaunch | None = None, arguments: tuple[str, ...] = ()
) -> LaunchSettings | ReaderSettings | PserverSettings:
    """The settings of this launcher. Everything that can be checked before anything is started is checked here.

    ``arguments``: the command line, without the program. Raises ``UsageError``.
    """
    options, role = resolved.values, resolved.values["role"]
    if role in ("reader", "pserver") and resolved.script:
        raise click.UsageError(f"--role={role} runs no script: drop {resolved.script}")
    if role == "reader":
        return reader_settings_from(options)
    sizes = sizes_from(options)
    if role == "pserver" or (role not in OWN_ROLES and not sizes.slots):
        return pserver_settings_from(options, sizes)
    return _launch_settings(resolved, sizes, function or FunctionLaunch(), arguments)


def _launch_settings(
    resolved: ResolvedOptions, sizes: Sizes, function: FunctionLaunch, arguments: tuple[str, ...]
) -> LaunchSettings:
    options, env = resolved.values, environment()
    if function.report_file and options["scheduler"] == "process":
        what = "needs a command line to start more launchers with, and a job started from Python has none"
        raise SettingError("--scheduler", "process", what, "Start it with edl-run")
    if not resolved.script and function.command is None:
        raise click.MissingParameter(param_type="argument", param_hint="'SCRIPT'")
    here, chosen = with_spares(options, sizes.slots), fields(LaunchSettings, options)
    state, scheduler = record(StateSettings, options), wanted_from(options)
    job = _job(options, sizes.nodes, state)
    store = store_from(options, job)
    spec = _spec(options, job, sizes, here.workers, scheduler)
    _check_node_rank(chosen["node_rank"], sizes.nodes)
    node = _node(options, node_name(scheduler, env))
    http, leave = http_from(options), leave_from(options)
    command = function.command or worker_command(
        options["module"], options["no_python"], resolved.script, resolved.arguments
    )
    workers = workers_from(
        *(options, command, here.workers + here.spare, env),
        variables={**dict.fromkeys(CREDENTIALS), **resolved.for_workers},
        scripts=sizes.scripts,
    )
    return LaunchSettings(
        **chosen,
        spec=spec,
        store=store,
        workers=workers,
        slots=here.workers,
        spare_slots=here.spare,
        node=node,
        index=node_index(options, scheduler, env),
        state=state,
        readers=_readers(options, spec.data),
        servers=sizes.servers,
        http=http,
        leave=leave,
        report=ReportSettings(
            env.get("TORCHELASTIC_ERROR_FILE", ""), function.report_file, options["exit_code"] == "worker"
        ),
        arguments=arguments,
        remarks=tuple(
            filter(
                None,
                (*resolved.remarks, here.remark, _cannot_grow(store, sizes.nodes, scheduler, options["standalone"])),
            )
        ),
        # Last, because it creates a folder: nothing is created before everything has been checked.
        logs=log_plan(options, job, node, here.workers, command, env, servers=sizes.scripts.servers),
    )


def _cannot_grow(store: StoreSettings, nodes: NodeRange, scheduler: SchedulerChoice | None, standalone: bool) -> str:
    """A remark for a job whose range of nodes allows growth although no other node can find its store; empty if it can
    grow. A scheduler passes the store's address to the nodes that it starts."""
    private = store.backend is Backend.EMBEDDED and not store.endpoints and not standalone
    if not private or nodes.highest == 1 or scheduler is not None:
        return ""
    return (
        f"--nnodes={nodes}: no other node can join, because the store is private to this launcher. "
        "To add nodes, give all launchers the same --rdzv-endpoint=HOST:PORT"
    )


def _spec(
    options: Mapping[str, Any], job: JobId, sizes: Sizes, workers: int, scheduler: SchedulerChoice | None
) -> JobSpec:
    """The settings that all launchers of the job must agree on. Raises ``SettingError``."""
    return record(
        *(JobSpec, options),
        job=job,
        nodes=sizes.nodes,
        timeouts=record(Timeouts, options),
        data=data_sets(options["data"]),
        hyper=policy_from(options, sizes.nodes, workers),
        servers=sizes.training,
        script_servers=sizes.script_servers,
        scheduler=scheduler,
        autoscale=autoscale_from(options, sizes.nodes),
        slots=record(SlotRules, options),
        verify=record(VerifyRules, options),
    )


def _job(options: Mapping[str, Any], nodes: NodeRange, state: StateSettings) -> JobId:
    """The name of the job. Raises ``UsageError`` if its nodes could not find each other."""
    endpoints, standalone = endpoints_from(options), options["standalone"]
    if standalone and endpoints:
        raise UsageError("--standalone and --rdzv-endpoint exclude each other: a standalone job has a private store")
    private = standalone or not endpoints
    if backend_from(options) is Backend.EMBEDDED and private and nodes.minimum > 1:
        raise SettingError(
            "--rdzv-endpoint",
            "''",
            f"--nnodes={nodes} needs a store that every node can reach",
            "Give the same --rdzv-endpoint=HOST:PORT on all nodes",
        )
    return JobId(options["rdzv_id"] or (private_name(state.checkpoint_dir) if private else "default"))


def _readers(options: Mapping[str, Any], data: Iterable[DataFiles]) -> ReaderPool:
    functions = functions_from(options["reader_functions"], data)
    return ReaderPool(value("readers", options), value("reader_capacity", options), functions)


def reader_settings_from(options: Mapping[str, Any]) -> ReaderSettings:
    """The settings for ``--role=reader``: only options about the store, the readers and the job's name count. Raises
    ``UsageError``."""
    helper = _helper_settings(options, "readers")
    readers = _readers(options, data_sets(options["data"]))
    return ReaderSettings(helper, dataclasses.replace(readers, count=readers.count or 1))


def pserver_settings_from(options: Mapping[str, Any], sizes: Sizes) -> PserverSettings:
    """The settings for ``--role=pserver``: only options about the store, the pservers and the job's name count. Raises
    ``UsageError``."""
    helper = _helper_settings(options, "pservers")
    if not sizes.servers.count:
        raise SettingError("--servers-per-node", 0, "--role=pserver needs at least 1")
    servers = dataclasses.replace(sizes.servers, log_folder=server_folder(options))
    return PserverSettings(helper, servers, value("checkpoint_dir", options))


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
    timeouts = record(Timeouts, options)
    return HelperSettings(
        job=JobId(options["rdzv_id"]),
        store=store_from(options, options["rdzv_id"]),
        node=_node(options),
        local_addr=options["local_addr"],
        recover_s=timeouts.recover_s,
        grace_s=timeouts.shutdown_s,
    )


def _check_node_rank(rank: int, nodes: NodeRange) -> None:
    if not -1 <= rank < nodes.maximum:
        allowed = f"must be from 0 to {nodes.maximum - 1}, below the maximum of --nnodes={nodes}"
        raise SettingError("--node-rank", rank, allowed, "Or omit it: nodes get ranks in the order they join")


def _node(options: Mapping[str, Any], scheduled: str = "") -> str:
    """The name of this node. ``scheduled``: its name in the scheduler; empty: none. Raises ``SettingError``."""
    node = options["node_id"] or scheduled or f"{socket.gethostname()}-{secrets.token_hex(2)}"
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", node):
        raise SettingError("--node-id", repr(node), "use 1 to 128 letters, digits, '.', '_' and '-'")
    return str(node)


def with_both_spellings(arguments: list[str]) -> list[str]:
    """The command line with each option spelled by its full name; see ``spelling``. Raises ``UsageError``."""
    options = [Spelling((option.flag, *option.others), not option.flag_only) for option in OPTIONS]
    # These two come from click.
    options += [Spelling((name,), False) for name in ("--help", "--version")]
    return one_spelling(arguments, options, NAMES)
