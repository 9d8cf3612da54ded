"""How to call each launcher. There is one small strategy per contender; no other module of the benchmarks knows their
flags."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from benchmarks.common.processes import LOOPBACK

REPOSITORY = Path(__file__).resolve().parents[2]


TUNED_RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Shorter waits for torchrun: 1 s for more nodes, and a silent node is dropped after 3 s, as with edl's lease here."""


class Meeting(enum.Enum):
    """How the nodes of a job find one another."""

    ETCD = "etcd"
    """A private etcd that the benchmark starts outside the nodes."""
    PORTS = "ports"
    """Free loopback ports; the launchers start the store themselves."""
    LIGHTHOUSE = "lighthouse"
    """torchft's own service, which the benchmark starts outside the nodes."""
    MASTER = "master"
    """DLRover's local master, which the benchmark starts outside the nodes."""
    HEAD = "head"
    """Ray's head node, which the benchmark starts outside the nodes; it runs no worker."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One job to launch. ``endpoint``: ``host:port[,host:port…]``; empty for a job of a single node. ``first_nodes``:
    how many nodes are started at first, for launchers that cannot find out. ``own_folders``: each launcher runs in a
    folder of its own, as on a host that shares no file system."""

    job_id: str
    nodes: tuple[int, int]
    workers_per_node: int
    endpoint: str
    script: Path
    script_arguments: tuple[str, ...]
    folder: Path
    max_restarts: int = 10
    first_nodes: int = 1
    own_folders: bool = False

    @property
    def alone(self) -> bool:
        return not self.endpoint

    def working_folder(self, node: int) -> Path:
        """Where a node's launcher runs, and the service and the driver outside the nodes."""
        return self.folder / f"host{node}" if self.own_folders and node >= 0 else self.folder

    def log_dir(self, node: int) -> str:
        return str(self.folder / f"node{node}-logs")

    def tail(self) -> list[str]:
        """The script and its arguments: the end of every command line."""
        return [str(self.script), *self.script_arguments]


class Launcher(Protocol):
    """The interface of a contender."""

    @property
    def name(self) -> str: ...

    @property
    def meeting(self) -> Meeting: ...

    @property
    def deadline_s(self) -> float:
        """Seconds after which a run counts as never recovered; also the limit for the start."""

    @property
    def is_edl(self) -> bool:
        """Whether it is edl: it has a Master that can be killed, and detects a node that just stops answering."""

    def script(self, framework: str) -> str:
        """Name of its script in ``benchmarks/scripts``; all scripts train the same model."""

    def command(self, plan: JobPlan, node: int) -> list[str]:
        """The command line of one node's launcher."""

    def environment(self, plan: JobPlan, node: int) -> dict[str, str]:
        """Variables that it needs in addition to the clean environment."""


@runtime_checkable
class Driven(Launcher, Protocol):
    """A launcher whose job is one more process, started outside the nodes together with the first one."""

    def driver(self, plan: JobPlan) -> list[str]:
        """The command line of that process."""


def plain_script(framework: str) -> str:
    """The script that does not use any launcher."""
    return f"train_{framework}.py"


class RunsPlainScript:
    """What the launchers of others have in common: their workers run the script that uses none."""

    __slots__ = ()
    is_edl: ClassVar[bool] = False

    def script(self, framework: str) -> str:
        return plain_script(framework)


@dataclass(frozen=True, slots=True)
class Edl:
    """``python -m edl.launch``. ``embedded``: it runs its own etcd members instead of using an external etcd.
    ``rejoins``: the script uses ``edl.torch`` or ``edl.paddle``, so workers keep their process. ``secret``: embedded,
    and protected by a secret. ``options``: more of them for the launcher."""

    python: str
    embedded: bool = False
    rejoins: bool = False
    secret: bool = False
    options: tuple[str, ...] = ()
    lease_ttl_s: float = 3.0
    deadline_s: float = 60.0
    is_edl: ClassVar[bool] = True

    @property
    def name(self) -> str:
        if self.secret:
            return "edl-secret"
        return "edl-embedded" if self.embedded else "edl-rejoin" if self.rejoins else "edl"

    @property
    def meeting(self) -> Meeting:
        return Meeting.PORTS if self.embedded else Meeting.ETCD

    @property
    def backend(self) -> str:
        return "etcd-embedded" if self.embedded else "etcd"

    def script(self, framework: str) -> str:
        return f"rejoin_{framework}.py" if self.rejoins else plain_script(framework)

    def command(self, plan: JobPlan, node: int) -> list[str]:
        command = [self.python, "-m", "edl.launch", f"--nproc-per-node={plan.workers_per_node}"]
        command += [f"--max-restarts={plan.max_restarts}", f"--log-dir={plan.log_dir(node)}"]
        if not plan.alone:
            command += [f"--nnodes={plan.nodes[0]}:{plan.nodes[1]}", f"--rdzv-id={plan.job_id}"]
            command += [f"--rdzv-backend={self.backend}", f"--rdzv-endpoint={plan.endpoint}"]
            command += [f"--node-id={node_name(node)}", f"--lease-ttl={self.lease_ttl_s:g}"]
        return [*command, *self.options, *plan.tail()]

    def environment(self, plan: JobPlan, node: int) -> dict[str, str]:
        return {"EDL_SECRET": f"of {plan.job_id}, 32 letters or more, for nobody"} if self.secret else {}


@dataclass(frozen=True, slots=True)
class Torchrun(RunsPlainScript):
    """torchrun with its c10d store on node 0. ``tuned``: with all command-line options that make it faster."""

    python: str
    tuned: bool
    meeting: ClassVar[Meeting] = Meeting.PORTS

    @property
    def name(self) -> str:
        return "torchrun-tuned" if self.tuned else "torchrun-default"

    @property
    def deadline_s(self) -> float:
        return 60.0 if self.tuned else 150.0

    def command(self, plan: JobPlan, node: int) -> list[str]:
        command = [self.python, "-m", "torch.distributed.run", f"--nproc-per-node={plan.workers_per_node}"]
        command += [f"--max-restarts={plan.max_restarts}", f"--log-dir={plan.log_dir(node)}", "--redirects=3"]
        if self.tuned:
            command += ["--monitor-interval=0.1"]
        if plan.alone:
            return [*command, "--standalone", *plan.tail()]
        # All nodes share one host here, so each would claim the store; specify the right one, as different hosts would.
        settings = [f"is_host={'true' if node == 0 else 'false'}"]
        if self.tuned:
            settings.append(TUNED_RENDEZVOUS)
        command += [f"--nnodes={plan.nodes[0]}:{plan.nodes[1]}", f"--rdzv-id={plan.job_id}", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint={plan.endpoint}", f"--rdzv-conf={','.join(settings)}"]
        return [*command, f"--local-addr={LOOPBACK}", *plan.tail()]

    def environment(self, plan: JobPlan, node: int) -> dict[str, str]:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.tuned else {}


@dataclass(frozen=True, slots=True)
class Torchft:
    """A replica group on each node, under a torchrun of its own that restarts it, as torchft's documentation shows.

    ``python`` must have torchft (see ``peer_venv.py``). The lighthouse waits as in ``outside.LIGHTHOUSE_WAITS``.
    """

    python: str
    deadline_s: float = 90.0
    name: ClassVar[str] = "torchft"
    meeting: ClassVar[Meeting] = Meeting.LIGHTHOUSE
    is_edl: ClassVar[bool] = False

    def script(self, framework: str) -> str:
        return f"train_{framework}ft.py"

    def command(self, plan: JobPlan, node: int) -> list[str]:
        command = [self.python, "-m", "torch.distributed.run", f"--nproc-per-node={plan.workers_per_node}"]
        command += ["--standalone", f"--max-restarts={plan.max_restarts}", "--monitor-interval=0.1"]
        return [*command, f"--log-dir={plan.log_dir(node)}", "--redirects=3", *plan.tail()]

    def environment(self, plan: JobPlan, node: int) -> dict[str, str]:
        return {"TORCHFT_LIGHTHOUSE": f"http://{plan.endpoint}"}


@dataclass(frozen=True, slots=True)
class PaddleLaunch(RunsPlainScript):
    """``paddle.distributed.launch`` with etcd, its only elastic mode.

    ``python`` must be able to ``import etcd3`` (see ``peer_venv.py``). Version 0.12, the last one, works with today's
    protobuf only in the pure-Python implementation, hence the variable.
    """

    python: str
    elastic_timeout_s: int = 10
    deadline_s: float = 120.0
    name: ClassVar[str] = "paddle-launch"
    meeting: ClassVar[Meeting] = Meeting.ETCD

    def command(self, plan: JobPlan, node: int) -> list[str]:
        command = [self.python, "-m", "paddle.distributed.launch", f"--nproc_per_node={plan.workers_per_node}"]
        command += [f"--max_restart={plan.max_restarts}", f"--log_dir={plan.log_dir(node)}", f"--job_id={plan.job_id}"]
        if not plan.alone:
            command += [f"--master=etcd://{plan.endpoint}", f"--nnodes={plan.nodes[0]}:{plan.nodes[1]}"]
            command += ["--elastic_level=1", f"--elastic_timeout={self.elastic_timeout_s}", f"--host={LOOPBACK}"]
        return command + plan.tail()

    def environment(self, plan: JobPlan, node: int) -> dict[str, str]:
        return {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}


def node_name(node: int) -> str:
    """The node id that edl's launcher of a simulated node gets."""
    return f"bench-{node}"
