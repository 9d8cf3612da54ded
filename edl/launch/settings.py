"""What one launcher was told on its command line, checked."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field

from edl.config import JobSpec, LogPlan, Standby
from edl.ports import WorkerCommand
from edl.types import JobId
from edl.web.settings import HttpSettings


class Backend(enum.Enum):
    """Where the job's shared memory lives."""

    ETCD = "etcd"
    """A cluster that runs anyway."""
    EMBEDDED = "etcd-embedded"
    """Members that the launchers start themselves."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How to reach etcd."""

    backend: Backend
    endpoints: tuple[str, ...] = ()
    """``host:port`` of each member; empty for a private embedded one."""
    data_dir: str = ""
    """Folder of an embedded member's data; empty for one under the temporary directory, by job and host."""
    request_timeout_s: float = 2.0
    """How long one call may take before another member is asked or the call is made again."""
    connect_timeout_s: float = 10.0
    """How long a launcher tries to reach the store before it gives up."""
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class StateSettings:
    """What this node's state keeper may use."""

    memory_bytes: int = 0
    """Most that commits and copies of others' commits may take; 0 for half of what is free at the start."""
    checkpoint_dir: str = ""
    """Path or fsspec URL, the same for all nodes; empty for none."""
    keep_last: int = 3
    keep_every: int = 0
    """Commits whose number this divides are kept for good; 0 for none."""
    adopt: bool = False
    """Take over checkpoints of another job."""


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
class NoticeSettings:
    """Who tells that this host is about to be taken away."""

    provider: str
    base: str
    """URL of its metadata service, without a slash at its end."""


@dataclass(frozen=True, slots=True)
class LeaveSettings:
    """How this node leaves the job."""

    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR2)
    """On these it leaves in good order."""
    exit_code: int = 0
    """Status of a launcher that has left in good order while the job goes on."""
    notice: NoticeSettings | None = None
    """Who is asked for notices; None: nobody."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Everything compose.py needs."""

    spec: JobSpec
    store: StoreSettings
    command: WorkerCommand
    slots: int
    node: str
    node_rank: int
    local_addr: str
    """Address other nodes reach this one at; empty: the one that leads to the store."""
    standby: Standby
    preload: tuple[str, ...]
    logs: LogPlan
    state: StateSettings
    rack: str
    error_file: str
    """Where a failed job's report goes as JSON."""
    readers: int = 0
    """Processes beside the workers that read data for all trainers of the job."""
    reader_capacity: int = 16
    """Streams that each of them serves at once."""
    servers: ServerSettings = ServerSettings()
    """Parameter servers beside the workers."""
    http: HttpSettings | None = None
    """Where it answers HTTP; None: nowhere."""
    index: int = -1
    """The scheduler's number for this node; -1 for none."""
    leave: LeaveSettings = LeaveSettings()
    """On which signals and notices it leaves, and with which status."""
    arguments: tuple[str, ...] = ()
    """The command line that these settings come from, without the program."""
    remarks: tuple[str, ...] = ()
    """What the person who gave them should know, a line each."""


@dataclass(frozen=True, slots=True)
class HelperSettings:
    """What a launcher was told that only has processes which help a job."""

    job: JobId
    store: StoreSettings
    node: str
    """Begins the names of its processes."""
    local_addr: str
    """Address trainers reach them at; empty: the one that leads to the store."""
    recover_s: float
    """How long to wait for the job to appear."""
    grace_s: float
    """How long what is under way may take when a process has to end."""


@dataclass(frozen=True, slots=True)
class ReaderSettings(HelperSettings):
    """What a launcher with ``--role=reader`` was told."""

    count: int
    """Reader processes."""
    capacity: int
    """Streams that each of them serves at once."""


@dataclass(frozen=True, slots=True)
class PserverSettings(HelperSettings):
    """What a launcher with ``--role=pserver`` was told."""

    servers: ServerSettings
    checkpoint_dir: str = ""
