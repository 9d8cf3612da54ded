"""Translates the options and variables of paddle.distributed.launch to edl's own options.

``paddle_table`` lists what each of them becomes. Variables are read first, because in Paddle's launcher they override
the command line. Then each option is offered as one of edl's own, with its source and origin. Finally, Paddle's other
defaults (log folder, exit status, number of workers) replace edl's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edl.config import parse_nnodes
from edl.errors import SettingError
from edl.launch import script_servers
from edl.launch.accelerators import paddle_devices
from edl.launch.dropin_table import Fate
from edl.launch.options import entry_of
from edl.launch.options.dropin import PADDLE
from edl.launch.options.workers import TORCH_LAUNCH
from edl.launch.paddle_devices import VARIABLE_OF, choose
from edl.launch.paddle_table import PADDLE_ROWS, WEAK_VARIABLES, row_of
from edl.launch.resolved_options import OptionSource, ResolvedOptions, inside_worker
from edl.wire.address import address

DEFAULT_MASTER_PORT = "6768"
"""Paddle's default port for an endpoint without one in ``LISTS``."""
TIMES_WHEN_FIXED = 10
"""Paddle multiplies ``--elastic_timeout`` by this if the number of nodes is fixed."""

SHARED = {row.name: entry_of(row.option).name for row in PADDLE_ROWS if entry_of(row.option).variable}
"""Paddle's options that edl has as well, and edl's names for them. They do not identify the dialect."""
ABBREVIATIONS = ("max_restart",)
"""Paddle's options that may be abbreviations of torchrun's. They do not identify the dialect either."""
LISTS = ("PADDLE_TRAINER_ENDPOINTS", "DISTRIBUTED_TRAINER_ENDPOINTS")
"""Variables that list all trainers, the one with the highest precedence last."""
MEETING = ("master", "nnodes", "ips", "rank")
"""Options about the nodes of a job and where they meet."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_NOTHING = ("", "0", "False", "INFO")
_SIZES_OF_SERVERS = ("servers", "trainers", "server_nnodes")


def apply(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    """Apply Paddle's options and variables. Raises ``UsageError`` for an option that edl refuses."""
    script_servers.take_words(resolved)
    closed = resolved.values["dialect"] in ("edl", TORCH_LAUNCH) or inside_worker(env)
    variables = {} if closed else {name: value for name, value in env.items() if value}
    spoken = _is_spoken(resolved)
    telling = _telling(resolved, variables) if resolved.values["dialect"] == "auto" else []
    if telling and not spoken:
        some = ", ".join(telling[:3])
        resolved.remark(f"{some} in the environment: using Paddle's dialect; --dialect=edl ignores these variables")
    paddle = spoken or bool(telling)
    if paddle:
        _take_variables(resolved, variables)
    script_servers.settle(resolved, paddle, script_servers.imports_of)
    _answer(resolved)
    for translate in (_mode, _other_names, _elastic_server, _ips, _rank, _endpoint_lists, _master, _faults, _workers):
        translate(resolved)
    choose(resolved, env)
    _ports(resolved)
    if paddle:
        _keep_to_paddles_ways(resolved, env)


def _is_spoken(resolved: ResolvedOptions) -> bool:
    """Whether the command line is in Paddle's dialect: ``--dialect`` says so, or an option is given that only Paddle
    has."""
    if resolved.values["dialect"] != "auto":
        return bool(resolved.values["dialect"] == "paddle")
    only_paddles = any(resolved.given(name) for name in _names() if name not in SHARED and name not in ABBREVIATIONS)
    return only_paddles or script_servers.named_in_paddles_words(resolved)


def _telling(resolved: ResolvedOptions, env: Mapping[str, str]) -> list[str]:
    """Variables that are set and that only Paddle's launcher reads."""
    of_options = [variable for row in PADDLE_ROWS for variable in row.variables]
    found = [name for name in (*of_options, *LISTS) if env.get(name) and name not in WEAK_VARIABLES | {"POD_IP"}]
    return found or (["PADDLE_ELASTIC_JOB_ID"] if _elastic(resolved, env) is not None else [])


def _names() -> list[str]:
    """Names of the values of all options that only Paddle has."""
    return [row.name for row in PADDLE_ROWS if row.name not in ("devices", "http_port")] + ["devices", *VARIABLE_OF]


def said(resolved: ResolvedOptions, name: str) -> str:
    """The name by which one of Paddle's options was given: the variable, or the option in Paddle's spelling."""
    return resolved.origin(name) or f"--{name}"


# --- variables -------------------------------------------------------------------------------------------------------


def _take_variables(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    for row in PADDLE_ROWS:
        name = SHARED.get(row.name, row.name)
        for variable in row.variables:
            if variable in WEAK_VARIABLES or variable not in env or variable == "POD_IP":
                continue
            if variable == "PADDLE_TRAINER_ID" and env[variable].strip().startswith("-"):
                continue  # as in Paddle: no rank
            if row.name in MEETING and _left_alone(resolved, env, variable):
                continue
            resolved.offer(name, env[variable], OptionSource.PADDLE, variable)
    if "POD_IP" in env and not resolved.given("local_addr"):
        # Many pods set POD_IP for their own purposes, so it only gives this node's address.
        resolved.offer("host", env["POD_IP"], OptionSource.PADDLE, "POD_IP")
    _take_endpoints(resolved, env)
    _take_elastic(resolved, env)


def _left_alone(resolved: ResolvedOptions, env: Mapping[str, str], variable: str) -> bool:
    """Whether a variable about several nodes is ignored, because ``--standalone``, which Paddle does not have, takes
    precedence."""
    if resolved.values["standalone"]:
        resolved.remark(f"{variable}={env[variable]} is not used with --standalone, a job of one node")
    return bool(resolved.values["standalone"])


def _take_endpoints(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    """Derive the store and the number of nodes from the lists of all trainers that an operator passes to each pod.
    ``--rdzv-endpoint`` takes precedence, and then the lists are not used for the number of nodes either."""
    if resolved.given("rdzv_endpoint"):
        return
    for variable in LISTS:
        endpoints = [one.strip() for one in env.get(variable, "").split(",") if one.strip()]
        if not endpoints or _left_alone(resolved, env, variable):
            continue
        first = endpoints[0] if ":" in endpoints[0] else f"{endpoints[0]}:{DEFAULT_MASTER_PORT}"
        alone = env.get("PADDLE_LAUNCH_WITH_ARGS", "0") not in ("0", "")
        resolved.offer("master", "" if alone else first, OptionSource.PADDLE, f"first of {variable}")
        hosts = {one.rpartition(":")[0] or one for one in endpoints}
        resolved.offer("nnodes", str(len(hosts)), OptionSource.PADDLE, f"hosts of {variable}")


def _elastic(resolved: ResolvedOptions, env: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The etcd server, job and number of nodes for Paddle's legacy launcher; None unless all three are given, as in
    Paddle."""
    if resolved.values["standalone"]:
        return None
    if resolved.values["scheduler"].startswith("paddlecloud") and not resolved.values["elastic_server"]:
        return None  # the variables describe the etcd of that scheduler
    host, port = env.get("PADDLE_ELASTIC_ETCD_SERVICE_HOST", ""), env.get("PADDLE_ELASTIC_ETCD_SERVICE_PORT", "")
    service = f"{host}:{port}" if host and port else ""
    server = resolved.values["elastic_server"] or env.get("PADDLE_ELASTIC_SERVER", "") or service
    job = resolved.values["job_id"] or resolved.values["rdzv_id"] or env.get("PADDLE_ELASTIC_JOB_ID", "")
    nodes = resolved.values["np"] or env.get("PADDLE_ELASTIC_NP", "")
    return (server, job, nodes) if server and job and nodes else None


def _take_elastic(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    """Offer the variables of Paddle's legacy launcher. Options on the command line take precedence."""
    found = _elastic(resolved, env)
    if found is None:
        return
    server = "PADDLE_ELASTIC_SERVER" if "PADDLE_ELASTIC_SERVER" in env else "PADDLE_ELASTIC_ETCD_SERVICE_HOST"
    variables = (server, "PADDLE_ELASTIC_JOB_ID", "PADDLE_ELASTIC_NP")
    for name, value, variable in zip(("elastic_server", "job_id", "np"), found, variables, strict=True):
        resolved.offer(name, value, OptionSource.CLUSTER, variable)
    if "PADDLE_ELASTIC_TTL" in env:
        resolved.offer("lease_ttl", env["PADDLE_ELASTIC_TTL"], OptionSource.CLUSTER, "PADDLE_ELASTIC_TTL")
    for name in ("scale", "force"):
        variable = f"PADDLE_ELASTIC_{name.upper()}"
        if variable in env:
            resolved.offer(name, env[variable], OptionSource.CLUSTER, variable)
    variable = "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL"
    if variable in env:
        level = {"1": "recover", "2": "elastic"}.get(env[variable])
        if level is None:
            raise SettingError(variable, env[variable], "must be 1 (recover) or 2 (elastic)")
        resolved.offer("fault_tolerance", level, OptionSource.CLUSTER, variable)


# --- options ---------------------------------------------------------------------------------------------------------


def _answer(resolved: ResolvedOptions) -> None:
    """Refuse options that edl does not support, and explain those without effect. Raises ``SettingError``."""
    for row in PADDLE_ROWS:
        if row.fate is Fate.HONOURED or not resolved.given(row.name):
            continue
        value = resolved.values[row.name]
        if row.name == "log_level" and str(value).upper() not in LEVELS:
            raise SettingError(said(resolved, row.name), value, "not a log level", f"Use one of {', '.join(LEVELS)}")
        if str(value) in _NOTHING:
            continue  # the same as edl's behaviour
        if row.fate is Fate.REFUSED:
            raise SettingError(said(resolved, row.name), value, row.why, row.advice)
        resolved.remark(f"{said(resolved, row.name)}={value}: {row.why}")


def _means(resolved: ResolvedOptions, name: str, ours: str, value: Any) -> None:
    """Offer the value of Paddle's option ``name`` for edl's option ``ours``. Raises ``SettingError`` if both are given
    with different values."""
    source, origin = resolved.source(name), said(resolved, name)
    if (
        source <= OptionSource.COMMAND_LINE
        and resolved.source(ours) == source
        and str(resolved.values[ours]) != str(value)
    ):
        other = said(resolved, ours).replace("_", "-")
        raise SettingError(
            origin, resolved.values[name], f"{other}={resolved.values[ours]} contradicts it", "Give only one of them"
        )
    resolved.offer(ours, value, source, origin)


def _mode(resolved: ResolvedOptions) -> None:
    mode = resolved.values["run_mode"]
    if mode == "ps-heter":
        row = row_of("heter_workers")
        raise SettingError(said(resolved, "run_mode"), mode, row.why, "Use --run_mode=ps")
    if mode == "rpc":
        resolved.values["run_mode"] = "collective"  # all workers have the variables for RPC


def _elastic_server(resolved: ResolvedOptions) -> None:
    server, nodes = resolved.values["elastic_server"], resolved.values["np"]
    if not server:
        return
    if not nodes or not (resolved.values["job_id"] or resolved.values["rdzv_id"]):
        raise SettingError(
            said(resolved, "elastic_server"),
            server,
            "needs --job_id and --np as well",
            "Or use --master=etcd://HOST:PORT",
        )
    _means(resolved, "elastic_server", "rdzv_endpoint", f"etcd://{server.removeprefix('etcd://')}")


def _other_names(resolved: ResolvedOptions) -> None:
    """Offer the options that are synonyms of edl's own."""
    for option in PADDLE:
        if option.same_as and resolved.given(option.name) and resolved.values[option.name] != "":
            _means(resolved, option.name, entry_of(option.same_as).name, resolved.values[option.name])


def _ips(resolved: ResolvedOptions) -> None:
    """Derive number of nodes, address of the store, and rank of this node from ``--ips``, the list of all nodes. Raises
    ``SettingError``."""
    hosts = [one.strip() for one in resolved.values["ips"].split(",") if one.strip()]
    if not hosts:
        return
    origin = said(resolved, "ips")
    if resolved.values["master"]:
        resolved.remark(f"{origin}={resolved.values['ips']} is not used with --master, as in Paddle's launcher")
        return
    if len(hosts) > 1 and any(one in ("127.0.0.1", "localhost", "::1") for one in hosts):
        raise SettingError(
            origin,
            resolved.values["ips"],
            "127.0.0.1 is every node's own address",
            "Name addresses that all nodes can reach",
        )
    if len(set(hosts)) < len(hosts):
        raise SettingError(origin, resolved.values["ips"], "names an address twice; name each node once")
    _means(resolved, "ips", "nnodes", str(len(hosts)))
    if len(hosts) == 1:
        return
    mine = _this_one(resolved, hosts)
    _means(resolved, "ips", "rdzv_endpoint", address(hosts[0], resolved.values["start_port"]))
    _means(resolved, "ips", "node_rank", hosts.index(mine))
    if not resolved.given("local_addr") and not resolved.given("host"):
        resolved.offer("local_addr", mine, resolved.source("ips"), origin)


def _this_one(resolved: ResolvedOptions, hosts: list[str]) -> str:
    """The address of this node among ``hosts``. Raises ``SettingError`` if none is an address of this host."""
    known = resolved.values["local_addr"] if resolved.given("local_addr") else resolved.values["host"]
    if known in hosts:
        return str(known)
    from edl.adapters.etcd_cluster import can_bind  # imported late: printing the help does not need it

    mine = [one for one in hosts if can_bind(one, 0)]
    if not mine:
        raise SettingError(
            said(resolved, "ips"),
            resolved.values["ips"],
            "none of these is an address of this host",
            "Name this node's address, or give it with --host",
        )
    return mine[0]


def _rank(resolved: ResolvedOptions) -> None:
    if resolved.source("rank") is OptionSource.PADDLE and resolved.values["rank"] > 0 and _alone(resolved):
        # As in Paddle: a variable left over from another job must not keep a single node from starting.
        resolved.remark(f"{said(resolved, 'rank')}={resolved.values['rank']} is not used: the job has only one node")
    elif resolved.given("rank") and resolved.values["rank"] != -1:
        _means(resolved, "rank", "node_rank", resolved.values["rank"])


def _endpoint_lists(resolved: ResolvedOptions) -> None:
    """If all pservers and trainers of several hosts are listed, use the first pserver's host as the host of the
    store."""
    listed = [resolved.values[name].strip() for name in ("servers", "trainers")]
    parts = [[one.strip().rpartition(":")[0] for one in text.split(",") if one.strip()] for text in listed]
    hosts = {host for part in parts for host in part}
    named = all(any(character.isalpha() or character in ".[" for character in text) for text in listed)
    if named and len(hosts) > 1 and not resolved.values["master"] and not resolved.given("rdzv_endpoint"):
        endpoint = f"{parts[0][0]}:{resolved.values['gloo_port']}"
        origin = said(resolved, "gloo_port") if resolved.given("gloo_port") else said(resolved, "servers")
        resolved.offer("rdzv_endpoint", endpoint, resolved.source("servers"), origin)


def _ports(resolved: ResolvedOptions) -> None:
    """Report port options that have no effect, because the job's store is at another address."""
    for name, needed in (("start_port", "--ips of several nodes"), ("gloo_port", "lists of --servers and --trainers")):
        store = str(resolved.values["rdzv_endpoint"])
        if resolved.given(name) and not store.endswith(f":{resolved.values[name]}"):
            resolved.remark(
                f"{said(resolved, name)}={resolved.values[name]} is not used: it is the port of the store with {needed}"
            )


def _master(resolved: ResolvedOptions) -> None:
    """Translate ``--master``: an existing etcd, or the address of an embedded store. Raises ``SettingError``."""
    text = resolved.values["master"].strip().removeprefix("http://")  # the form in Paddle's help
    if not text:
        return
    origin = said(resolved, "master")
    external = text.startswith(("etcd://", "etcds://"))
    bare = text.partition("://")[2] if external else text
    for one in bare.split(","):
        host, _, port = one.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise SettingError(origin, text, f"{one!r} is not HOST:PORT", "Write 10.0.0.1:6379 or etcd://HOST:PORT")
    if not external and _alone(resolved):
        resolved.remark(f"{origin}={text} is not used: a job of one node has a private store")
        return
    _means(resolved, "master", "rdzv_endpoint", text)


def _alone(resolved: ResolvedOptions) -> bool:
    """Whether the job can have no more than one node."""
    if any(resolved.values[name] for name in _SIZES_OF_SERVERS) or resolved.values["role"] in (
        "reader",
        "pserver",
        "trainer",
    ):
        return False
    return parse_nnodes(resolved.values["nnodes"]).maximum == 1


def _faults(resolved: ResolvedOptions) -> None:
    """Translate Paddle's options about restarts and timeouts."""
    level, origin = resolved.values["elastic_level"], said(resolved, "elastic_level")
    if resolved.given("elastic_level") and level == -1:
        resolved.offer("max_restarts", 0, resolved.source("elastic_level"), origin)
        resolved.remark(f"{origin}=-1: the first worker failure ends the job; lost nodes are still waited for")
    elif resolved.given("elastic_level"):
        resolved.remark(f"{origin}={level}: a failed worker is restarted on its node, up to --max-restarts in total")
    if resolved.given("elastic_timeout"):
        seconds = float(resolved.values["elastic_timeout"])
        nodes = parse_nnodes(resolved.values["nnodes"])
        fixed = nodes.minimum == nodes.maximum
        _means(resolved, "elastic_timeout", "recover_timeout", seconds * (TIMES_WHEN_FIXED if fixed else 1))
        if not fixed:
            _means(resolved, "elastic_timeout", "join_grace", seconds)


def _workers(resolved: ResolvedOptions) -> None:
    """Set the variables through which Paddle's launcher passes these options to its workers. Raises
    ``SettingError``."""
    backend = resolved.values["backend"]
    if backend not in ("auto", "gloo", "nccl", "bkcl"):
        why = "trainers of several kinds are not supported" if backend == "heter" else "is not one of Paddle's backends"
        raise SettingError(said(resolved, "backend"), backend, why, "Use gloo, nccl, bkcl or auto")
    if backend != "auto":
        resolved.environment["PADDLE_DISTRI_BACKEND"] = backend
    if resolved.given("auto_cluster_config"):
        resolved.environment["PADDLE_AUTO_CLUSTER"] = str(int(resolved.values["auto_cluster_config"]))
    path = resolved.values["auto_parallel_config"]
    if path:
        mode = _tuner_mode(said(resolved, "auto_parallel_config"), path)
        if mode != "run_only":
            why = f"its tuner_run_mode is {mode}, but edl has no tuner"
            advice = "Run the tuner first, then set tuner_run_mode to run_only"
            raise SettingError(said(resolved, "auto_parallel_config"), path, why, advice)
        resolved.environment["PADDLE_AUTO_PARALLEL_CONFIG"] = path
        resolved.environment["PADDLE_AUTO_PARALLEL_STAGE"] = "run"


def _tuner_mode(origin: str, path: str) -> str:
    """``tuner_run_mode`` in the JSON file of ``--auto_parallel_config``. Raises ``SettingError``."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise SettingError(origin, path, f"cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise SettingError(origin, path, "must be a JSON object")
    return str(content.get("tuner_run_mode", "tuner_and_run"))


# --- defaults --------------------------------------------------------------------------------------------------------


def _keep_to_paddles_ways(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    """Apply Paddle's defaults to options that were not given."""
    wanted: dict[str, Any] = {"log_layout": "paddle", "exit_code": "worker"}
    if resolved.values["run_mode"] != "ps" and not any(
        resolved.values[name] for name in (*_SIZES_OF_SERVERS, "trainer_num")
    ):
        wanted["nproc_per_node"] = str(paddle_devices()[1] or 1)
    if resolved.script and not resolved.script.endswith((".py", ".pyxes")) and not resolved.values["module"]:
        wanted["no_python"] = True  # as in Paddle: anything else is a program
    for name, value in wanted.items():
        if not resolved.given(name):
            resolved.values[name] = value
    for name in ("http_proxy", "https_proxy"):
        if env.get(name):
            # Removed from the workers only: the launcher may need the proxy for its checkpoints.
            resolved.for_workers[name] = None
            resolved.for_workers[f"{name}_original"] = env[name]
            resolved.remark(
                f"{name} is removed from the workers' environment, as Paddle does; they find it as {name}_original"
            )
