"""Settings, checked once, then trusted.

``JobSpec`` is what all launchers of a job must agree on; the first one writes it to the store and the others
compare. It refuses impossible values when it is made, with a message that names the value. This is also the one place,
besides click, that reads the environment.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.errors import SettingError
from edl.job_records import DataFiles, SchedulerChoice, SizeOwner, Training
from edl.types import JobId

MAX_NODES = 100_000
"""Upper limit of ``--nnodes``: far above what one Master serves, low enough to catch a typing slip."""


class FaultTolerance(enum.Enum):
    """What happens when a node is lost. A failed worker on a living node is always restarted in place."""

    RECOVER = "recover"
    """Keep the size: wait for a replacement of the same rank, fail after ``recover_timeout_s``."""
    SHRINK = "shrink"
    """Go on with fewer; never grow beyond the size that is left."""
    ELASTIC = "elastic"
    """Go on with fewer, and grow again when nodes come."""


class Standby(enum.Enum):
    """How the next worker processes are kept warm."""

    FORK = "fork"
    """A process that has imported the framework and forks a worker on demand."""
    SPAWN = "spawn"
    """Fresh processes that have imported the framework and wait for their orders."""
    NONE = "none"
    """Start a cold process each time."""


@dataclass(frozen=True, slots=True)
class NodeRange:
    """How many nodes a world may have.

    ``unit``: a world's node count is a multiple of it. Sizes outside ``lowest .. highest`` never form.
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
        """Largest allowed node count with ``available`` nodes; 0 when there are too few for any."""
        size = min(available, self.highest) // self.unit * self.unit
        return size if size >= self.lowest else 0

    def __str__(self) -> str:
        text = str(self.minimum) if self.minimum == self.maximum else f"{self.minimum}:{self.maximum}"
        return text if self.unit == 1 else f"{text} in units of {self.unit}"


def parse_nnodes(text: str, unit: int = 1) -> NodeRange:
    """``"4"`` or ``"1:4"`` as a range. Raises ``SettingError`` with the text it could not read."""
    first, separator, second = text.partition(":")
    try:
        minimum = int(first)
        maximum = int(second) if separator else minimum
    except ValueError:
        raise SettingError("--nnodes", text, "not a number of nodes", "Use N or MIN:MAX, such as 2 or 1:4") from None
    return NodeRange(minimum, maximum, unit)


def _positive(name: str, value: float, *, zero_allowed: bool = False) -> None:
    if not (value >= 0 if zero_allowed else value > 0):  # in these words it refuses "not a number" as well
        raise SettingError(name, f"{value:g}", "must be 0 or more" if zero_allowed else "must be more than 0")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """All waiting times of a job, in seconds."""

    recover_s: float = 600.0
    """How long a job waits for enough nodes before it fails."""
    join_grace_s: float = 1.0
    """How long the very first round waits for more nodes than the minimum; also how long one newcomer waits for
    another that is still warming up, so that two joins cost one change."""
    lease_ttl_s: float = 3.0
    """A node that is silent this long is dead. etcd grants no less than about 2 s (1 s when embedded)."""
    shutdown_s: float = 30.0
    """Between SIGTERM and SIGKILL, wherever a worker is stopped."""
    rejoin_s: float = 10.0
    """How long a worker that uses ``edl.run`` may take to leave a broken round before it is restarted instead."""
    boundary_s: float = 60.0
    """How long workers may take to a step boundary that was agreed on before the round is interrupted instead."""
    hang_s: float = 0.0
    """A round without progress for so long is restarted; 0 for never."""
    spawn_s: float = 10.0
    """How long the process that starts a node's workers may take to answer before it is killed and replaced."""
    warming_s: float = 120.0
    """How long others wait for a node that imports its framework, or starts workers ahead of a world."""
    loading_s: float = 1800.0
    """How long a world waits for the node that reads the state from the checkpoint directory."""
    restart_s: float = 30.0
    """Longest pause before workers that keep failing as soon as they run are started again; 0: never a pause."""

    def __post_init__(self) -> None:
        _positive("--recover-timeout", self.recover_s)
        _positive("--join-grace", self.join_grace_s, zero_allowed=True)
        _positive("--shutdown-timeout", self.shutdown_s, zero_allowed=True)
        _positive("--rejoin-timeout", self.rejoin_s)
        _positive("--boundary-timeout", self.boundary_s)
        _positive("--hang-timeout", self.hang_s, zero_allowed=True)
        _positive("--spawn-timeout", self.spawn_s)
        _positive("--warming-timeout", self.warming_s)
        _positive("--loading-timeout", self.loading_s)
        _positive("--restart-pause", self.restart_s, zero_allowed=True)
        if not 1.0 <= self.lease_ttl_s <= 3600.0:
            raise SettingError("--lease-ttl", f"{self.lease_ttl_s:g}", "must be from 1 to 3600 seconds")


class LrRule(enum.Enum):
    """How the learning rate follows the size of a step."""

    NONE = "none"
    LINEAR = "linear"
    """In proportion to the size."""
    SQRT = "sqrt"
    """With its square root."""
    ADASCALE = "adascale"
    """By the gain that the workers measure from the noise of their gradients."""
    USER = "user"
    """By a function of the script."""


MOST_SAMPLES = 1_000_000_000
"""Upper limit of everything that counts samples, workers or steps here: far above use, low enough to catch a slip."""


@dataclass(frozen=True, slots=True)
class HyperPolicy:
    """How batch and learning rate are to follow the size of the world. All zero: they are the script's own business."""

    global_batch: int = 0
    """Samples of a step over all workers, kept whatever the size; 0: each worker keeps its own."""
    local_batch: int = 0
    """Most samples that a worker takes at once; 0: the script's own batch size."""
    rule: LrRule = LrRule.NONE
    warmup: int = 0
    """Commits over which a changed LR factor comes to hold."""
    reference: int = 0
    """Size that the script's LR is meant for: samples with a global batch, else workers; 0: that of the beginning."""
    logical_ranks: int = 0
    scale: float = 1.0
    """Multiplies the LR beside the rule. Only by hand, while the job runs."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--global-batch", self.global_batch),
            ("--local-batch", self.local_batch),
            ("--lr-reference", self.reference),
            ("--logical-ranks", self.logical_ranks),
            ("--lr-warmup", self.warmup),
        ):
            if not 0 <= value <= MOST_SAMPLES:
                raise SettingError(flag, value, f"must be from 0 to {MOST_SAMPLES}; 0 means that none is given")
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
        """Whether anything is to be followed at all."""
        return self != HyperPolicy(warmup=self.warmup, reference=self.reference)


@dataclass(frozen=True, slots=True)
class AutoscaleRules:
    """Whether and how the job sizes itself by what it measures; see ``edl.master.policies.autoscale``."""

    enabled: bool = False
    efficiency: float = 0.6
    """A further node must bring at least this share of what an average node brings."""
    cooldown_s: float = 60.0
    """Least time between two changes of size by the policy."""

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise SettingError("--autoscale-efficiency", f"{self.efficiency:g}", "must be more than 0, and at most 1")
        _positive("--autoscale-cooldown", self.cooldown_s, zero_allowed=True)


@dataclass(frozen=True, slots=True)
class SlotRules:
    """When a slot of a node is dropped; see ``edl.master.policies.slots``."""

    strikes: int = 2
    """Failures of its own after which it is; 0: never by itself."""
    cooldown_s: float = 0.0
    """After so long it comes back; 0: never by itself."""

    def __post_init__(self) -> None:
        if self.strikes < 0:
            raise SettingError("--slot-strikes", self.strikes, "must be 0 or more", "0 never drops a slot by itself")
        _positive("--slot-cooldown", self.cooldown_s, zero_allowed=True)


@dataclass(frozen=True, slots=True)
class ScriptServers:
    """Pservers that run the script themselves, as under Paddle's launcher: slots of the nodes, like the trainers."""

    each: int = 0
    """The first slots of each node are pservers; 0: they are named one by one, or there are none."""
    servers: tuple[str, ...] = ()
    trainers: tuple[str, ...] = ()
    """``host:port`` of each, where they are named."""
    gloo: str = "1"
    """``--with_gloo``: 1 trainers meet over Paddle's gloo, 2 pservers as well, 0 nobody."""

    def __bool__(self) -> bool:
        return bool(self.each or self.servers)


class OnMismatch(enum.Enum):
    """What happens when ranks turn out to hold different parameters or optimizer values."""

    STOP = "stop"
    """End the job: a person has to look."""
    ROLLBACK = "rollback"
    """Restart the ranks that differ, and go on from the last commit that was compared."""
    SYNC = "sync"
    """Take over what the majority holds, or rank 0 where there is none, and go on."""


@dataclass(frozen=True, slots=True)
class VerifyRules:
    """When ranks compare the state they hold, and what a difference leads to."""

    every: int = 0
    """Commits from one comparison to the next; 0: only after each restore."""
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
        """The inverse of ``text``; an empty one is the default. Raises ``SettingError``."""
        every, _, action = text.partition(":")
        try:
            return cls(int(every), OnMismatch(action)) if text else cls()
        except ValueError:
            raise SettingError("EDL_VERIFY", repr(text), "must be COMMITS:ACTION, such as 100:stop") from None


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What every launcher of a job must agree on."""

    job: JobId
    nodes: NodeRange
    max_restarts: int = 3
    """Worker failures the whole job survives. Nodes that come and go do not count."""
    fault_tolerance: FaultTolerance = FaultTolerance.ELASTIC
    timeouts: Timeouts = field(default_factory=Timeouts)
    data: tuple[DataFiles, ...] = ()
    """Data sets that workers find by name."""
    hyper: HyperPolicy = field(default_factory=HyperPolicy)
    servers: Training | None = None
    """How a job with parameter servers trains. None: it has none, and its workers step together."""
    script_servers: ScriptServers = ScriptServers()
    """Those that run the script."""
    scheduler: SchedulerChoice | None = None
    """Which scheduler its nodes come from; None: none is known."""
    cooldown_s: float = 0.0
    """After a resize the next one waits so long."""
    autoscale: AutoscaleRules = field(default_factory=AutoscaleRules)
    slots: SlotRules = field(default_factory=SlotRules)
    verify: VerifyRules = field(default_factory=VerifyRules)

    @property
    def size_owner(self) -> str:
        """Which scheduler, and who decides on the size: ``statefulset/train (external)``; empty: there is none."""
        return f"{self.scheduler.text} ({self.scheduler.owner.value})" if self.scheduler else ""

    @property
    def sized_outside(self) -> bool:
        """The scheduler decides how many nodes there are; nobody else may."""
        return self.scheduler is not None and self.scheduler.owner is SizeOwner.EXTERNAL

    @property
    def independent(self) -> bool:
        """Workers need no others: when the world changes, those that live train on."""
        return self.servers is not None

    def __post_init__(self) -> None:
        check_job_id(self.job)
        if self.max_restarts < 0:
            raise SettingError("--max-restarts", self.max_restarts, "must be 0 or more")
        _positive("--scale-cooldown", self.cooldown_s, zero_allowed=True)


def check_job_id(job: str) -> None:
    """A job id is one path segment of printable ASCII, at most 128 characters. Raises ``SettingError``."""
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
    """A copy of this process's environment. Everything outside click that needs it asks here."""
    return dict(os.environ)


def changed(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """An environment with these variables, and without those that are None."""
    both = {**environment, **changes}
    return {name: value for name, value in both.items() if value is not None}


CREDENTIALS = ("EDL_RDZV_CONF", "PET_RDZV_CONF", "EDL_SECRET")
"""Variables that may hold a password or the job's secret. Workers run whatever the script loads: they get none."""


def adopt(changes: Mapping[str, str | None]) -> None:
    """Change this process's environment, and with it that of all it starts. None: take the variable away."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class StreamTarget(enum.Enum):
    """Where a worker's stream goes."""

    CONSOLE = "console"
    FILE = "file"
    BOTH = "both"
    NOWHERE = "nowhere"
    """Only its last lines are kept, for error reports."""


class LogLayout(enum.Enum):
    """Whose habits the files and the console follow."""

    TORCHRUN = "torchrun"
    """All on the console; files only where asked for."""
    PADDLE = "paddle"
    """All in files, ``workerlog.N``, and on the console as it is."""


@dataclass(frozen=True, slots=True)
class LogPlan:
    """Where the workers of one launcher write. The maps are by local rank; a missing rank has the default."""

    folder: str
    """Folder of this launcher; each round gets its own below it. Empty: no files at all, not even error files."""
    redirects: Mapping[int, int] = field(default_factory=dict)
    tee: Mapping[int, int] = field(default_factory=dict)
    redirect_all: int = 0
    """Bits for ranks that ``redirects`` does not name: 1 stdout, 2 stderr (as torchrun counts them)."""
    tee_all: int = 0
    shown: frozenset[int] = frozenset()
    """Local ranks whose output the console shows; empty: all."""
    stdout_filters: tuple[str, ...] = ()
    """Lines of stdout that hold one of these, of workers with ``tee``, go to a file of the round as well."""
    stderr_filters: tuple[str, ...] = ()
    prefix: str = ""
    """What stands before each console line of a stream with ``tee``, with ``${rank}`` and the like; empty: ours."""
    layout: LogLayout = LogLayout.TORCHRUN
    quiet: bool = False
    """With Paddle's layout: the console shows the first worker only, on stdout, as Paddle's launcher does."""
    links: str = ""
    """Folder where Paddle's names (``workerlog.0``) lead to the newest files; empty: nowhere."""
    overwrite: bool = False
    """What an earlier launch of the same job and node has left in ``folder`` may go."""
    rounds: int = 100
    """Rounds whose files are kept: the first one and the newest; and the newest so many launches. 0: all."""
    most_bytes: int = 10 << 30
    """Most that the log files of this job on this node take; 0: any amount."""
    reserve: int = -1
    """Bytes of the disk that logs leave free; less than 0: what suits the disk."""
    workers: int = 1
    """Slots of this launcher, which share ``most_bytes``."""
    name: str = ""
    """Name of the folder that was asked for, of which those of further launches are made; empty: there are none."""
    servers: int = 0
    """The first local ranks that are pservers, with files of their own names in Paddle's layout."""

    def stdout(self, local_rank: int) -> StreamTarget:
        """Target of a worker's stdout."""
        return self._target(local_rank, 1)

    def stderr(self, local_rank: int) -> StreamTarget:
        """Target of a worker's stderr."""
        return self._target(local_rank, 2)

    def prefixed(self, local_rank: int, *, stderr: bool) -> bool:
        """Whether ``tee`` was asked for: such lines carry a prefix on the console, and the filters look at them."""
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
"""By whether a stream goes to the console, and whether to a file."""
