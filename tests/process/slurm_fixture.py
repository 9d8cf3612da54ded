"""A private Slurm for tests: one controller and one node, or several, on this host, real daemons, real ``sbatch``.

It needs Debian's packages slurmctld, slurmd and slurm-client, and root. Authentication is off, ports are its own, and
everything that it writes is in its own folder, whose path is also the mark by which its processes are found again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.process.free_ports import free_endpoints
from tests.process.harness import alive, until

PACKAGES = "apt-get install --no-install-recommends slurmctld slurmd slurm-client"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
FOLDERS = os.pathsep.join(("/usr/sbin", "/usr/bin", "/sbin", "/bin"))
"""Daemons are not on everybody's PATH."""
START_S = 60.0
MEMORY_MB = 10
"""For each job: without it a job takes all memory of the node."""

CONFIG = """\
ClusterName=edl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
MinJobAge=300
KillWait=5
RebootProgram=/bin/true
JobRequeue=1
SlurmdParameters=config_overrides
{lines}
PartitionName=steady Nodes={nodes} PriorityTier=20 PreemptMode=OFF
PartitionName=low Nodes={nodes} PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} Default=YES
PartitionName=high Nodes={nodes} PriorityTier=10 PreemptMode=OFF
"""


NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000 State=UNKNOWN"


def missing() -> str:
    """Why there can be no Slurm here; empty: there can."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=FOLDERS) is None]
    if lacking:
        return f"{', '.join(lacking)} not found ({PACKAGES})"
    return "" if os.geteuid() == 0 else "slurmd has to run as root"


@dataclass(frozen=True)
class Task:
    """A job of Slurm, as ``scontrol`` shows it."""

    number: int
    fields: Mapping[str, str]

    @property
    def state(self) -> str:
        return self.fields["JobState"]

    @property
    def exit_code(self) -> str:
        """The job's exit code as ``STATUS:SIGNAL``."""
        return self.fields["ExitCode"]


class Slurm:
    """One cluster whose nodes, one or those of ``names``, each run as many jobs of one CPU as ``cpus`` says, whatever
    this host has.

    Partitions: ``steady`` is never preempted; jobs of ``low`` give way to those of ``high``, after ``grace_s``. Signals
    go to a step's tasks and not to what these have started in sessions of their own, as with proctrack/cgroup, which
    most clusters have and which needs rights that a container may not have.
    """

    def __init__(self, folder: Path, *, cpus: int = 3, grace_s: int = 20, names: Sequence[str] = ("edl0",)) -> None:
        self.folder = folder
        self._names = tuple(names)
        self.conf = folder / "slurm.conf"
        controller, *ports = (int(endpoint.rpartition(":")[2]) for endpoint in free_endpoints(1 + len(names)))
        host = socket.gethostname().partition(".")[0]
        (folder / "state").mkdir(parents=True)
        lines = [
            NODE.format(name=name, host=host, port=port, cpus=cpus)
            for name, port in zip(self._names, ports, strict=True)
        ]
        nodes = {"lines": "\n".join(lines), "nodes": ",".join(self._names)}
        self.conf.write_text(CONFIG.format(host=host, folder=folder, controller=controller, grace=grace_s, **nodes))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Slurm:
        try:
            self.start_controller()
            for name in self._names:
                self._start("slurmd", "-D", "-N", name, key=f"slurmd.{name}")
            idle = f"{len(self._names)} idle"
            until(lambda: self._says("sinfo", "--noheader", "--partition=low", "--format=%D %t") == idle, idle, START_S)
        except BaseException:
            self.dump()
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- daemons ---------------------------------------------------------------------------------------------------

    def start_controller(self) -> None:
        """The first time, or again after ``stop_controller``: it knows its jobs still."""
        clean = () if self._daemons else ("-c",)
        self._start("slurmctld", "-D", *clean)
        until(lambda: "UP" in self._says("scontrol", "ping"), "the controller's answer", START_S)

    def stop_controller(self) -> None:
        """In good order; jobs run on."""
        self._end(self._daemons["slurmctld"])

    def close(self) -> None:
        """End the daemons and all that they have started, and nothing else."""
        for daemon in self._daemons.values():
            self._end(daemon)
        # What outlives its daemon: slurmstepd, and what it has started.
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            with contextlib.suppress(AssertionError):
                until(lambda: not self.processes(), "the end of Slurm's processes", 30.0)

    def processes(self) -> list[psutil.Process]:
        """Everything of this Slurm that runs: its configuration is in each one's environment."""
        wanted = f"SLURM_CONF={self.conf}".encode()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if process.pid != os.getpid() and wanted in environment.split(b"\0") and alive(process.pid):
                    found.append(process)
        return found

    def dump(self) -> None:
        """Print the daemons' logs; pytest shows them when a test fails."""
        for log in sorted(self.folder.glob("*.log")):
            print(f"----- {log.name}\n{log.read_text(errors='replace')[-8_000:]}")

    def _start(self, name: str, *options: str, key: str = "") -> None:
        program = shutil.which(name, path=FOLDERS)
        assert program is not None, missing()
        with (self.folder / f"{key or name}.out.log").open("ab") as log:
            self._daemons[key or name] = subprocess.Popen(
                [program, *options],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @staticmethod
    def _end(daemon: subprocess.Popen[bytes]) -> None:
        if daemon.poll() is None:
            daemon.terminate()
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    # --- what people do --------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """Environment for Slurm's daemons and clients."""
        return {"PATH": os.environ["PATH"] + os.pathsep + FOLDERS, "SLURM_CONF": str(self.conf), "LANG": "C"}

    def call(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """One of Slurm's programs, which has to end well; what it prints."""
        done = subprocess.run(
            command,
            env={**self.environment, **(environment or {})},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr or done.stdout}"
        return done.stdout.strip()

    def _says(self, *command: str) -> str:
        try:
            return self.call(*command)
        except (AssertionError, subprocess.TimeoutExpired):
            return ""

    def submit(self, *options: str, command: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> int:
        """``sbatch``: a job of one CPU; its number. ``command`` is run as a step, as deploy/slurm does it."""
        what = ["--wrap", f"exec srun --unbuffered {shlex.join(command)}"] if command else []
        told = ["--parsable", f"--mem={MEMORY_MB}", f"--output={self.folder}/job-%j.log", *options, *what]
        return int(self.call("sbatch", *told, environment=environment).partition(";")[0])

    def tasks(self) -> list[Task]:
        """All jobs that it remembers, in their order."""
        found = []
        for line in self.call("scontrol", "--oneliner", "show", "job").splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if fields.get("JobId", "").isdecimal():
                found.append(Task(int(fields["JobId"]), fields))
        return found

    def task(self, number: int) -> Task:
        (found,) = [one for one in self.tasks() if one.number == number]
        return found

    def wait(self, number: int, *states: str) -> Task:
        """Until a job is in one of these states."""
        until(lambda: self.task(number).state in states, f"job {number} {' or '.join(states)}")
        return self.task(number)

    def output(self, number: int) -> str:
        """The output of a job started by ``submit``."""
        log = self.folder / f"job-{number}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def clear(self) -> None:
        """No job is left: for the next test. Nobody is asked to leave in good order."""
        if left := self._left():
            self._says("scancel", *left)  # one may have ended meanwhile
            # What is in a session of its own keeps its step from ending, as long as it has the step's output.
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    if "SLURM_JOB_ID" in process.environ():
                        process.kill()
        until(lambda: not self._left(), "the end of all jobs", START_S)

    def _left(self) -> list[str]:
        return self.call("squeue", "--noheader", "--format=%A").split()
