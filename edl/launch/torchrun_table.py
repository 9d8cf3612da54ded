"""All options and variables of torchrun, and what edl does with each.

Source: torch 2.13, ``torch/distributed/run.py``, ``launch.py``, ``elastic/rendezvous``. Defaults are torchrun's. Tests
compare this table with the installed parser and with docs/torchrun.md, so a new option in torch makes one fail.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.launch.dropin_table import Fate, Row

HONOURED, EXPLAINED, REFUSED = Fate.HONOURED, Fate.EXPLAINED, Fate.REFUSED


def _pet(option: str) -> tuple[str, ...]:
    return ("PET_" + option.lstrip("-").replace("-", "_").upper(),)


def _row(option: str, fate: Fate, default: str, becomes: str = "", *, pet: bool = True, **more: str) -> Row:
    """A row for an option of torchrun. ``pet``: whether ``PET_*`` sets it."""
    variables = _pet(option) if pet else ()
    return Row(option, fate, becomes, default=default, variables=variables, **more)  # type: ignore[arg-type]


TORCHRUN_ROWS: tuple[Row, ...] = (
    _row("--nnodes", HONOURED, "1:1"),
    _row(
        *("--nproc-per-node", HONOURED, "1"),
        why="xpu counts accelerators as gpu does; the name of a private backend is refused, use a number",
    ),
    _row(
        *("--rdzv-backend", HONOURED, "static"),
        why="static and c10d: the launchers serve the store themselves; etcd and etcd-v2: a running etcd, through its "
        "v3 API; a plug-in of torchrun.handlers is refused: the store is etcd",
        default_why="empty, with the same meaning as static: the launchers run the store themselves",
    ),
    _row("--rdzv-endpoint", HONOURED, "", why="it may name several members of the store, with commas between"),
    _row(
        *("--rdzv-id", HONOURED, "none"),
        why="letters, digits, '.', '_' and '-' only: it becomes part of key and folder names",
        default_why="a job of one node gets its own name, any other is called default",
    ),
    _row(
        "--rdzv-conf",
        HONOURED,
        "",
        why="torchrun's keys are translated one by one; unknown keys are reported and ignored",
    ),
    _row("--standalone", HONOURED, "False", why="a name given with --rdzv-id is kept"),
    _row(
        *("--max-restarts", HONOURED, "0"),
        why="it counts worker failures in the whole job; nodes that join or leave do not count",
        default_why="3, because edl is meant to survive failures; --max-restarts=0 is torchrun's default",
    ),
    _row("--monitor-interval", EXPLAINED, "0.1", why="the end of a worker is noticed at once, without polling"),
    _row(
        *("--start-method", EXPLAINED, "spawn"),
        why="it selects how functions are started; for scripts see --standby",
    ),
    _row(
        *("--event-log-handler", EXPLAINED, "null"),
        why="events are printed on the console, shown by edl events, and served at --http-port",
        advice="Handlers that a program registers are not available, because the launcher does not import torch. "
        "See edl events",
        since="2.8",
    ),
    _row(
        *("--role", HONOURED, "default"),
        why="reader, pserver and, in a job with parameter servers, trainer are edl's own roles",
    ),
    _row("--module", HONOURED, "False"),
    _row("--no-python", HONOURED, "False"),
    _row(
        *("--run-path", HONOURED, "False"),
        why="scripts always run in a prepared interpreter; the script's folder comes first on sys.path, as with "
        "python SCRIPT, and the path need not be absolute",
    ),
    _row(
        *("--log-dir", HONOURED, ""),
        why="a launch creates JOB_NODE in it; if job and node have names (--rdzv-id, --node-id), a second launch "
        "creates JOB_NODE.2",
    ),
    _row(
        *("--redirects", HONOURED, "0"),
        why="ranks may have two digits, which torchrun refuses; ranks that this node does not have are refused",
    ),
    _row("--tee", HONOURED, "0", why="as for --redirects; console lines begin with the role and the global rank"),
    _row("--log-line-prefix-template", HONOURED, "", "--log-prefix", since="2.14"),
    _row("--local-ranks-filter", HONOURED, "", why="ranks that this node does not have are refused"),
    _row("--duplicate-stdout-filters", HONOURED, "", since="2.10"),
    _row("--duplicate-stderr-filters", HONOURED, "", since="2.10"),
    _row(
        *("--node-rank", HONOURED, "0"),
        why="it applies with every --rdzv-backend, while torchrun requires static",
        default_why="none: nodes get ranks in the order they join, because not all of them can be 0",
    ),
    _row(
        *("--master-addr", HONOURED, "127.0.0.1", "--rdzv-endpoint"),
        why="with more than one node it names the host of the store, with --master-port; workers find the address "
        "of rank 0's node in MASTER_ADDR, and a free port that changes with each round in MASTER_PORT",
        default_why="none: 127.0.0.1 is every node's own address; it applies if only --master-port is given, for nodes "
        "on one host",
    ),
    _row(
        *("--master-port", HONOURED, "", "--rdzv-endpoint"),
        why="see --master-addr; a job of one node needs no port",
    ),
    _row(
        "--local-addr",
        HONOURED,
        "",
        default_why="the address from which this host reaches the store, not its full host name",
    ),
    _row(
        *("--logs-specs", REFUSED, ""),
        pet=False,
        why="a class from torchrun.logs_specs would need torch in the launcher; only the name default is accepted",
        advice="Use --log-dir, --redirects, --tee, --local-ranks-filter and --log-prefix",
    ),
    _row(
        *("--numa-binding", HONOURED, ""),
        pet=False,
        why="the launcher binds workers itself and needs no numactl; it knows NVIDIA GPUs only",
        since="2.9",
    ),
    _row(
        *("--signals-to-handle", HONOURED, "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
        why="these four are handled even if the list omits them, because they would kill the launcher; "
        "additional ones stop this node and are passed to its workers, as in torchrun",
        since="2.10",
    ),
    _row(
        *("--shutdown-timeout", HONOURED, ""),
        why="it applies whenever workers are stopped; fractions of seconds are accepted",
        default_why="30, which is also torchrun's default if TORCH_ELASTIC_SHUTDOWN_TIMEOUT is not set",
        since="2.12",
    ),
    _row("--virtual-local-rank", HONOURED, "False", since="2.10"),
    _row(
        *("--print-completion", HONOURED, ""),
        pet=False,
        since="2.14",
        why="for bash, zsh and fish, without an additional package",
    ),
    _row(
        *("--use-env", HONOURED, "False"),
        pet=False,
        why="an option of torch.distributed.launch; always on unless --dialect=torch.distributed.launch is given, "
        "with which scripts get --local-rank=N as their first argument",
    ),
)

FLAGS = frozenset(row.name for row in TORCHRUN_ROWS if row.default == "False")
"""Options without a value."""
NAMES = frozenset(row.option for row in TORCHRUN_ROWS)


def row_of(name: str) -> Row:
    """The row of an option. ``name``: with underscores, without dashes. Raises ``KeyError``."""
    return _BY_NAME[name]


_BY_NAME = {row.name: row for row in TORCHRUN_ROWS}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of torchrun's ``--rdzv-conf``."""

    key: str
    fate: Fate
    becomes: str = ""
    """The corresponding option of edl, or edl's own key; empty: none."""
    why: str = ""
    allowed: tuple[str, ...] = ()
    """All allowed values; empty: any."""


CONF_KEYS: tuple[Key, ...] = (
    Key("join_timeout", HONOURED, "--recover-timeout"),
    Key("timeout", HONOURED, "--recover-timeout", "join_timeout takes precedence"),
    Key("last_call_timeout", HONOURED, "--join-grace"),
    Key(
        "keep_alive_interval",
        HONOURED,
        "--lease-ttl",
        "times keep_alive_max_attempt: a node that is silent for this long is lost",
    ),
    Key("keep_alive_max_attempt", HONOURED, "--lease-ttl", "see keep_alive_interval"),
    Key("read_timeout", HONOURED, "connect_timeout", "how long to try to reach the store"),
    Key("ssl_cert", HONOURED, "cert"),
    Key("ssl_cert_key", HONOURED, "key"),
    Key("ca_cert", HONOURED, "ca"),
    Key("cacert", HONOURED, "ca"),
    Key("protocol", HONOURED, "etcds://", "https requires ca_cert", allowed=("http", "https")),
    Key("store_type", EXPLAINED, "", "the store is etcd, over the network", allowed=("tcp", "file")),
    Key("is_host", EXPLAINED, "", "a launcher runs a member of the store if the endpoint is an address of its host"),
    Key("close_timeout", EXPLAINED, "", "the end of a job is announced to all nodes at once"),
    Key("heartbeat_timeout", EXPLAINED, "", "renewals of a lease are bounded by --lease-ttl"),
    Key("rank", HONOURED, "--node-rank", "of a static rendezvous"),
    Key("etcd_prefix", EXPLAINED, "", "all keys are below /edl/JOB/"),
)
"""All keys that torchrun's backends read, and what edl does with each."""

KEYS = {key.key: key for key in CONF_KEYS}


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable other than ``PET_*`` that torchrun reads."""

    name: str
    fate: Fate
    becomes: str = ""
    why: str = ""
    quiet: bool = False
    """Whether it is ignored without a remark, because it has no visible effect in torchrun either."""


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "PYTHON_EXEC",
        HONOURED,
        "",
        "that interpreter must be able to import the launcher's own copy of edl, which its workers use",
    ),
    Variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", HONOURED, "--shutdown-timeout"),
    Variable("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", HONOURED, "--log-prefix"),
    Variable(
        "TORCHELASTIC_ERROR_FILE",
        HONOURED,
        "",
        "the report of a failed job, or why the launcher has failed, is written there, for an outer launcher",
    ),
    Variable("OMP_NUM_THREADS", HONOURED, "", "1 in the workers of a node that has several, unless it is set"),
    Variable(
        *("TORCHELASTIC_ENABLE_FILE_TIMER", EXPLAINED, "--hang-timeout"),
        why="there is no timer server for torch.distributed.elastic.timer",
    ),
    Variable(
        *("TORCHELASTIC_HEALTH_CHECK_PORT", EXPLAINED, "--http-port"),
        why="torch's public releases contain only a stub; use /healthz at --http-port",
    ),
    Variable(
        *("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", EXPLAINED, "--hang-timeout"),
        why="workers that make no progress are detected in any process state",
    ),
    Variable("TORCHELASTIC_ETCD_BINARY_PATH", EXPLAINED, "", "etcd is found on the PATH, or comes with edl"),
    Variable(
        "TORCH_ELASTIC_WORKER_IDENTICAL", EXPLAINED, "", "nodes never ask one another for their sizes", quiet=True
    ),
    Variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", EXPLAINED, "", "no store is shared with the workers", quiet=True),
    Variable(
        "LOGLEVEL", EXPLAINED, "", "the launcher's own log lines have no levels; workers get it unchanged", quiet=True
    ),
)
"""All further variables that torchrun reads, and what edl does with each."""
