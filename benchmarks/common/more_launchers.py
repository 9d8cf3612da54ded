"""How to call launchers that bring parts of their own (NVRx, DLRover, Ray Train), and a script without a launcher."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.common.launchers import TUNED_RENDEZVOUS, JobPlan, Meeting, RunsPlainScript
from benchmarks.common.processes import LOOPBACK


@dataclass(frozen=True, slots=True)
class Bare(RunsPlainScript):
    """The plain script, started by hand with its rank: what a launcher may not slow down. Recovers from nothing."""

    python: str
    deadline_s: float = 60.0
    name: ClassVar[str] = "bare"
    meeting: ClassVar[Meeting] = Meeting.PORTS

    def command(self, plan: JobPlan, node: int) -> list[str]:
        return [self.python, *plan.tail()]

    def environment(self, plan: JobPlan, node: int) -> dict[str, str]:
        host, port = plan.endpoint.split(":")
        # Paddle numbers its endpoints from the port of its store on; only those ports must be distinct.
        paddle = [f"{host}:{int(port) + 1 + rank}" for rank in range(plan.first_nodes)]
        return {
            **ranks(plan, node),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "PADDLE_TRAINER_ID": str(node),
            "PADDLE_TRAINERS_NUM": str(plan.first_nodes),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(paddle),
            "PADDLE_CURRENT_ENDPOINT": paddle[node % len(paddle)],
            "PADDLE_MASTER": plan.endpoint,
            "PADDLE_DISTRI_BACKEND": "gloo",
        }


def ranks(plan: JobPlan, node: int) -> dict[str, str]:
    """The variables of torch for one worker on each node, of those that are started at first."""
    return {"RANK": str(node), "WORLD_SIZE": str(plan.first_nodes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@dataclass(frozen=True, slots=True)
class Nvrx(RunsPlainScript):
    """NVRx's ``ft_launcher``, a torchrun of its own with a rank monitor beside each worker. Tuned as torchrun is, and
    workers that are to restart get 1 s instead of 30. ``python`` must have nvidia-resiliency-ext (``peer_venv.py``).
    """

    python: str
    deadline_s: float = 90.0
    name: ClassVar[str] = "nvrx"
    meeting: ClassVar[Meeting] = Meeting.PORTS

    def command(self, plan: JobPlan, node: int) -> list[str]:
        command = [self.python, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
        command += [f"--nproc-per-node={plan.workers_per_node}", f"--max-restarts={plan.max_restarts}"]
        command += [f"--log-dir={plan.log_dir(node)}", "--redirects=3", "--monitor-interval=0.1"]
        command += ["--workers-stop-timeout=1", "--term-timeout=1", "--ft-workload-check-interval=0.5"]
        command += ["--ft-restart-policy=any-failed", "--ft-enable-nic-monitor=False"]
        if plan.alone:
            return [*command, "--standalone", *plan.tail()]
        settings = f"is_host={'true' if node == 0 else 'false'},{TUNED_RENDEZVOUS}"
        command += [f"--nnodes={plan.nodes[0]}:{plan.nodes[1]}", f"--rdzv-id={plan.job_id}", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint={plan.endpoint}", f"--rdzv-conf={settings}", f"--local-addr={LOOPBACK}"]
        return command + plan.tail()

    def environment(self, plan: JobPlan, node: int) -> dict[str, str]:
        # Its sockets are in the temporary folder, and must have short paths.
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TMPDIR": "/tmp"}


@dataclass(frozen=True, slots=True)
class NvrxInProcess:
    """NVRx's wrapper, which calls the training function again in the processes that are left. It starts no process, so
    each node is the script itself. The script sets its intervals."""

    python: str
    deadline_s: float = 60.0
    name: ClassVar[str] = "nvrx-inprocess"
    meeting: ClassVar[Meeting] = Meeting.PORTS
    is_edl: ClassVar[bool] = False

    def script(self, framework: str) -> str:
        return "train_nvrx.py"

    def command(self, plan: JobPlan, node: int) -> list[str]:
        return [self.python, *plan.tail(), f"--most={plan.nodes[1]}"]

    def environment(self, plan: JobPlan, node: int) -> dict[str, str]:
        host, port = plan.endpoint.split(":")
        quiet = {"TORCH_CPP_LOG_LEVEL": "error"}  # as its examples do: it polls the store with short time limits
        return {**ranks(plan, node), **quiet, "MASTER_ADDR": host, "MASTER_PORT": port}


@dataclass(frozen=True, slots=True)
class Dlrover(RunsPlainScript):
    """``dlrover-run`` with DLRover's local master, the only one without Kubernetes or Ray. A rendezvous waits 1 s for
    more nodes instead of 60. ``python`` must have dlrover (``peer_venv.py``)."""

    python: str
    deadline_s: float = 150.0
    name: ClassVar[str] = "dlrover"
    meeting: ClassVar[Meeting] = Meeting.MASTER

    def command(self, plan: JobPlan, node: int) -> list[str]:
        command = [self.python, "-m", "dlrover.trainer.torch.elastic_run", f"--nproc-per-node={plan.workers_per_node}"]
        command += [f"--max-restarts={plan.max_restarts}", "--monitor-interval=0.1"]
        command += [f"--log-dir={plan.log_dir(node)}", "--redirects=3"]
        if plan.alone:
            return [*command, "--standalone", *plan.tail()]
        command += [f"--nnodes={plan.nodes[0]}:{plan.nodes[1]}", "--rdzv-conf=join_timeout=120,lastcall_timeout=1"]
        return command + plan.tail()

    def environment(self, plan: JobPlan, node: int) -> dict[str, str]:
        numbers = {"NODE_RANK": str(node), "NODE_ID": str(node), "NODE_NUM": str(plan.nodes[1])}
        return {**numbers, "ELASTIC_JOB_NAME": plan.job_id, "DLROVER_MASTER_ADDR": plan.endpoint}


RAY_WAITS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "2",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "2",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    "RAY_raylet_report_resources_period_milliseconds": "100",
}
"""Shorter waits for Ray: a silent node is dead after about 2 s (default 8 to 18), and Ray Train looks at its workers
ten times in a second (every 2 s). After a node's death it first asks for as many workers as before, because it does not
know yet that there is no room for them, and tries with fewer after 2 s (60)."""
RAY_RESIZE_S = 0.5
"""Seconds between two looks for more nodes; the default is 60."""
RAY_QUIET = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}
RAY_MEMORY_BYTES = 80_000_000
"""Of each node's object store: hardly more than the least that Ray accepts."""


@dataclass(frozen=True, slots=True)
class RayTrain:
    """Ray Train with an elastic number of workers: a raylet on each node, and outside a head without workers and the
    driver. ``python`` must have ``ray[train]`` (``peer_venv.py``)."""

    python: str
    deadline_s: float = 120.0
    name: ClassVar[str] = "ray-train"
    meeting: ClassVar[Meeting] = Meeting.HEAD
    is_edl: ClassVar[bool] = False

    def script(self, framework: str) -> str:
        return "train_ray.py"

    def command(self, plan: JobPlan, node: int) -> list[str]:
        command = [*ray_start(self.python), f"--address={plan.endpoint}", f"--num-cpus={plan.workers_per_node}"]
        # In a common folder, nodes that start at the same time choose the same socket.
        folder = service_folder(int(plan.endpoint.rpartition(":")[2])) / f"n{node}"
        return [*command, f"--temp-dir={folder}"]

    def driver(self, plan: JobPlan) -> list[str]:
        sizes = [nodes * plan.workers_per_node for nodes in (*plan.nodes, plan.first_nodes)]
        options = [f"--least={sizes[0]}", f"--most={sizes[1]}", f"--first={sizes[2]}", f"--resize-s={RAY_RESIZE_S}"]
        options += [f"--address={plan.endpoint}", f"--max-failures={plan.max_restarts}"]
        return [self.python, *plan.tail(), *options]

    def environment(self, plan: JobPlan, node: int) -> dict[str, str]:
        return RAY_WAITS | RAY_QUIET


def service_folder(port: int) -> Path:
    """The folder of the service at a port of this host, with a short path, since it may hold sockets. It is deleted
    with the service."""
    return Path(tempfile.gettempdir()) / f"edl-b-{port}"


def ray_start(python: str) -> list[str]:
    """What the command lines of the head and of the nodes have in common."""
    command = [
        python,
        "-c",
        "from ray.scripts.scripts import main; main()",
        "start",
        "--block",
        "--disable-usage-stats",
    ]
    command += [f"--node-ip-address={LOOPBACK}", f"--object-store-memory={RAY_MEMORY_BYTES}"]
    # Ports of the workers are free ones: all nodes are on one host.
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    return [*command, "--include-log-monitor=false", "--num-gpus=0"]
