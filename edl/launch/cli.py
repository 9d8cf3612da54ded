"""The launcher's command line: options in, ``LaunchSettings`` out.

Every option can also be given as ``EDL_<NAME>`` in the environment; the command line wins.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import secrets
import shutil
import socket
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.adapters.etcd_plan import parse_endpoints
from edl.adapters.secret_file import secret_from
from edl.agent.workers.paddle_environment import NOWHERE
from edl.config import (
    FaultTolerance,
    JobSpec,
    NodeRange,
    SlotRules,
    Timeouts,
    VerifyRules,
    check_job_id,
    environment,
    parse_nnodes,
)
from edl.errors import ScriptError, SettingError, UsageError
from edl.job_records import SchedulerChoice, Training
from edl.launch.autoscale_options import autoscale_from
from edl.launch.data_option import data_sets, functions_from
from edl.launch.http_options import http_from
from edl.launch.hyper_options import policy_from
from edl.launch.leave_options import leave_from
from edl.launch.log_options import log_plan, server_folder
from edl.launch.naming import private_name
from edl.launch.options import OPTIONS, record, value
from edl.launch.origin import allowed_from
from edl.launch.ps_options import sizes, training_from, wants_servers
from edl.launch.scale_options import node_index, node_name, wanted_from
from edl.launch.script_servers import roles_from
from edl.launch.settings import (
    CONF_KEYS,
    Backend,
    HelperSettings,
    LaunchSettings,
    PserverSettings,
    ReaderSettings,
    ServerSettings,
    StateSettings,
    StoreSettings,
)
from edl.launch.slot_options import slots_from, with_spares
from edl.launch.spelling import Spelling, one_spelling
from edl.launch.torchrun_options import OWN_ROLES, python_from, workers_from
from edl.launch.torchrun_table import NAMES
from edl.ports import CommandKind, WorkerCommand
from edl.types import JobId

BACKENDS = {
    "etcd": Backend.ETCD,
    "etcd-v2": Backend.ETCD,
    "etcd-embedded": Backend.EMBEDDED,
    # torchrun's names: they ask for a store that needs no server of its own.
    "c10d": Backend.EMBEDDED,
    "static": Backend.EMBEDDED,
}

REQUEST_TIMEOUT_S = {Backend.ETCD: 2.0, Backend.EMBEDDED: 0.5}
"""A write that the leader takes to its grave is never answered, so this adds to a recovery in which etcd's leader
dies, too. Members next door answer in milliseconds."""


def settings_from(
    options: Mapping[str, Any], script: str, arguments: tuple[str, ...], command: WorkerCommand | None = None
) -> LaunchSettings:
    """Check everything that can be checked before anything is started. Raises ``UsageError``.

    ``command``: what the workers run, where that is no script, module or program.
    """
    nodes, slots, servers, training = _sizes(options)
    roles = roles_from(options, slots_from)
    beside = with_spares(options, slots)
    slots = beside.workers
    store = _store(options)
    private = _is_private(options, nodes, store)
    scheduler, state = wanted_from(options), record(StateSettings, options)
    job = JobId(options["rdzv_id"] or (private_name(state.checkpoint_dir) if private else "default"))
    store = _with_secret(store, options, job)
    spec = _spec(options, job, nodes, slots, servers=training, scheduler=scheduler)
    if roles is not None:
        spec = dataclasses.replace(spec, script_servers=roles.job)
    _check_node_rank(options["node_rank"], nodes)
    node = _node(options, node_name(scheduler, environment()))
    http, leave = http_from(options), leave_from(options)
    command = command or worker_command(options["module"], options["no_python"], script, arguments)
    workers = workers_from(options, slots + beside.spare, environment())
    # The last one: it makes a folder, and nothing is made before everything has been checked.
    logs = log_plan(options, job, node, slots, command, environment())
    if roles is not None:
        logs = dataclasses.replace(logs, servers=roles.here.servers)
    return LaunchSettings(
        spec=spec,
        store=store,
        command=command,
        slots=slots,
        spare_slots=beside.spare,
        node=node,
        node_rank=options["node_rank"],
        local_addr=options["local_addr"],
        standby=value("standby", options),
        preload=value("preload", options),
        logs=logs,
        state=state,
        rack=options["rack"],
        outer_error_file=environment().get("TORCHELASTIC_ERROR_FILE", ""),
        readers=value("readers", options),
        reader_capacity=value("reader_capacity", options),
        reader_functions=functions_from(options["reader_functions"], data_sets(options["data"])),
        servers=servers,
        http=http,
        index=node_index(options, scheduler, environment()),
        leave=leave,
        worker_status=options["exit_code"] == "worker",
        remarks=(beside.remark,) if beside.remark else (),
        allowed=allowed_from(options),
        scripts=roles.here if roles is not None else NOWHERE,
        **workers,
    )


def _with_secret(store: StoreSettings, options: Mapping[str, Any], job: str) -> StoreSettings:
    secret, file = secret_from(options["secret_file"].strip(), environment().get("EDL_SECRET", ""), job)
    return dataclasses.replace(store, secret=secret, secret_file=file)


def _spec(
    options: Mapping[str, Any],
    job: JobId,
    nodes: NodeRange,
    slots: int,
    *,
    servers: Training | None,
    scheduler: SchedulerChoice | None,
) -> JobSpec:
    """What all launchers of the job have to agree on. Raises ``SettingError``."""
    return JobSpec(
        job,
        nodes,
        options["max_restarts"],
        FaultTolerance(options["fault_tolerance"]),
        record(Timeouts, options),
        data=data_sets(options["data"]),
        hyper=policy_from(options, nodes, slots),
        servers=servers,
        scheduler=scheduler,
        cooldown_s=options["scale_cooldown"],
        autoscale=autoscale_from(options, nodes),
        slots=record(SlotRules, options),
        verify=record(VerifyRules, options),
    )


def _is_private(options: Mapping[str, Any], nodes: NodeRange, store: StoreSettings) -> bool:
    """Whether the job has a store of its own that nobody else knows. Raises ``UsageError`` where that cannot be."""
    named = bool(_endpoints(options))
    private = options["standalone"] or not named
    if options["standalone"] and named:
        raise UsageError("--standalone and --rdzv-endpoint exclude each other: a standalone job has a store of its own")
    if private and store.backend is Backend.EMBEDDED and nodes.minimum > 1:
        raise SettingError(
            "--rdzv-endpoint",
            "''",
            f"--nnodes={nodes} needs a store that every node reaches",
            "Name one, the same on all nodes: --rdzv-endpoint=HOST:PORT",
        )
    return bool(private)


def _sizes(options: Mapping[str, Any]) -> tuple[NodeRange, int, ServerSettings, Training | None]:
    """Nodes of the job, workers here, pservers here, and how a job with pservers of edl's own trains."""
    roles = roles_from(options, slots_from)
    if roles is not None:
        return roles.nodes, roles.slots, ServerSettings(), None
    if not wants_servers(options):
        nodes = parse_nnodes(options["nnodes"], options["node_unit"])
        return nodes, slots_from(options["nproc_per_node"]), ServerSettings(), None
    found = sizes(options, slots_from, value("pserver_memory", options))
    return found.nodes, found.slots, found.here, training_from(options)


def serves_only(options: Mapping[str, Any]) -> bool:
    """Whether this launcher is to have pservers and nothing else. Raises ``UsageError``."""
    if options["role"] == "pserver":
        return True
    return options["role"] not in OWN_ROLES and _sizes(options)[1] == 0


def reader_settings_from(options: Mapping[str, Any]) -> ReaderSettings:
    """``--role=reader``: only options of the store, of readers, and the job's name count. Raises ``UsageError``."""
    common = _helper_settings(options, "readers")
    functions = functions_from(options["reader_functions"], data_sets(options["data"]))
    return ReaderSettings(
        **common, count=value("readers", options) or 1, capacity=value("reader_capacity", options), functions=functions
    )


def pserver_settings_from(options: Mapping[str, Any]) -> PserverSettings:
    """``--role=pserver``: the same with options of pservers. Raises ``UsageError``."""
    common = _helper_settings(options, "pservers")
    servers = _sizes(options)[2]
    if not servers.count:
        raise SettingError("--servers-per-node", servers.count, "--role=pserver needs at least 1")
    servers = dataclasses.replace(servers, log_folder=server_folder(options))
    return PserverSettings(**common, servers=servers, checkpoint_dir=record(StateSettings, options).checkpoint_dir)


def _helper_settings(options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Fields of ``HelperSettings``."""
    role = what[:-1]
    if options["standalone"] or not _endpoints(options):
        advice = "Name the store of the job: --rdzv-endpoint=HOST:PORT"
        raise SettingError("--role", role, f"{what} join a job that runs elsewhere", advice)
    if not options["rdzv_id"]:
        raise SettingError("--rdzv-id", "''", f"--role={role} needs the name of the job", "Give the job's --rdzv-id")
    check_job_id(options["rdzv_id"])
    timeouts = record(Timeouts, options)
    node = _node(options)
    common = HelperSettings(
        job=JobId(options["rdzv_id"]),
        store=_with_secret(_store(options), options, options["rdzv_id"]),
        node=node,
        local_addr=options["local_addr"],
        recover_s=timeouts.recover_s,
        grace_s=timeouts.shutdown_s,
    )
    return {field.name: getattr(common, field.name) for field in dataclasses.fields(common)}


def worker_command(module: bool, no_python: bool, script: str, arguments: tuple[str, ...]) -> WorkerCommand:
    """What the workers run. Raises ``UsageError`` when it is plain now that they could not."""
    if module and no_python:
        raise UsageError("--module and --no-python exclude each other: only Python has modules. Drop one of them")
    if module:
        if not python_from(environment()):  # another interpreter may have it
            _check_module(script)
        return WorkerCommand(CommandKind.MODULE, script, arguments)
    if no_python:
        if shutil.which(script) is None:
            raise ScriptError(f"{script}: no such program on the PATH, or not executable. Check the name and its mode")
        return WorkerCommand(CommandKind.PROGRAM, script, arguments)
    _check_script(script)
    return WorkerCommand(CommandKind.SCRIPT, script, arguments)


def _check_module(name: str) -> None:
    """Look for the outermost package only: to look further would import it."""
    if name.endswith(".py") and os.path.isfile(name):
        raise ScriptError(f"-m {name}: this is a file, and -m takes the name of a module. Write {name} without -m")
    top = name.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        found = top and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        del sys.path[0]
    if not found:
        raise ScriptError(
            f"-m {name}: no module {top!r} for {sys.executable}, looked from {os.getcwd()}. "
            "Install it there, start from its folder, or give the script's path without -m"
        )


def _check_script(script: str) -> None:
    path = Path(script)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ScriptError(
            f"{script}: {error.strerror} (looked from {os.getcwd()}). Give the path of the training script; "
            "for a module use -m, for a program --no-python"
        ) from error
    if python_from(environment()):
        return  # another interpreter may read it otherwise
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers say them
            compile(source, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        if error.lineno is None:  # null bytes
            raise ScriptError(f"{script}: not Python source ({error.msg}). For a program use --no-python") from error
        raise ScriptError(f"{script}, line {error.lineno}: {error.msg}. Nothing was started") from error
    except ValueError as error:  # the same before Python 3.12
        raise ScriptError(f"{script}: not Python source ({error}). For a program use --no-python") from error


def _store(options: Mapping[str, Any]) -> StoreSettings:
    name = options["rdzv_backend"] or ("etcd" if _looks_external(options) else "etcd-embedded")
    if name not in BACKENDS:
        why = f"not one of {', '.join(BACKENDS)}; the store is etcd, and torchrun's plug-ins for others are not loaded"
        raise SettingError("--rdzv-backend", name, why)
    endpoints = _endpoints(options)
    if BACKENDS[name] is Backend.ETCD and not endpoints:
        raise SettingError(
            "--rdzv-endpoint", "''", "--rdzv-backend=etcd needs an address", "Use HOST:PORT[,HOST:PORT…]"
        )
    conf = _conf(options["rdzv_conf"])
    files = {key: conf.get(key, "") for key in ("ca", "cert", "key")}
    for key, path in files.items():
        if path and not Path(path).is_file():
            raise SettingError(f"--rdzv-conf {key}", path, "no such file")
    wants_tls = files["cert"] or files["key"] or "etcds://" in options["rdzv_endpoint"]
    if wants_tls and not files["ca"]:
        raise SettingError(
            "--rdzv-conf ca", "''", "TLS needs the authority's certificate", "Add ca=FILE to --rdzv-conf"
        )
    return StoreSettings(
        backend=BACKENDS[name],
        endpoints=endpoints,
        data_dir=conf.get("data_dir", ""),
        request_timeout_s=conf.get("request_timeout", REQUEST_TIMEOUT_S[BACKENDS[name]]),
        connect_timeout_s=conf.get("connect_timeout", 10.0),
        user=conf.get("user", ""),
        password=conf.get("password", ""),
        **files,
    )


def _looks_external(options: Mapping[str, Any]) -> bool:
    return str(options["rdzv_endpoint"]).startswith(("etcd://", "etcds://"))


def _endpoints(options: Mapping[str, Any]) -> tuple[str, ...]:
    text = options["rdzv_endpoint"].strip()
    if re.fullmatch(r"(localhost|127\.0\.0\.1|\[?::1\]?):0", text):
        return ()  # how torchrun asks for a store of its own on a free port
    return parse_endpoints(text)


def _conf(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = item.partition("=")
        if not separator:
            raise SettingError("--rdzv-conf", item, "needs a value", f"Write {key}=VALUE")
        try:
            values[key] = CONF_KEYS[key](value)
        except ValueError:
            raise SettingError(
                "--rdzv-conf", item, f"{value!r} is not a number", "Write seconds, such as 2.5"
            ) from None
        if CONF_KEYS[key] is float and not values[key] > 0:
            raise SettingError("--rdzv-conf", item, "must be more than 0 seconds")
    return values


def _check_node_rank(rank: int, nodes: NodeRange) -> None:
    if not -1 <= rank < nodes.maximum:
        allowed = f"must be from 0 to {nodes.maximum - 1}, below the maximum of --nnodes={nodes}"
        raise SettingError("--node-rank", rank, allowed, "Or leave it out: places are given as nodes come")


def _node(options: Mapping[str, Any], scheduled: str = "") -> str:
    """This node's name. ``scheduled``: the one that its scheduler has for it. Raises ``SettingError``."""
    node = options["node_id"] or scheduled or f"{socket.gethostname()}-{secrets.token_hex(2)}"
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", node):
        raise SettingError("--node-id", repr(node), "use 1 to 128 letters, digits, '.', '_' and '-'")
    return str(node)


def with_both_spellings(arguments: list[str]) -> list[str]:
    """The command line with each option by its own name in full: see ``spelling``. Raises ``UsageError``."""
    options = [Spelling((option.flag, *option.others), not option.flag_only) for option in OPTIONS]
    # Neither is among the launcher's own; torchrun has no --version.
    options += [Spelling((name,), False) for name in ("--help", "--version")]
    return one_spelling(arguments, options, NAMES)
