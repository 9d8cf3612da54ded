"""The examples of deploy/cluster-env: valid for Kubernetes, and one job each with its operator's variables."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from edl.launch import __main__ as program
from edl.launch.options.agreement import differences
from edl.launch.resolved_options import ResolvedOptions
from edl.launch.settings import Backend, LaunchSettings
from tests.support.launching import launch_settings
from tests.support.script_folder import folder
from tests.unit.edl.launch.test_deploy import VERSIONS, template_of, validate, workload
from tests.unit.edl.schedulers.test_slurm import program as make_program

__all__ = ["folder"]

Json = dict[str, Any]
Env = dict[str, str]
DEPLOY = Path(__file__).resolve().parents[4] / "deploy" / "cluster-env"
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
TRAINER_PORT = "29500"
"""Of release 2, pkg/constants."""


def manifest(name: str) -> Json:
    entry: Json = yaml.safe_load((DEPLOY / name).read_text())
    return entry


def templates(entry: Json) -> dict[str, tuple[int, Json]]:
    """By the role's name in lower case: how many pods, and what they are made from."""
    spec = entry["spec"]
    match entry["kind"]:
        case "PyTorchJob" | "PaddleJob" as kind:
            roles = spec[f"{kind.removesuffix('Job').replace('PyTorch', 'pytorch').lower()}ReplicaSpecs"]
            return {name.lower(): (role["replicas"], role["template"]) for name, role in roles.items()}
        case "Job":
            return {task["name"]: (task["replicas"], task["template"]) for task in spec["tasks"]}
    return {}


def container(template: Json) -> Json:
    (only,) = template["spec"]["containers"]
    return dict(only)


def port_of(template: Json, name: str) -> str:
    (port,) = [one["containerPort"] for one in container(template)["ports"] if one["name"] == name]
    return str(port)


# --- what each operator sets ------------------------------------------------------------------------------------------


def pytorchjob(entry: Json) -> Iterator[tuple[list[str], Env]]:
    """kubeflow/trainer, release 1.9: pkg/controller.v1/pytorch/{envvar,master,elastic}.go."""
    job, roles, elastic = entry["metadata"]["name"], templates(entry), entry["spec"].get("elasticPolicy")
    total = sum(replicas for replicas, _ in roles.values())
    for role, (replicas, template) in roles.items():
        assert container(template)["name"] == "pytorch", "or the operator finds no port"
        for index in range(replicas):
            env = {**POD, "HOSTNAME": f"{job}-{role}-{index}"}
            if "master" in roles:
                rank = index + (role == "worker")
                port = port_of(roles["master"][1], "pytorchjob-port")
                env |= {"MASTER_ADDR": f"{job}-master-0", "MASTER_PORT": port, "WORLD_SIZE": str(total)}
                env |= {"RANK": str(rank), "PET_NODE_RANK": str(rank)}
            if elastic:
                port = port_of(roles["worker"][1], "pytorchjob-port")
                env |= {"PET_RDZV_ENDPOINT": f"{job}-worker-0:{port}", "PET_RDZV_BACKEND": elastic["rdzvBackend"]}
                env |= {"PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}"}
                env |= {"PET_RDZV_ID": elastic["rdzvId"], "PET_MAX_RESTARTS": str(elastic["maxRestarts"])}
            else:
                env |= {"PET_NNODES": str(total)}
            yield container(template)["args"], env


def paddlejob(entry: Json) -> Iterator[tuple[list[str], Env]]:
    """kubeflow/trainer, release 1.9: pkg/controller.v1/paddlepaddle/envvar.go. The first pod has its address."""
    job, ((replicas, template),) = entry["metadata"]["name"], templates(entry).values()
    assert container(template)["name"] == "paddle"
    port = port_of(template, "master")
    for index in range(replicas):
        host = "10.1.2.3" if index == 0 else f"{job}-worker-0"
        env = {"PADDLE_JOB_ID": job, "PADDLE_NNODES": str(replicas), "PADDLE_MASTER": f"{host}:{port}"}
        yield container(template)["args"], {**POD, **env, "POD_IP_DUMMY": "10.1.2.3"}


def trainjob(entry: Json) -> Iterator[tuple[list[str], Env]]:
    """kubeflow/trainer, release 2.0: pkg/runtime/framework/plugins/torch/torch.go."""
    job, trainer = entry["metadata"]["name"], entry["spec"]["trainer"]
    assert entry["spec"]["runtimeRef"]["name"] == "torch-distributed"
    for index in range(trainer["numNodes"]):
        store = {"PET_MASTER_ADDR": f"{job}-node-0-0.{job}", "PET_MASTER_PORT": TRAINER_PORT}
        size = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
        yield trainer["args"], {**POD, **store, **size, "PET_NODE_RANK": str(index), "JOB_COMPLETION_INDEX": str(index)}


def volcano(entry: Json) -> Iterator[tuple[list[str], Env]]:
    """volcano 1.9: pkg/controllers/job/plugins/{env,svc,distributed-framework/pytorch}."""
    job, roles, plugins = entry["metadata"]["name"], templates(entry), entry["spec"]["plugins"]
    told = dict(argument.removeprefix("--").split("=") for argument in plugins["pytorch"])
    assert set(roles) == {told["master"], told["worker"]} and {"env", "svc"} < set(plugins)
    total, common = sum(replicas for replicas, _ in roles.values()), dict(POD)
    assert entry["spec"]["minAvailable"] == total, "a job of a fixed size begins with all of its pods"
    for role, (replicas, _) in roles.items():
        hosts = ",".join(f"{job}-{role}-{index}.{job}" for index in range(replicas))
        common |= {f"VC_{role.upper()}_HOSTS": hosts, f"VC_{role.upper()}_NUM": str(replicas)}
    common |= {"MASTER_ADDR": f"{job}-master-0.{job}", "MASTER_PORT": told["port"], "WORLD_SIZE": str(total)}
    for role, (replicas, template) in roles.items():
        assert port_of(template, "store") == told["port"]
        for index in range(replicas):
            rank = index + (role == "worker")
            indexes = {"VC_TASK_INDEX": str(index), "VK_TASK_INDEX": str(index), "RANK": str(rank)}
            yield container(template)["args"], {**common, **indexes, "HOSTNAME": f"{job}-{role}-{index}"}


CASES = {
    "pytorchjob.yaml": (pytorchjob, 3, "train-master-0:23456"),
    "pytorchjob-elastic.yaml": (pytorchjob, 2, "train-worker-0:23456"),
    "paddlejob.yaml": (paddlejob, 2, "train-worker-0:36543"),
    "trainjob.yaml": (trainjob, 2, f"train-node-0-0.train:{TRAINER_PORT}"),
    "volcano.yaml": (volcano, 3, "train-master-0.train:23456"),
}
ELASTIC = "pytorchjob-elastic.yaml"


def launched(arguments: list[str], env: Env, monkeypatch: pytest.MonkeyPatch) -> tuple[LaunchSettings, list[str]]:
    """Settings that the launcher derives from its command line and environment in a pod."""
    with monkeypatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        *options, _ = arguments
        context = program.run.make_context("edl-run", [*options, "train.py"])
        told = ResolvedOptions.by(context, "train.py")
        program.settle(told, env)
        return launch_settings(told), told.remarks


def test_each_example_has_its_case() -> None:
    assert {path.name for path in MANIFESTS} == set(CASES)
    readme = (DEPLOY / "README.md").read_text()
    named = set(re.findall(r"^\| `([^`]+)`", readme, re.MULTILINE))
    assert named == {path.name for path in DEPLOY.iterdir()} - {"README.md"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_their_pods_are_valid(name: str, version: str) -> None:
    for _, template in templates(manifest(name)).values():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        validate({**pod, "metadata": {**template["metadata"], "name": "pod"}}, version)


@pytest.mark.parametrize("name", CASES)
def test_all_pods_are_one_job(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, pods, store = CASES[name]
    found = [launched(arguments, env, monkeypatch)[0] for arguments, env in operator(manifest(name))]
    assert len(found) == pods
    assert not any(differences(one.spec, found[0].spec) for one in found), "they would refuse each other"
    wanted = (1, 4) if name == ELASTIC else (pods, pods)
    assert {(one.spec.nodes.minimum, one.spec.nodes.maximum) for one in found} == {wanted}
    assert {one.slots for one in found} == {2}
    (first, *_), others = found[0].store.endpoints, {one.store.endpoints for one in found[1:]}
    assert others == {(store,)} and first.rpartition(":")[2] == store.rpartition(":")[2]
    assert first in (store, "10.1.2.3:36543"), "the first pod of a PaddleJob has its address"
    if name not in (ELASTIC, "paddlejob.yaml"):
        assert [one.node.rank for one in found] == list(range(pods))


@pytest.mark.parametrize("name", CASES)
def test_pods_have_time_to_leave(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = manifest(name)
    arguments, env = next(CASES[name][0](entry))
    settings, _ = launched(arguments, env, monkeypatch)
    for _, template in templates(entry).values():
        assert template["spec"]["terminationGracePeriodSeconds"] > settings.spec.timeouts.shutdown_s
        assert container(template)["command"] == ["python", "-m", "edl.launch"]
        assert arguments[-1] == "/app/train.py"


def test_the_step_of_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DEPLOY / "step.sbatch").read_text()
    subprocess.run(["bash", "-n", str(DEPLOY / "step.sbatch")], check=True)
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", text, re.MULTILINE))
    nodes = int(asked["nodes"])
    assert asked["ntasks-per-node"] == "1"
    words = shlex.split(text.replace("\\\n", " ").splitlines()[-1])
    at = words.index("edl.launch")
    assert words[at - 2 : at] == ["python", "-m"] and words[:2] == ["exec", "srun"]
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_STEP_NUM_NODES": asked["nodes"],
        "SLURM_STEP_NUM_TASKS": asked["nodes"],
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})",
    }
    for rank in range(nodes):
        settings, _ = launched(words[at + 1 :], {**step, "SLURM_NODEID": str(rank)}, monkeypatch)
        assert settings.node.rank == rank and settings.spec.nodes.maximum == nodes
        assert settings.store.endpoints[0].startswith("n1:")


@pytest.mark.parametrize(("flavour", "one_each"), [("openmpi", "--map-by ppr:1:node"), ("hydra", "-ppn 1")])
def test_the_script_for_mpi(flavour: str, one_each: str, tmp_path: Path) -> None:
    """mpirun is a program here that prints its arguments and the variables that it was given."""
    for name in ("mpirun", "mpiexec.hydra"):
        make_program(tmp_path / "bin", name, 'echo "$MASTER_ADDR $MASTER_PORT: $*"')
    done = subprocess.run(
        [str(DEPLOY / "mpi.sh"), "n1", "n2", "n3"],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "MPI": flavour},
        capture_output=True,
        text=True,
        check=True,
    )
    variables, _, words = done.stdout.partition(": ")
    assert variables == "n1 23456"
    assert "n1,n2,n3" in words and one_each in words and " 3 " in words and "-m edl.launch" in words
    if flavour == "openmpi":
        assert "-x MASTER_ADDR -x MASTER_PORT" in words, "it passes on only what it is told to"


PADDLECLOUD = {**POD, "POD_IP": "10.0.0.2", "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINING_ROLE": "TRAINER"}
"""paddle-operator: controllers/paddlejob_helper.go; each pod has its PADDLE_TRAINER_ID as well."""
FIXED = {
    "TRAINER_PORTS_NUM": "20",
    "PADDLE_PORT": "2379",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:2379,10.0.0.2:2379",
    "PADDLE_TRAINERS": "10.0.0.1,10.0.0.2",
    "PADDLE_TRAINERS_NUM": "2",
}
"""The ConfigMap of a job that is not elastic."""
WITH_NP = {"PADDLE_ELASTIC_JOB_ID": "ml-train", "PADDLE_ELASTIC_NP": "2", "PADDLE_ELASTIC_TIMEOUT": "60"}


@pytest.mark.parametrize("more", [FIXED, WITH_NP, {**WITH_NP, "PADDLE_ELASTIC_SERVER": "other:2379"}])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_paddlecloud_job_keeps_its_store(rank: int, more: Env, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """deploy/kubernetes/paddlejob names an etcd and a range of sizes; the operator describes pods as they are now."""
    arguments = container(template_of(workload("paddlejob")))["args"]
    env = {**PADDLECLOUD, **more, "PADDLE_TRAINER_ID": str(rank)}
    settings, _ = launched(arguments, env, monkeypatch)
    assert settings.store.endpoints == ("etcd:2379",) and settings.store.backend is Backend.ETCD
    assert (settings.spec.nodes.minimum, settings.spec.nodes.maximum) == (1, 8)
    assert settings.spec.job == "train" and settings.node.rank == rank


def test_a_paddlecloud_job_that_says_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables are enough, as they were for Paddle's launcher."""
    pods = [{**PADDLECLOUD, **FIXED, "PADDLE_TRAINER_ID": str(rank)} for rank in range(2)]
    found = [launched(["/app/train.py"], env, monkeypatch)[0] for env in pods]
    assert {one.store.endpoints for one in found} == {("10.0.0.1:2379",)}
    assert [one.node.rank for one in found] == [0, 1]
    assert {(one.spec.nodes.minimum, one.spec.nodes.maximum) for one in found} == {(2, 2)}
