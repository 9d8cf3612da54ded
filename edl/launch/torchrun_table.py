"""Every option of torchrun, and what becomes of each here: the one source of messages, docs/torchrun.md and the test.

From torch 2.13: ``torch/distributed/run.py``, ``launch.py``, ``elastic/rendezvous``. The defaults are torchrun's. A
test holds this table against the installed parser, so an option that torch adds makes it fail.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.launch.dropin_table import Fate, Row

HONOURED, EXPLAINED, REFUSED = Fate.HONOURED, Fate.EXPLAINED, Fate.REFUSED


def _pet(option: str) -> tuple[str, ...]:
    return ("PET_" + option.lstrip("-").replace("-", "_").upper(),)


def _row(option: str, fate: Fate, default: str, becomes: str = "", *, pet: bool = True, **more: str) -> Row:
    """A row of an option whose default ``PET_*`` can name."""
    variables = _pet(option) if pet else ()
    return Row(option, fate, becomes, default=default, variables=variables, **more)  # type: ignore[arg-type]


TORCHRUN_ROWS: tuple[Row, ...] = (
    _row("--nnodes", HONOURED, "1:1"),
    _row(
        *("--nproc-per-node", HONOURED, "1"),
        why="xpu counts accelerators as gpu does; the name of a private backend is refused: give a number",
    ),
    _row(
        *("--rdzv-backend", HONOURED, "static"),
        why="static and c10d: the launchers serve the store themselves; etcd and etcd-v2: a running etcd, by its v3 "
        "interface; a plug-in of torchrun.handlers is refused: the store is etcd",
        default_why="empty, which is what static is: a store that the launchers serve themselves",
    ),
    _row("--rdzv-endpoint", HONOURED, "", why="it may name several members of the store, with commas between"),
    _row(
        *("--rdzv-id", HONOURED, "none"),
        why="letters, digits, '.', '_' and '-' only: it is a part of names in the store and of folders",
        default_why="a job of one node gets a name of its own, any other is called default",
    ),
    _row(
        "--rdzv-conf",
        HONOURED,
        "",
        why="torchrun's keys are translated one by one, unknown keys are named and passed over",
    ),
    _row("--standalone", HONOURED, "False", why="a name given with --rdzv-id stays the job's"),
    _row(
        *("--max-restarts", HONOURED, "0"),
        why="it counts failures of workers in the whole job; nodes that come and go cost nothing",
        default_why="3: to survive failures is what edl is for; --max-restarts=0 is torchrun's",
    ),
    _row("--monitor-interval", EXPLAINED, "0.1", why="the end of a worker is seen at once, nothing is polled"),
    _row(
        *("--start-method", EXPLAINED, "spawn"),
        why="it says how functions are started; how scripts are is --standby",
    ),
    _row(
        *("--event-log-handler", EXPLAINED, "null"),
        why="the launcher says on the console what happens, edl events shows all of it, and --http-port serves it",
        advice="One that a program registers cannot be reached: the launcher does without torch. See edl events",
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
        why="every script runs in an interpreter that is there already; its folder comes first on sys.path, as with "
        "python SCRIPT, and the path need not be absolute",
    ),
    _row(
        *("--log-dir", HONOURED, ""),
        why="a launch makes JOB_NODE below it; where job and node have a name (--rdzv-id, --node-id) a second one "
        "makes JOB_NODE.2",
    ),
    _row(
        *("--redirects", HONOURED, "0"),
        why="a rank map may name ranks of two digits, which torchrun refuses, and no rank that this node lacks",
    ),
    _row("--tee", HONOURED, "0", why="as for --redirects; a console line begins with the role and the global rank"),
    _row("--log-line-prefix-template", HONOURED, "", "--log-prefix", since="2.14"),
    _row("--local-ranks-filter", HONOURED, "", why="ranks that this node lacks are refused"),
    _row("--duplicate-stdout-filters", HONOURED, "", since="2.10"),
    _row("--duplicate-stderr-filters", HONOURED, "", since="2.10"),
    _row(
        *("--node-rank", HONOURED, "0"),
        why="honoured whatever --rdzv-backend is, where torchrun wants static",
        default_why="none: places are given as nodes come, since not all of them can be 0",
    ),
    _row(
        *("--master-addr", HONOURED, "127.0.0.1", "--rdzv-endpoint"),
        why="with more than one node it names the store, with --master-port; workers find the address of rank 0's node "
        "in MASTER_ADDR, and a free port, another one in each round, in MASTER_PORT",
        default_why="none: 127.0.0.1 is every node's own address; with --master-port alone it holds, for nodes of one "
        "host",
    ),
    _row(
        *("--master-port", HONOURED, "", "--rdzv-endpoint"),
        why="see --master-addr; a job of one node needs no port of yours",
    ),
    _row("--local-addr", HONOURED, "", default_why="the address that leads to the store, not the host's full name"),
    _row(
        *("--logs-specs", REFUSED, ""),
        pet=False,
        why="a class from torchrun.logs_specs would need torch in the launcher; only the name default is taken",
        advice="Say it with --log-dir, --redirects, --tee, --local-ranks-filter and --log-prefix",
    ),
    _row(
        *("--numa-binding", HONOURED, ""),
        pet=False,
        why="the launcher binds workers itself and needs no numactl; it knows NVIDIA GPUs only",
        since="2.9",
    ),
    _row(
        *("--signals-to-handle", HONOURED, "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
        why="these four are handled even where the list leaves them out, since they would end the launcher on the "
        "spot; further ones stop this node and are passed to its workers, as there",
        since="2.10",
    ),
    _row(
        *("--shutdown-timeout", HONOURED, ""),
        why="it holds on every way out; fractions of seconds are taken",
        default_why="30, which is torchrun's, too, where TORCH_ELASTIC_SHUTDOWN_TIMEOUT says nothing",
        since="2.12",
    ),
    _row("--virtual-local-rank", HONOURED, "False", since="2.10"),
    _row(
        *("--print-completion", HONOURED, ""),
        pet=False,
        since="2.14",
        why="for bash, zsh and fish, without a further package",
    ),
    _row(
        *("--use-env", HONOURED, "False"),
        pet=False,
        why="of torch.distributed.launch; it holds unless --dialect=torch.distributed.launch is given, with which "
        "scripts get --local-rank=N as their first argument",
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
    """One key of ``--rdzv-conf``."""

    key: str
    fate: Fate
    becomes: str = ""
    """An option, or a key of ours."""
    why: str = ""
    allowed: tuple[str, ...] = ()
    """All values that it may have; empty: any number of seconds, or a path."""


CONF_KEYS: tuple[Key, ...] = (
    Key("join_timeout", HONOURED, "--recover-timeout"),
    Key("timeout", HONOURED, "--recover-timeout", "join_timeout wins"),
    Key("last_call_timeout", HONOURED, "--join-grace"),
    Key(
        "keep_alive_interval",
        HONOURED,
        "--lease-ttl",
        "times keep_alive_max_attempt: a node silent for so long is lost",
    ),
    Key("keep_alive_max_attempt", HONOURED, "--lease-ttl", "see keep_alive_interval"),
    Key("read_timeout", HONOURED, "connect_timeout", "how long to try to reach the store"),
    Key("ssl_cert", HONOURED, "cert"),
    Key("ssl_cert_key", HONOURED, "key"),
    Key("ca_cert", HONOURED, "ca"),
    Key("cacert", HONOURED, "ca"),
    Key("protocol", HONOURED, "etcds://", "https wants ca_cert", allowed=("http", "https")),
    Key("store_type", EXPLAINED, "", "the store is etcd, over the network", allowed=("tcp", "file")),
    Key("is_host", EXPLAINED, "", "a launcher serves the store where the endpoint is an address of its host"),
    Key("close_timeout", EXPLAINED, "", "a job that has ended is said to all at once"),
    Key("heartbeat_timeout", EXPLAINED, "", "a renewal of a lease has --lease-ttl for itself"),
    Key("rank", HONOURED, "--node-rank", "of a static rendezvous"),
    Key("etcd_prefix", EXPLAINED, "", "all keys are below /edl/JOB/"),
)
"""All that torchrun's backends read, and what becomes of each."""

KEYS = {key.key: key for key in CONF_KEYS}


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable beside ``PET_*`` that torchrun reads."""

    name: str
    fate: Fate
    becomes: str = ""
    why: str = ""
    quiet: bool = False
    """No remark: it changes nothing that anybody could miss."""


VARIABLES: tuple[Variable, ...] = (
    Variable("PYTHON_EXEC", HONOURED, "", "edl must be importable by that interpreter, or lie where this one has it"),
    Variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", HONOURED, "--shutdown-timeout"),
    Variable("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", HONOURED, "--log-prefix"),
    Variable("TORCHELASTIC_ERROR_FILE", HONOURED, "", "a failed job's report is written there, for an outer launcher"),
    Variable("OMP_NUM_THREADS", HONOURED, "", "1 in workers where a node has more than one and nobody has set it"),
    Variable(
        *("TORCHELASTIC_ENABLE_FILE_TIMER", EXPLAINED, "--hang-timeout"),
        why="there is no timer server for torch.distributed.elastic.timer",
    ),
    Variable(
        *("TORCHELASTIC_HEALTH_CHECK_PORT", EXPLAINED, "--http-port"),
        why="torch's own server does nothing outside of its makers' house; /healthz at --http-port does",
    ),
    Variable(
        *("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", EXPLAINED, "--hang-timeout"),
        why="workers that make no progress are found whatever state the kernel has them in",
    ),
    Variable("TORCHELASTIC_ETCD_BINARY_PATH", EXPLAINED, "", "etcd is found on the PATH, or comes with edl"),
    Variable(
        "TORCH_ELASTIC_WORKER_IDENTICAL", EXPLAINED, "", "nodes never ask one another for their sizes", quiet=True
    ),
    Variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", EXPLAINED, "", "no store is shared with the workers", quiet=True),
    Variable(
        "LOGLEVEL", EXPLAINED, "", "the launcher's own lines have no levels; workers find it as it is", quiet=True
    ),
)
"""All that torchrun reads. None of them is refused."""
