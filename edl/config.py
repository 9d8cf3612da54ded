"""Settings, validated once and trusted afterwards.

``JobSpec`` holds what all launchers of a job must agree on: the first launcher writes it to the store and the others
compare theirs with it. Each record validates itself on construction, with an error that names the value. Besides click,
this is the only module that reads the environment.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.errors import SettingError
from edl.job_records import DataFiles, HealthRules, SchedulerChoice, SizeOwner, StragglerRules, Training
from edl.types import JobId

MAX_NODES = 100_000
"""Upper limit of ``--nnodes``: far above what one Master serves, low enough to catch a typing mistake."""


class FaultTolerance(enum.Enum):
    """The reaction to a lost node. A failed worker on a living node is always restarted in place."""

    RECOVER = "recover"
    """Keep the size: wait for a replacement of the same rank, and fail after ``recover_timeout_s``."""
    SHRINK = "shrink"
    """Continue with fewer nodes and never grow again."""
    ELASTIC = "elastic"
    """Continue with fewer nodes, and grow again when nodes join."""


class Standby(enum.Enum):
    """The way in which the next worker processes are kept warm."""

    FORK = "fork"
    """A process that has imported the framework and forks a worker on demand."""
    SPAWN = "spawn"
    """Separate processes that have imported the framework and wait to be given a worker's environment."""
    NONE = "none"
    """Start a new process each time, without any warm-up."""


@dataclass(frozen=True, slots=True)
class NodeRange:
    """The number of nodes that a world may have.

    A world's node count is a multiple of ``unit``. A world of a size outside ``lowest .. highest`` never forms.
    """

    minimum: int
    maximum: int
    unit: int = 1

    def __post_init__(self) -> None:
        shown = f"{self.minimum}:{self.maximum}"
        if self.minimum < 1:
            raise SettingError("--nnodes", shown, "the minimum must be at least 1", "Use N or MIN:MAX, such as 1:4")
        if self.maximum < self.minimum:
            raise SettingError(
                "--nnodes",
                shown,
                f"the maximum {self.maximum} is below the minimum {self.minimum}",
                f"Write the smaller number first: --nnodes={self.maximum}:{self.minimum}",
            )
        if self.maximum > MAX_NODES:
            raise SettingError("--nnodes", shown, f"at most {MAX_NODES} nodes are supported")
        if self.unit < 1:
            raise SettingError("--node-unit", self.unit, "must be at least 1")
        if self.lowest > self.highest:
            raise SettingError(
                "--node-unit",
                self.unit,
                f"no node count within --nnodes={shown} is a multiple of {self.unit}",
                f"Raise the maximum to {self.lowest} or lower --node-unit",
            )

    @property
    def lowest(self) -> int:
        """Smallest world size in nodes that respects both bounds and the unit."""
        return -(-self.minimum // self.unit) * self.unit

    @property
    def highest(self) -> int:
        """Largest world size in nodes that respects both bounds and the unit."""
        return self.maximum // self.unit * self.unit

    def fit(self, available: int) -> int:
        """Largest allowed node count with ``available`` nodes; 0 if there are too few for any."""
        size = min(available, self.highest) // self.unit * self.unit
        return size if size >= self.lowest else 0

    def __str__(self) -> str:
        text = str(self.minimum) if self.minimum == self.maximum else f"{self.minimum}:{self.maximum}"
        return text if self.unit == 1 else f"{text} in units of {self.unit}"


def parse_nnodes(text: str, unit: int = 1) -> NodeRange:
    """Parse ``"4"`` or ``"1:4"``. Raises ``SettingError`` that quotes the text."""
    first, separator, second = text.partition(":")
    try:
        minimum = int(first)
        maximum = int(second) if separator else minimum
    except ValueError:
        raise SettingError("--nnodes", text, "not a number of nodes", "Use N or MIN:MAX, such as 2 or 1:4") from None
    return NodeRange(minimum, maximum, unit)


def _positive(name: str, value: float, *, zero_allowed: bool = False) -> None:
    if not (value >= 0 if zero_allowed else value > 0):  # written this way, it also rejects NaN
        raise SettingError(name, f"{value:g}", "must be 0 or more" if zero_allowed else "must be more than 0")


SHORTEST_LEARNT_HANG_S = 300.0
"""Default shortest limit that is learnt: evaluations, checkpoints and compilations rarely take longer."""


@dataclass(frozen=True, slots=True)
class HangTimeout:
    """When workers without progress count as hanging."""

    auto: bool = True
    """The limit is learnt from the job's own pauses."""
    seconds: float = SHORTEST_LEARNT_HANG_S
    """The limit, and if it is learnt the shortest one; 0: workers never count as hanging."""

    def __post_init__(self) -> None:
        _positive("--hang-timeout", self.seconds, zero_allowed=not self.auto)

    @property
    def on(self) -> bool:
        """Whether hangs are looked for."""
        return self.seconds > 0

    def __str__(self) -> str:
        """As on the command line."""
        if not self.auto:
            return f"{self.seconds:g}"
        return "auto" if self.seconds == SHORTEST_LEARNT_HANG_S else f"auto:{self.seconds:g}"


LEARNT_HANGS = HangTimeout()
NO_HANGS = HangTimeout(auto=False, seconds=0.0)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """All time-outs and pauses of a job, in seconds."""

    recover_s: float = 600.0
    """How long a job waits for enough nodes before it fails."""
    join_grace_s: float = 1.0
    """How long the first round waits for more nodes than the minimum; also how long a new node waits for another one
    that is still warming up, so that two joins cause one change."""
    lease_ttl_s: float = 3.0
    """A node that is silent for this long is considered dead. etcd grants no less than about 2 s (1 s when
    embedded)."""
    shutdown_s: float = 30.0
    """Time between SIGTERM and SIGKILL whenever a worker is stopped."""
    rejoin_s: float = 10.0
    """How long a worker that uses ``edl.run`` may take to leave a broken round before it is restarted."""
    boundary_s: float = 60.0
    """How long workers may take to reach an agreed step boundary before the round is interrupted."""
    hang: HangTimeout = LEARNT_HANGS
    """When workers without progress count as hanging."""
    spawn_s: float = 10.0
    """How long the fork server of a node may take to answer before it is killed and replaced."""
    warming_s: float = 120.0
    """How long the other nodes wait for a node that is importing its framework or starting workers ahead of a world."""
    loading_s: float = 1800.0
    """How long a world waits for the node that reads the state from the checkpoint directory."""
    restart_s: float = 30.0
    """Longest pause before workers that keep failing right after their start are started again; 0: no pause."""

    def __post_init__(self) -> None:
        _positive("--recover-timeout", self.recover_s)
        _positive("--join-grace", self.join_grace_s, zero_allowed=True)
        _positive("--shutdown-timeout", self.shutdown_s, zero_allowed=True)
        _positive("--rejoin-timeout", self.rejoin_s)
        _positive("--boundary-timeout", self.boundary_s)
        _positive("--spawn-timeout", self.spawn_s)
        _positive("--warming-timeout", self.warming_s)
        _positive("--loading-timeout", self.loading_s)
        _positive("--restart-pause", self.restart_s, zero_allowed=True)
        if not 1.0 <= self.lease_ttl_s <= 3600.0:
            raise SettingError("--lease-ttl", f"{self.lease_ttl_s:g}", "must be from 1 to 3600 seconds")


class LrRule(enum.Enum):
    """The rule by which the learning rate follows the size of a step."""

    NONE = "none"
    LINEAR = "linear"
    """In proportion to the size of the step."""
    SQRT = "sqrt"
    """In proportion to the square root of the size."""
    ADASCALE = "adascale"
    """By the gain that workers measure from the noise of their gradients."""
    USER = "user"
    """By a function that the script provides."""


MOST_SAMPLES = 1_000_000_000
"""Upper limit of every count of samples, workers or steps here: far above real use, low enough to catch a typing
mistake."""


@dataclass(frozen=True, slots=True)
class HyperPolicy:
    """How batch and learning rate follow the size of the world. With all zeros the script manages both itself."""

    global_batch: int = 0
    """Samples per step over all workers, the same at every size; 0: each worker keeps its own batch."""
    local_batch: int = 0
    """Most samples that a worker processes at once; 0: the script's own batch size."""
    rule: LrRule = LrRule.NONE
    warmup: int = 0
    """Number of commits over which a changed LR factor is phased in."""
    reference: int = 0
    """The size for which the script's LR is meant: samples with a global batch, otherwise workers; 0: the size of the
    first world."""
    logical_ranks: int = 0
    """Fixed number of logical ranks that are distributed over the workers; 0: none."""
    scale: float = 1.0
    """An additional factor of the LR. It can only be set by hand while the job runs."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--global-batch", self.global_batch),
            ("--local-batch", self.local_batch),
            ("--lr-reference", self.reference),
            ("--logical-ranks", self.logical_ranks),
            ("--lr-warmup", self.warmup),
        ):
            if not 0 <= value <= MOST_SAMPLES:
                raise SettingError(flag, value, f"must be from 0 to {MOST_SAMPLES}; 0 means not set")
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise SettingError("--lr-scale", f"{self.scale:g}", "must be more than 0, and finite")
        if self.logical_ranks and self.global_batch % self.logical_ranks:
            raise SettingError(
                "--global-batch",
                self.global_batch,
                f"cannot be split evenly over --logical-ranks={self.logical_ranks}",
                f"Take a multiple of {self.logical_ranks}",
            )

    @property
    def prescribes(self) -> bool:
        """Whether any field changes the batch or the learning rate."""
        return self != HyperPolicy(warmup=self.warmup, reference=self.reference)


@dataclass(frozen=True, slots=True)
class AutoscaleRules:
    """Whether and how the job chooses its own size from measured throughput; see ``edl.master.policies.autoscale``."""

    enabled: bool = False
    efficiency: float = 0.6
    """An additional node must contribute at least this share of what an average node contributes."""
    cooldown_s: float = 60.0
    """Least number of seconds between two changes of size by the policy."""

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise SettingError("--autoscale-efficiency", f"{self.efficiency:g}", "must be more than 0, and at most 1")
        _positive("--autoscale-cooldown", self.cooldown_s, zero_allowed=True)


@dataclass(frozen=True, slots=True)
class SlotRules:
    """When a slot of a node is dropped and used again; see ``edl.master.policies.slots``."""

    strikes: int = 2
    """A slot is dropped after this many failures of its own; 0: never automatically."""
    cooldown_s: float = 0.0
    """Seconds after which a dropped slot is used again; 0: never automatically."""

    def __post_init__(self) -> None:
        if self.strikes < 0:
            raise SettingError("--slot-strikes", self.strikes, "must be 0 or more", "0 never drops a slot by itself")
        _positive("--slot-cooldown", self.cooldown_s, zero_allowed=True)


@dataclass(frozen=True, slots=True)
class Replicas:
    """Workers that hold one replica of the model together, such as a tensor-parallel group. A world has whole replicas
    only, each of workers with consecutive ranks; a replica that loses a worker is out of the next world, or complete
    again."""

    size: int = 1
    """Workers of one replica."""
    slots: int = 0
    """Workers of each node, on which all launchers must agree; 0: nodes may differ, because ``size`` is 1."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise SettingError("--replica-size", self.size, "must be at least 1", "1: every worker has the whole model")
        if self.slots and self.size % self.slots and self.slots % self.size:
            raise SettingError(
                "--replica-size",
                self.size,
                f"nodes with {self.slots} workers can neither hold whole replicas nor share one evenly",
                "Make one of --replica-size and --nproc-per-node a multiple of the other",
            )

    @property
    def nodes(self) -> int:
        """Nodes that a replica needs; 1 if a node holds one or more."""
        return max(1, self.size // self.slots) if self.slots else 1

    def whole(self, slots: int) -> int:
        """How many of a node's usable slots a world can use."""
        return slots - slots % min(self.size, self.slots) if self.slots else slots


@dataclass(frozen=True, slots=True)
class ScriptServers:
    """Pservers that run the script themselves, as under Paddle's launcher. They occupy slots of the nodes, as trainers
    do."""

    each: int = 0
    """Number of slots, the first ones of each node, that are pservers; 0: pservers are listed one by one, or there are
    none."""
    servers: tuple[str, ...] = ()
    trainers: tuple[str, ...] = ()
    """Addresses (``host:port``) of all pservers and of all trainers, if they are listed one by one."""
    gloo: str = "1"
    """``--with_gloo``: with 1 trainers use Paddle's gloo, with 2 pservers as well, with 0 neither."""

    def __bool__(self) -> bool:
        return bool(self.each or self.servers)


class OnMismatch(enum.Enum):
    """The reaction to ranks that hold different parameters or optimizer values."""

    STOP = "stop"
    """End the job, so that a person can investigate."""
    ROLLBACK = "rollback"
    """Restart the ranks that differ, and continue from the last commit that was compared."""
    SYNC = "sync"
    """Take over the values of the majority, or of rank 0 if there is none, and continue."""


@dataclass(frozen=True, slots=True)
class VerifyRules:
    """When ranks compare the state they hold, and the reaction to a difference."""

    every: int = 0
    """Number of commits from one comparison to the next; 0: only after each restore."""
    on_mismatch: OnMismatch = OnMismatch.STOP

    def __post_init__(self) -> None:
        if self.every < 0:
            raise SettingError("--verify-state", self.every, "must be 0 or more", "0 compares after each restore only")

    @property
    def text(self) -> str:
        """The value of ``EDL_VERIFY`` in a worker: ``100:stop``."""
        return f"{self.every}:{self.on_mismatch.value}"

    @classmethod
    def parse(cls, text: str) -> VerifyRules:
        """The inverse of ``text``; an empty text gives the default. Raises ``SettingError``."""
        every, _, action = text.partition(":")
        try:
            return cls(int(every), OnMismatch(action)) if text else cls()
        except ValueError:
            raise SettingError("EDL_VERIFY", repr(text), "must be COMMITS:ACTION, such as 100:stop") from None


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The settings that every launcher of a job must agree on."""

    job: JobId
    nodes: NodeRange
    max_restarts: int = 3
    """Worker failures that the whole job survives. Nodes that join or leave do not count."""
    fault_tolerance: FaultTolerance = FaultTolerance.ELASTIC
    timeouts: Timeouts = field(default_factory=Timeouts)
    data: tuple[DataFiles, ...] = ()
    """Data sets that workers look up by name."""
    hyper: HyperPolicy = field(default_factory=HyperPolicy)
    servers: Training | None = None
    """How a job with parameter servers trains. None: a job without them, whose workers step together."""
    script_servers: ScriptServers = ScriptServers()
    """Parameter servers that run the script."""
    scheduler: SchedulerChoice | None = None
    """The scheduler that provides the nodes; None: launchers are started in some other way."""
    cooldown_s: float = 0.0
    """Seconds from one resize to the next."""
    autoscale: AutoscaleRules = field(default_factory=AutoscaleRules)
    slots: SlotRules = field(default_factory=SlotRules)
    health: HealthRules = field(default_factory=HealthRules)
    replicas: Replicas = field(default_factory=Replicas)
    verify: VerifyRules = field(default_factory=VerifyRules)
    stragglers: StragglerRules = field(default_factory=StragglerRules)
    sync_dirs: tuple[str, ...] = ()
    """The script's own directories that are kept alike on all nodes, as given (``--sync-dir``)."""

    @property
    def size_owner(self) -> str:
        """The scheduler and the owner of the size, such as ``statefulset/train (external)``; empty without a
        scheduler."""
        return f"{self.scheduler.text} ({self.scheduler.owner.value})" if self.scheduler else ""

    @property
    def sized_outside(self) -> bool:
        """Whether only the scheduler may decide how many nodes there are."""
        return self.scheduler is not None and self.scheduler.owner is SizeOwner.EXTERNAL

    @property
    def independent(self) -> bool:
        """Whether workers make steps without one another: when the world changes, the living ones continue."""
        return self.servers is not None

    def __post_init__(self) -> None:
        check_job_id(self.job)
        if self.max_restarts < 0:
            raise SettingError("--max-restarts", self.max_restarts, "must be 0 or more")
        _positive("--scale-cooldown", self.cooldown_s, zero_allowed=True)


def check_job_id(job: str) -> None:
    """Check a job id: one path segment of printable ASCII, at most 128 characters. Raises ``SettingError``."""
    if not job:
        raise SettingError("--rdzv-id", "''", "must not be empty", "Give the job a name, the same on every node")
    bad = sorted(
        {character for character in job if not (character.isascii() and (character.isalnum() or character in "._-"))}
    )
    if bad:
        listed = " ".join(repr(character) for character in bad)
        raise SettingError("--rdzv-id", repr(job), f"{listed} not allowed", "Use letters, digits, '.', '_' and '-'")
    if len(job) > 128:
        raise SettingError("--rdzv-id", repr(job), f"{len(job)} characters, at most 128 allowed")


def environment() -> dict[str, str]:
    """A copy of this process's environment. All code that does not get it through click gets it from here."""
    return dict(os.environ)


def changed(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """An environment with these changes applied; None removes a variable."""
    both = {**environment, **changes}
    return {name: value for name, value in both.items() if value is not None}


CREDENTIALS = ("EDL_RDZV_CONF", "PET_RDZV_CONF", "EDL_SECRET", "EDL_NOTIFY")
"""Variables that may hold a password or the job's secret. They are kept from workers, which run arbitrary code."""


def adopt(changes: Mapping[str, str | None]) -> None:
    """Change the environment of this process and of all that it starts. None removes a variable."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class StreamTarget(enum.Enum):
    """Destination of a worker's output stream."""

    CONSOLE = "console"
    FILE = "file"
    BOTH = "both"
    NOWHERE = "nowhere"
    """Neither: only the last lines are kept, for error reports."""


class LogLayout(enum.Enum):
    """The launcher whose conventions log files and console follow."""

    TORCHRUN = "torchrun"
    """Everything on the console; files only on request."""
    PADDLE = "paddle"
    """Everything in files, ``workerlog.N``, and on the console without a prefix."""


@dataclass(frozen=True, slots=True)
class LogPlan:
    """Where the workers of one launcher write. The maps are keyed by local rank; a rank that is not in a map has the
    default."""

    folder: str
    """Folder of this launcher, with a subfolder for each round. Empty: no files, not even error files."""
    temporary: bool = False
    """Whether it lies in a new temporary folder of this host, because none was requested."""
    redirects: Mapping[int, int] = field(default_factory=dict)
    tee: Mapping[int, int] = field(default_factory=dict)
    redirect_all: int = 0
    """Value for ranks that ``redirects`` does not name: 1 stdout, 2 stderr, 3 both, as in torchrun."""
    tee_all: int = 0
    """The same for ``tee``."""
    shown: frozenset[int] = frozenset()
    """Local ranks whose output the console shows; empty: all."""
    stdout_filters: tuple[str, ...] = ()
    """Texts: a line of stdout that contains one of them also goes to a file of the round, for workers with ``tee``."""
    stderr_filters: tuple[str, ...] = ()
    """The same for stderr."""
    prefix: str = ""
    """Prefix template of the console lines of a stream with ``tee``, with ``${rank}`` and the like; empty: edl's
    own."""
    layout: LogLayout = LogLayout.TORCHRUN
    quiet: bool = False
    """With Paddle's layout: the console shows only the first worker, on stdout, as Paddle's launcher does."""
    links: str = ""
    """Folder in which Paddle's names (``workerlog.0``) are links to the newest files; empty: no links."""
    overwrite: bool = False
    """Whether files that an earlier launch of the same job and node left in ``folder`` may be deleted."""
    rounds: int = 100
    """Number of rounds whose files are kept, the first one and the newest; also the number of earlier launches that are
    kept. 0: all."""
    most_bytes: int = 10 << 30
    """Limit in bytes for the log files of this job on this node; 0: no limit."""
    days: float = 0.0
    """Days after which log files are deleted that nothing is written to; 0: never."""
    reserve: int = -1
    """Bytes that logs leave free on their disk; negative: a share that depends on the disk."""
    workers: int = 1
    """Number of slots of this launcher, which share ``most_bytes``."""
    name: str = ""
    """Name of the requested folder, from which the folder names of further launches are made; empty: there are none."""
    servers: int = 0
    """Number of local ranks, the first ones, that are pservers. In Paddle's layout their files have names of their
    own."""

    @property
    def keeps_output(self) -> bool:
        """Whether the output of any worker is kept in files."""
        return bool(self.folder and (self.redirects or self.tee or self.redirect_all or self.tee_all or self.links))

    def stdout(self, local_rank: int) -> StreamTarget:
        """Destination of the stdout of this local rank."""
        return self._target(local_rank, 1)

    def stderr(self, local_rank: int) -> StreamTarget:
        """Destination of the stderr of this local rank."""
        return self._target(local_rank, 2)

    def prefixed(self, local_rank: int, *, stderr: bool) -> bool:
        """Whether this stream has ``tee``: its console lines carry a prefix, and the filters apply to it."""
        return bool(self.tee.get(local_rank, self.tee_all) & (2 if stderr else 1))

    def _target(self, local_rank: int, bit: int) -> StreamTarget:
        teed = bool(self.tee.get(local_rank, self.tee_all) & bit)
        redirected = bool(self.redirects.get(local_rank, self.redirect_all) & bit)
        file = teed or redirected
        console = teed or not redirected
        if self.layout is LogLayout.PADDLE:
            file, console = True, teed or not (redirected or (self.quiet and local_rank))
        file = file and bool(self.folder)
        console = console and (not self.shown or local_rank in self.shown)
        return _TARGETS[console, file]


_TARGETS = {
    (True, True): StreamTarget.BOTH,
    (True, False): StreamTarget.CONSOLE,
    (False, True): StreamTarget.FILE,
    (False, False): StreamTarget.NOWHERE,
}
"""Destination by (to the console, to a file)."""
