"""The settings of one launcher: its options, parsed and checked."""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.agent.workers import torch_environment
from edl.agent.workers.paddle_environment import NOWHERE, ScriptPlaces
from edl.checkpoint.memory.copy_policy import Copying
from edl.config import JobSpec, LogPlan, NodeRange, ScriptServers, Standby
from edl.errors import SettingError
from edl.job_records import Training
from edl.notify.settings import NO_NOTIFICATIONS, NotifySettings
from edl.ports import WorkerCommand
from edl.types import JobId, NodeId
from edl.watch.table import DEFAULT_LIMITS, WatchLimits
from edl.web.settings import HttpSettings
from edl.wire.address import check_host
from edl.wire.node_requests import OptionValue
from edl.wire.secret import Secret


class Backend(enum.Enum):
    """The kind of the job's store."""

    ETCD = "etcd"
    """An existing etcd cluster."""
    EMBEDDED = "etcd-embedded"
    """An etcd whose members the launchers run."""


CONF_KEYS = {
    "data_dir": str,
    "request_timeout": float,
    "connect_timeout": float,
    "ca": str,
    "cert": str,
    "key": str,
    "user": str,
    "password": str,
}
"""Keys of ``--rdzv-conf`` that edl defines, and the types of their values."""


CONNECT_TIMEOUT_S = 10.0
"""Default of ``connect_timeout`` in ``--rdzv-conf``."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Endpoints, credentials and time limits of the store."""

    backend: Backend
    endpoints: tuple[str, ...] = ()
    """``host:port`` of each member; empty: a private store."""
    data_dir: str = ""
    """Folder for an embedded member's data; empty: a folder in the temporary directory, named after job and host."""
    request_timeout_s: float = 2.0
    """Timeout of one call in seconds, after which it is repeated or sent to another member."""
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    """Seconds that a launcher tries to reach the store before it gives up."""
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    secret: Secret | None = field(default=None, repr=False)
    """The job's secret; None: the job has none."""
    secret_file: str = field(default="", repr=False)
    """The file from which ``secret`` was read; empty: it was given otherwise."""


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Limits of this node's in-memory checkpoints, and the checkpoint directory."""

    memory_bytes: int = 0
    """Limit on commits and copies of other nodes' commits; 0: half of the memory that is free at the start."""
    checkpoint_dir: str = ""
    """Path or fsspec URL, the same on all nodes; empty: none."""
    keep_last: int = 3
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Checkpoints whose commit number is a multiple of this are kept permanently; 0: none."""
    adopt: bool = False
    """Whether to take over the checkpoints of another job."""
    save_timeout_s: float = 600.0
    """Seconds that the end of the job or of this launcher, or the next world, waits for saved commits to be written."""
    copying: Copying = Copying.AUTO
    """When commits are copied to another node."""
    copy_rate: int = 0
    """Limit in bytes per second on copies sent; 0: no limit."""


@dataclass(frozen=True, slots=True)
class HistorySettings:
    """The files of the job's history on this node."""

    folder: str = ""
    """Absolute path of the history directory; empty: none."""
    most_bytes: int = 64 << 20
    """Limit on the files of one job in it; 0: no limit."""


WEEK_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class DenylistSettings:
    """The list of bad devices and machines that jobs share."""

    where: str = ""
    """``store``: the job's etcd; else a path or URL; empty: there is none."""
    keep_s: float = WEEK_S
    """Seconds until an entry that this job adds expires; 0: never."""

    def __post_init__(self) -> None:
        if not 0 <= self.keep_s < math.inf:
            raise SettingError("--denylist-for", self.keep_s, "must be a number of seconds, 0 or more")


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """The script's directories that are kept alike on all nodes."""

    roots: tuple[str, ...] = ()
    """Absolute paths; empty: none."""
    timeout_s: float = 600.0
    """Seconds without progress after which workers no longer wait for the newest files, and fail."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The pservers of one launcher."""

    count: int = 0
    ports: tuple[int, ...] = ()
    """One port for each; empty: any free ports."""
    host: str = ""
    """Address at which trainers reach them; empty: that of the node."""
    memory_bytes: int = 0
    """Limit on the rows of each pserver; 0: half of the memory that is free at the start, divided among them."""
    listed: tuple[str, ...] = ()
    """Addresses of all pservers of the job, if ``--servers`` lists them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The job's range of nodes, and what runs on this node."""

    nodes: NodeRange
    """Number of nodes with workers."""
    slots: int
    """Number of workers on this node, including pservers that run the script; 0: none."""
    servers: ServerSettings = ServerSettings()
    """edl's own pservers on this node."""
    training: Training | None = None
    """Training settings of a job with edl's own pservers; None: any other job."""
    scripts: ScriptPlaces = NOWHERE
    """Which workers on this node are pservers that run the script."""
    script_servers: ScriptServers = field(default_factory=ScriptServers)
    """The whole job's pservers that run the script."""


@dataclass(frozen=True, slots=True)
class NoticeSettings:
    """The source of preemption notices."""

    provider: str
    """A key of ``preemption_notices.PROVIDERS``."""
    base: str
    """Base URL of the metadata service, without a trailing slash."""


@dataclass(frozen=True, slots=True)
class LeaveSettings:
    """When and how this node leaves the job."""

    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR2)
    """Signals on which the node drains."""
    exit_code: int = 0
    """Exit status of a launcher that has drained while the job continues."""
    notice: NoticeSettings | None = None
    """The source of preemption notices; None: none is polled."""
    passed: tuple[int, ...] = ()
    """Further signals on which the node leaves; its workers get the same signal (``--signals-to-handle``)."""
    handled: str = torch_environment.SIGNALS
    """``--signals-to-handle`` as given, for the workers' environment."""
    forwarded: tuple[int, ...] = (signal.SIGUSR1,)
    """Signals that are only forwarded to the workers."""


@dataclass(frozen=True, slots=True)
class ReaderPool:
    """The remote readers of one launcher, which serve all trainers of the job."""

    count: int = 0
    capacity: int = 16
    """Number of streams that each reader serves at once."""
    functions: tuple[str, ...] = ()
    """Functions that trainers may run in readers, as ``module:function``."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The command of this node's workers, and how they are started."""

    command: WorkerCommand
    standby: Standby = Standby.FORK
    preload: tuple[str, ...] = ()
    """Modules to import ahead of the workers, in addition to those found in the script."""
    learn: bool = True
    """Whether to import ahead what the workers are seen to import."""
    learn_bytes: int = 2 << 30
    """Most memory that these imports may take."""
    role: str = ""
    """torchrun's role of the workers; empty: ``default``."""
    python: str = ""
    """The workers' interpreter; empty: the launcher's own."""
    virtual_local_rank: bool = False
    """Whether each worker sees one device only, and gets ``LOCAL_RANK`` 0."""
    cores: tuple[tuple[int, ...], ...] = ()
    """The processor cores that each slot's worker is bound to; empty: no binding."""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Changes to the workers' environment; None removes a variable."""
    scripts: ScriptPlaces = NOWHERE
    """Which of the workers are pservers that run the script."""


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """How the end of the job is reported: files and exit status."""

    error_file: str = ""
    """File in which the program that started this launcher expects a failed job's error (``TORCHELASTIC_ERROR_FILE``);
    empty: none."""
    file: str = ""
    """File for a JSON report about the end of the job, success included; empty: none."""
    worker_status: bool = False
    """Whether the launcher of a failed job exits with the status of the worker that failed first, not with edl's."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What other nodes learn of this one."""

    name: NodeId
    rank: int = -1
    """Position that this node asks for, from 0; -1: any."""
    index: int = -1
    """The scheduler's number for this node; -1 for none."""
    local_addr: str = ""
    """Address other nodes reach this one at; empty: the one that leads to the store."""
    rack: str = ""
    """Where it stands: copies of its commits prefer another rack."""
    host_id: str = ""
    """Name of the host in the denylist."""

    def __post_init__(self) -> None:
        check_host("--local-addr", self.local_addr, self.local_addr)


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """All settings of one launcher, as ``compose`` takes them."""

    spec: JobSpec
    store: StoreSettings
    workers: WorkerSettings
    slots: int
    node: NodeSettings
    logs: LogPlan
    state: StateSettings
    sync: SyncSettings = SyncSettings()
    history: HistorySettings = HistorySettings()
    denylist: DenylistSettings = DenylistSettings()
    readers: ReaderPool = ReaderPool()
    """Remote readers that run beside the workers."""
    servers: ServerSettings = ServerSettings()
    """Pservers that run beside the workers."""
    http: HttpSettings | None = None
    """Settings of the HTTP interface; None: no HTTP."""
    spare_slots: int = 0
    """Number of idle slots that replace dropped ones."""
    leave: LeaveSettings = LeaveSettings()
    limits: WatchLimits = DEFAULT_LIMITS
    """Limits of the watchdogs."""
    otlp_endpoint: str = ""
    """URL of the collector to which traces are sent; empty: none are."""
    health_probes: tuple[str, ...] = ()
    """The user's own probes of this node (``--health-probe``), as ``module:function``."""
    notify: NotifySettings = NO_NOTIFICATIONS
    report: ReportSettings = ReportSettings()
    arguments: tuple[str, ...] = ()
    """The command line from which these settings come, without the program."""
    options: tuple[OptionValue, ...] = field(default=(), repr=False)
    """All options with their sources, for ``edl config``."""
    remarks: tuple[str, ...] = ()
    """Lines for the user, printed once at the start."""
    allowed: tuple[str, ...] = ()
    """Aspects in which this launcher may differ from the job's founder (``--allow-differences``)."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """The command line of a launcher, and what ``edl.launch.api`` adds to it."""

    arguments: tuple[str, ...] = ()
    """Without the program, in one spelling (see ``with_both_spellings``). Empty for a function: no other launcher can
    be started for it, and the arguments may contain a password."""
    command: WorkerCommand | None = None
    """The function that the workers call; None: the command line names a script."""
    report_file: str = ""
    """``ReportSettings.file``."""


@dataclass(frozen=True, slots=True)
class HelperSettings:
    """Settings of a launcher that runs helper processes only."""

    job: JobId
    store: StoreSettings
    node: str
    """Name of the node; the names of its processes begin with it."""
    local_addr: str
    """Address at which trainers reach the processes; empty: this host's address on the route to the store."""
    recover_s: float
    """Seconds to wait for the job to begin."""
    grace_s: float
    """Seconds that a process may take to finish its work when it has to end."""

    def __post_init__(self) -> None:
        check_host("--local-addr", self.local_addr, self.local_addr)


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """Settings of a launcher with ``--role=reader``."""

    helper: HelperSettings
    readers: ReaderPool


@dataclass(frozen=True, slots=True)
class PserverSettings:
    """Settings of a launcher with ``--role=pserver``."""

    helper: HelperSettings
    servers: ServerSettings
    checkpoint_dir: str = ""
    log_folder: str = ""
    """Where each pserver has a file for its output, as under Paddle's launcher; empty: on the console."""
