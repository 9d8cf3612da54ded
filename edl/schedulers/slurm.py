"""Slurm as a scheduler: one batch job per node, submitted to grow and cancelled to shrink.

A single Slurm job with many nodes cannot grow reliably, so each node is a job of its own; all have the same name. The
script of a node runs its launcher as a job step (``srun``): on preemption Slurm signals steps at once, but the batch
shell only after the grace time. A node is named after its job's id, ``slurm-<id>`` (``node_name``).

Jobs that the Master submits are not requeued: a preempted job has ended, and the Master submits another one, which
waits in the queue until resources are free.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edl.errors import SchedulerError, SettingError
from edl.job_records import SchedulerChoice
from edl.schedulers.commands import CommandFailed, call
from edl.schedulers.deps import SchedulerDeps, seconds
from edl.schedulers.port import Observation, SchedulerSize, Sized

PROGRAMS = ("sbatch", "squeue", "scancel")
TIMEOUT_S = 30.0
POLL_S = 2.0
PREFIX = "slurm-"
"""Prefix of a node's name; its job's id follows."""
MARK = "edl: "
"""Prefix of the comment of jobs that a Master has submitted. Only these are ever cancelled while they run."""
SRUN = "srun --nodes=1 --ntasks=1 --cpu-bind=none --unbuffered"
"""Starts one task that may use all resources of the job. No number of CPUs is given, which would confine it to one."""
_COMING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_THERE = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")
"""States of jobs that have been assigned a host. Also ``CONFIGURING``, while the host boots: for ``scancel --state``
such a job is running."""
_TRANSIENT = (
    *("contact", "timed out", "connect", "temporarily", "try again", "not responding", "communication", "socket"),
    *("zero bytes", "standby mode", "authentication error", "submit limit", "too many", "job count"),
)
"""Words in the output of Slurm's programs that indicate a transient error. A submission above a limit may succeed once
other jobs have ended. ``authentication error``: the host's munge daemon restarts, for instance."""
_OF_THIS_JOB = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI_", "PMIX_")
_OF_THIS_USER = ("SQUEUE_", "SCANCEL_")
"""Prefixes of a user's default options, which would hide nodes from ``squeue``, or keep ``scancel`` from cancelling
them."""
_OF_ITS_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_JWT")


def check(wanted: SchedulerChoice) -> None:
    """Check that this host can use Slurm with these settings. Raises ``SettingError``."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        advice = "Install Slurm's client programs (Debian: slurm-client), or omit --scheduler"
        raise SettingError("--scheduler", wanted.text, f"{missing[0]} is not on the PATH", advice)
    for key in ("timeout", "poll"):
        seconds(wanted.conf, key, 1.0)
    _options(wanted)
    script = wanted.conf.get("script", "")
    if script and not Path(script).is_file():
        raise SettingError("--scheduler-conf script", script, "no such file")


def make(deps: SchedulerDeps) -> Slurm:
    """Create the adapter for one Master's term."""
    return Slurm(deps)


def node_name(environment: Mapping[str, str]) -> str:
    """The node name of a launcher that is the only task of its Slurm job; empty: it is not in a job, or not the only
    task."""
    alone = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")) == "1"
    number = environment.get("SLURM_JOB_ID", "")
    return f"{PREFIX}{number}" if alone and number.isdecimal() else ""


@dataclass(frozen=True, slots=True)
class Queued:
    """A Slurm job that is a node or will be one."""

    name: str
    """Its id as ``scancel`` expects it: ``17``, or ``7_3`` for a task of an array."""
    number: int
    """Its numeric id, which an array's task has as well."""
    state: str
    """Slurm's state, such as ``PENDING``."""
    why: str
    """Why it is pending, in Slurm's words."""
    ours: bool
    """Whether a Master has submitted it."""

    @property
    def there(self) -> bool:
        """Whether it has been assigned a host."""
        return self.state in _THERE

    @property
    def of_array(self) -> bool:
        """Whether it is one task of an array."""
        return "_" in self.name


class Slurm:
    """Implements ``port.Scheduler`` with Slurm's command-line programs."""

    indexed = False
    ask_none_at_end = True

    def __init__(self, deps: SchedulerDeps) -> None:
        conf = deps.wanted.conf
        self._deps = deps
        self._job_name = conf.get("name", "") or f"edl-{deps.job}"
        self._timeout_s = seconds(conf, "timeout", TIMEOUT_S)
        self._poll_s = seconds(conf, "poll", POLL_S)
        self._script = conf.get("script", "")
        self._options = _options(deps.wanted)
        self._environment = _of_another_job(deps.environment)
        self.name = f"Slurm jobs named {self._job_name}"

    async def current(self) -> SchedulerSize:
        """The number of queued and running jobs. Raises ``SchedulerError``."""
        return _size(await self._queue())

    async def request(self, nodes: int, reason: str) -> None:
        """Submit one job for each missing node. Raises ``SchedulerError``."""
        for _ in range(nodes - len(await self._queue())):
            number = await self._submit(reason)
            self._deps.log(f"slurm: submitted job {number} for an additional node ({reason})")

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Cancel surplus jobs that wait for a host; nodes that run leave by themselves, as ordered. With ``nodes`` 0
        also cancel the Master's other running jobs. Raises ``SchedulerError``."""
        queue = await self._queue()
        named = [one for one in queue if f"{PREFIX}{one.number}" in names]
        others = [one for one in queue if one not in named]
        waiting = sorted((one for one in others if not one.there), key=lambda one: -one.number)
        going = [one for one in named if not one.there] + waiting[: max(0, len(others) - nodes)]
        # A launcher that is just starting would not know that the job has ended, and would start a new one.
        late = [one for one in others if one.there and one.ours] if nodes == 0 else []
        tasks, jobs = ([one.name for one in going if one.of_array is of] for of in (True, False))
        if jobs:
            # Not a job that has just started: it may already be in the world.
            await self._call("scancel", "--state=PENDING", *jobs)
        if tasks:
            await self._call("scancel", *tasks)  # with --state Slurm would cancel all waiting tasks of the array
        if going:
            self._deps.log(f"slurm: cancelled {len(going)} jobs that were waiting for a host ({reason})")
        if late:
            await self._call("scancel", *(one.name for one in late))
            self._deps.log(f"slurm: cancelled {len(late)} jobs that had not joined the job yet ({reason})")

    async def watch(self) -> AsyncIterator[Observation]:
        """Yields the size whenever it changes. Polls, because Slurm sends no notifications. Raises
        ``SchedulerError``."""
        seen: SchedulerSize | None = None
        while True:
            try:
                now = await self.current()
            except SchedulerError as error:
                if not error.retry:
                    raise
            else:
                if now != seen:
                    seen = now
                    yield Sized(now)
            await asyncio.sleep(self._poll_s)

    async def close(self) -> None:
        """Does nothing: no connection is open."""

    async def _submit(self, reason: str) -> int:
        options = [f"--job-name={self._job_name}", "--parsable", f"--comment={MARK}{reason}", *self._options]
        if self._script:
            said = await self._call("sbatch", "--no-requeue", *options, self._script)
        else:
            ours = ["--no-requeue", "--nodes=1", "--ntasks=1", self._output()]
            said = await self._call("sbatch", *ours, *options, written=self._own_script())
        number = said.strip().partition(";")[0]
        if not number.isdecimal():
            raise SchedulerError(f"sbatch printed {said.strip()[:200]!r} instead of a job number", retry=True)
        return int(number)

    def _output(self) -> str:
        """The option for the log file. ``%`` in the folder's path is escaped, because it begins a placeholder."""
        folder = self._deps.log_folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SchedulerError(f"cannot make the folder for Slurm's logs {folder}: {error}", retry=True) from error
        return f"--output={str(folder).replace('%', '%%')}/{PREFIX}%j.log"

    def _own_script(self) -> str:
        """The batch script. The launcher derives the node's name from the job id."""
        return f"#!/bin/sh\nexec {SRUN} {shlex.join(self._deps.launcher)}\n"

    async def _queue(self) -> list[Queued]:
        columns = "%i|%A|%T|%r|%k"
        # --all: otherwise jobs in partitions that are hidden from users are missing, and would be submitted again.
        options = ["--noheader", "--array", "--all", "--me", f"--name={self._job_name}", "-o", columns]
        said = await self._call("squeue", *options)
        return queue_from(said)

    async def _call(self, *command: str, written: str = "") -> str:
        try:
            return await call(command, self._timeout_s, environment=self._environment, written=written)
        except CommandFailed as error:
            transient = any(word in error.said.lower() for word in _TRANSIENT)
            raise SchedulerError(str(error), retry=transient) from error


def queue_from(said: str) -> list[Queued]:
    """Parse the output of ``squeue``; jobs that have ended or are ending are left out."""
    found = []
    for line in said.splitlines():
        name, number, state, why, comment = (*line.strip().split("|", 4), *[""] * 4)[:5]
        if number.isdecimal() and state in (*_COMING, *_THERE):
            found.append(Queued(name, int(number), state, why, comment.startswith(MARK)))
    return found


def _size(queue: Sequence[Queued]) -> SchedulerSize:
    there = sum(one.there for one in queue)
    reasons = sorted({one.why for one in queue if not one.there and one.why not in ("", "None")})
    waiting = len(queue) - there
    detail = f"{waiting} of {len(queue)} jobs wait in the queue ({', '.join(reasons)})" if waiting and reasons else ""
    return SchedulerSize(len(queue), there, detail)


def _of_another_job(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for Slurm's programs and another Slurm job: without variables that describe the one of this
    launcher, and without a user's default options."""
    left_out = _OF_ITS_DEVICES if "SLURM_JOB_ID" in environment else ()
    return {
        name: value
        for name, value in environment.items()
        if name in _OF_THE_CLUSTER or not (name.startswith((*_OF_THIS_JOB, *_OF_THIS_USER)) or name in left_out)
    }


def _options(wanted: SchedulerChoice) -> list[str]:
    text = wanted.conf.get("options", "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SettingError("--scheduler-conf options", text, f"cannot be split into words: {error}") from None
