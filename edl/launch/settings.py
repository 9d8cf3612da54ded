"""One launcher's options after they have been checked."""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.agent.workers import torch_environment
from edl.agent.workers.paddle_environment import NOWHERE, ScriptPlaces
from edl.checkpoint.memory.copy_policy import Copying
from edl.config import JobSpec, LogPlan, NodeRange, ScriptServers, Standby
from edl.job_records import Training
from edl.ports import WorkerCommand
from edl.types import JobId, NodeId
from edl.web.settings import HttpSettings
from edl.wire.secret import Secret


class Backend(enum.Enum):
    """Where the job's shared memory lives."""

    ETCD = "etcd"
    """A cluster that runs anyway."""
    EMBEDDED = "etcd-embedded"
    """Members that the launchers start themselves."""


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
"""Keys of ``--rdzv-conf`` that edl defines."""


CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Endpoints, credentials and time limits of the store."""

    backend: Backend
    endpoints: tuple[str, ...] = ()
    """``host:port`` of each member; empty for a private embedded one."""
    data_dir: str = ""
    """Folder of an embedded member's data; empty for one under the temporary directory, by job and host."""
    request_timeout_s: float = 2.0
    """How long one call may take before another member is asked or the call is made again."""
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    """How long a launcher tries to reach the store before it gives up."""
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    secret: Secret | None = field(default=None, repr=False)
    """The job's, if it has one."""
    secret_file: str = field(default="", repr=False)
    """Where it was read; empty: it was given otherwise."""


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Limits and rates of this node's in-memory checkpoints."""

    memory_bytes: int = 0
    """Most that commits and copies of others' commits may take; 0 for half of what is free at the start."""
    checkpoint_dir: str = ""
    """Path or fsspec URL, the same for all nodes; empty for none."""
    keep_last: int = 3
    keep_every: int = 0
    """Commits whose number this divides are kept for good; 0 for none."""
    adopt: bool = False
    """Take over checkpoints of another job."""
    save_timeout_s: float = 600.0
    """How long the end of the job, or of this launcher, waits for saved commits to be written."""
    copying: Copying = Copying.AUTO
    """When commits go to another node as well."""
    copy_rate: int = 0
    """Most bytes a second for that; 0 for no limit."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Parameter servers of one launcher."""

    count: int = 0
    ports: tuple[int, ...] = ()
    """One for each; empty: whichever are free."""
    host: str = ""
    """Address that trainers reach them at; empty: that of the node."""
    memory_bytes: int = 0
    """Most that the rows of each of them may take; 0: half of what is free at the start, split among them."""
    listed: tuple[str, ...] = ()
    """Addresses of all pservers of the job, if they were named one by one."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Nodes of the job, and what runs on this one."""

    nodes: NodeRange
    """Nodes with workers."""
    slots: int
    """Workers here, pservers that run the script among them; 0: none."""
    servers: ServerSettings = ServerSettings()
    """Pservers of edl's own here."""
    training: Training | None = None
    """Training settings of a job with pservers; None without them."""
    scripts: ScriptPlaces = NOWHERE
    """Which workers here are pservers that run the script."""
    script_servers: ScriptServers = field(default_factory=ScriptServers)
    """Pservers of the whole job."""


@dataclass(frozen=True, slots=True)
class NoticeSettings:
    """Sources of notices that this host will be reclaimed."""

    provider: str
    base: str
    """URL of its metadata service, without a slash at its end."""


@dataclass(frozen=True, slots=True)
class LeaveSettings:
    """Preemption and shutdown of this node."""

    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR2)
    """On these it leaves in good order."""
    exit_code: int = 0
    """Status of a launcher that has left in good order while the job goes on."""
    notice: NoticeSettings | None = None
    """The source of preemption notices; None if there is none."""
    passed: tuple[int, ...] = ()
    """On these it leaves as well, and its workers get the same one (``--signals-to-handle``)."""
    handled: str = torch_environment.SIGNALS
    """``--signals-to-handle`` as it was given, for what reads it in workers."""
    forwarded: tuple[int, ...] = (signal.SIGUSR1,)
    """These are the workers' business: they are passed on, and nothing else is done."""


@dataclass(frozen=True, slots=True)
class ReaderPool:
    """Processes that read data for all trainers of the job."""

    count: int = 0
    capacity: int = 16
    """Streams that each of them serves at once."""
    functions: tuple[str, ...] = ()
    """Functions that trainers may run in readers, as ``module:function``."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The command of this node's workers, and how they are started."""

    command: WorkerCommand
    standby: Standby = Standby.FORK
    preload: tuple[str, ...] = ()
    """Modules to import ahead of them, beside those found in the script."""
    role: str = ""
    """torchrun's role of the workers; empty: ``default``."""
    python: str = ""
    """Their interpreter; empty: the launcher's own."""
    virtual_local_rank: bool = False
    """Each of them sees one device, and ``LOCAL_RANK`` is 0."""
    cores: tuple[tuple[int, ...], ...] = ()
    """Processor cores by slot that they are bound to; empty: they are not."""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """For them alone, over the launcher's environment; None: taken away."""
    scripts: ScriptPlaces = NOWHERE
    """Which of them are pservers that run the script."""


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """Files that remain after the job has ended."""

    error_file: str = ""
    """Where the program that started this launcher looks for a failed job's error (``TORCHELASTIC_ERROR_FILE``);
    empty: nowhere."""
    file: str = ""
    """Where it goes as JSON how the job has ended, also with success; empty: nowhere."""
    worker_status: bool = False
    """A job that fails ends with the status of the worker that failed first, not with ours."""


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
    readers: ReaderPool = ReaderPool()
    """Readers beside the workers."""
    servers: ServerSettings = ServerSettings()
    """Parameter servers beside the workers."""
    http: HttpSettings | None = None
    """Where it answers HTTP; None: nowhere."""
    spare_slots: int = 0
    """Idle slots that take the place of dropped ones."""
    leave: LeaveSettings = LeaveSettings()
    """On which signals and notices it leaves, and with which status."""
    report: ReportSettings = ReportSettings()
    arguments: tuple[str, ...] = ()
    """The command line that these settings come from, without the program."""
    remarks: tuple[str, ...] = ()
    """Remarks for the user, one line each."""
    allowed: tuple[str, ...] = ()
    """In what this launcher may differ from the one that has founded the job."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """The command line of a launcher, and what ``edl.launch.api`` adds to it."""

    arguments: tuple[str, ...] = ()
    """Without the program, in one spelling (see ``with_both_spellings``). Empty for a function: no other launcher can
    be started for it, and the arguments may contain a password."""
    command: WorkerCommand | None = None
    """The function that is called; None: the command line says what the workers run."""
    report_file: str = ""
    """See ``ReportSettings``."""


@dataclass(frozen=True, slots=True)
class HelperSettings:
    """Options of a launcher that runs helper processes only."""

    job: JobId
    store: StoreSettings
    node: str
    """Begins the names of its processes."""
    local_addr: str
    """Address trainers reach them at; empty: the one that leads to the store."""
    recover_s: float
    """How long to wait for the job to appear."""
    grace_s: float
    """Seconds that pending work may take when a process has to end."""


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """Options of a launcher with ``--role=reader``."""

    helper: HelperSettings
    readers: ReaderPool


@dataclass(frozen=True, slots=True)
class PserverSettings:
    """Options of a launcher with ``--role=pserver``."""

    helper: HelperSettings
    servers: ServerSettings
    checkpoint_dir: str = ""
    log_folder: str = ""
    """Where each pserver has a file for its output, as under Paddle's launcher; empty: on the console."""
