"""Launchers without options: environment variables of the scheduler give size, rank and meeting point."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.process.free_ports import free_endpoints
from tests.process.harness import PLAIN, Job, Node
from tests.process.slurm_fixture import Slurm, missing

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
HOST = "127.0.0.2"
"""Names of pods are not known here. An address does as well, but for 127.0.0.1, which each host is for itself."""


def kubeflow_elastic(port: str, rank: int) -> dict[str, str]:
    """A PyTorchJob with an elastic policy: kubeflow/trainer 1.9, pkg/controller.v1/pytorch/elastic.go."""
    store = {"PET_RDZV_ENDPOINT": f"{HOST}:{port}", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": "train"}
    return {**POD, **store, "PET_NNODES": "1:3", "PET_MAX_RESTARTS": "100", "HOSTNAME": f"train-worker-{rank}"}


def kubeflow_trainer(port: str, rank: int) -> dict[str, str]:
    """A TrainJob: kubeflow/trainer 2.0, pkg/runtime/framework/plugins/torch/torch.go."""
    store = {"PET_MASTER_ADDR": HOST, "PET_MASTER_PORT": port}
    return {**POD, **store, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}


def volcano_pytorch(port: str, rank: int) -> dict[str, str]:
    """Volcano 1.9 with the plugins svc, env and pytorch: pkg/controllers/job/plugins."""
    role = {"VC_TASK_INDEX": str(max(0, rank - 1)), "VC_MASTER_HOSTS": "train-master-0.train", "VC_MASTER_NUM": "1"}
    hosts = {"VC_WORKER_HOSTS": "train-worker-0.train", "VC_WORKER_NUM": "1"}
    return {**POD, **role, **hosts, "MASTER_ADDR": HOST, "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}


def open_mpi(port: str, rank: int) -> dict[str, str]:
    """mpirun -np 2 --map-by ppr:1:node -x MASTER_ADDR -x MASTER_PORT: Open MPI 4.1.4."""
    size = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    store = {"MASTER_ADDR": HOST, "MASTER_PORT": port}
    return {**size, **store, "OMPI_COMM_WORLD_RANK": str(rank), "PMIX_NAMESPACE": "1918042113"}


def mpich(port: str, rank: int) -> dict[str, str]:
    """mpiexec.hydra -n 2 -ppn 1 -genv MASTER_ADDR HOST: MPICH 4.0.2."""
    size = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    return {**size, "MASTER_ADDR": HOST, "MASTER_PORT": port, "PMI_RANK": str(rank)}


class Told(Job):
    """Launchers with nothing on their command line but what tests need to look at them."""

    def told(self, name: str, env: Mapping[str, str]) -> Node:
        """Start a launcher with this environment."""
        self.environment = env
        logs = f"--log-dir={self.folder / f'logs-{self.name}' / name}"
        return self.start(name, command=[*launcher(f"--node-id={name}", logs), f"--folder={self.steps_folder}"])


def launcher(*options: str) -> list[str]:
    return [sys.executable, "-m", "edl.launch", *options, str(PLAIN)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "world",
    [
        kubeflow_elastic,
        kubeflow_trainer,
        volcano_pytorch,
        pytest.param(open_mpi, marks=pytest.mark.soak),
        pytest.param(mpich, marks=pytest.mark.soak),
    ],
)
def test_two_launchers_that_are_told_nothing_meet(world, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    endpoint = f"{HOST}:{free_endpoints(1)[0].rpartition(':')[2]}"
    with Told(tmp_path, [endpoint], "etcd-embedded") as job:
        for rank in range(2):
            job.told(f"n{rank}", world(endpoint.rpartition(":")[2], rank))
        seen = job.wait_world(2)
        if world is not kubeflow_elastic:  # where pods are started in any order
            assert seen.nodes == {0: "n0", 1: "n1"}
        job.end_soon(5)
        assert job.exit_codes() == {"n0": 0, "n1": 0}


def may_mount() -> bool:
    """True if this process may mount file systems in its own namespace."""
    if not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.soak
@pytest.mark.skipif(not may_mount(), reason="may not have an /etc/hosts of its own")
def test_pods_of_a_pytorchjob_come_before_their_names(tmp_path: Path) -> None:
    """The variables of a PyTorchJob without an elastic policy. Its first pod is not in the cluster's DNS yet."""
    hosts = tmp_path / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text())
    port = free_endpoints(1)[0].rpartition(":")[2]
    with Told(tmp_path, [f"{HOST}:{port}"], "etcd-embedded") as job:
        for rank in range(2):
            variables = {"MASTER_ADDR": "train-master-0", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
            job.environment = {**POD, **variables}
            command = [*launcher(f"--node-id=n{rank}"), f"--folder={job.steps_folder}"]
            mounting = f'mount --bind {hosts} /etc/hosts; exec "$@"'
            job.start(f"n{rank}", command=["unshare", "-m", "sh", "-c", mounting, "sh", *command])
        for node in job.nodes.values():
            node.says("no address yet for train-master-0")
        with hosts.open("a") as file:
            file.write(f"{HOST} train-master-0\n")
        assert job.wait_world(2).nodes == {0: "n0", 1: "n1"}
        job.end_soon(5)
        assert job.exit_codes() == {"n0": 0, "n1": 0}


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """Three nodes on this host. The first of them in Slurm's order has a name that is known here."""
    if missing():
        pytest.skip(f"no Slurm: {missing()}")
    host = socket.gethostname().partition(".")[0]
    with Slurm(tmp_path / "slurm", names=(host, f"{host}x1", f"{host}x2")) as running:
        yield running
        running.clear()


@pytest.mark.soak
def test_a_step_of_srun_is_a_world(slurm: Slurm, tmp_path: Path) -> None:
    """srun with three nodes and no option of edl; and the two mistakes that people make."""
    with Told(tmp_path, [], "etcd-embedded") as job:
        command = [*launcher(), f"--folder={job.steps_folder}"]
        env = job.base_environment()
        number = slurm.submit("-N3", "--ntasks-per-node=1", command=command, environment=env)
        try:
            seen = job.wait_world(3)
            assert sorted(seen.nodes) == [0, 1, 2]
            remarks = [line for line in slurm.output(number).splitlines() if "Slurm: 3 nodes" in line]
            assert sorted(line.partition("this is node ")[2][0] for line in remarks) == ["0", "1", "2"]
            job.end_soon(5)
            assert slurm.wait(number, "COMPLETED", "FAILED").exit_code == "0:0", slurm.output(number)
            assert f"job slurm-{number}-0" in slurm.output(number)

            several = slurm.submit("-N2", "--ntasks-per-node=2", command=command, environment=env)
            assert slurm.wait(several, "COMPLETED", "FAILED").state == "FAILED"
            assert "--ntasks-per-node=1" in slurm.output(several)

            script = tmp_path / "shell.sh"
            quick = " ".join([*launcher(), f"--folder={job.steps_folder}", "--steps=3"])
            script.write_text(f"#!/bin/sh\nrm -f {job.steps_folder}/*\n{quick}\n")
            alone = slurm.submit("-N2", str(script), environment=env)
            assert slurm.wait(alone, "COMPLETED", "FAILED").exit_code == "0:0", slurm.output(alone)
            assert "1 node, 1 worker" in slurm.output(alone) and "Slurm:" not in slurm.output(alone)
        except BaseException:
            print(slurm.output(number))
            raise
        finally:
            slurm.clear()
