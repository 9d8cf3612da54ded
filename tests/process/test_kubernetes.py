"""A job on a fake Kubernetes whose pods are processes of this host: real launchers, real training, our own manifests.

The API server, its controllers and the kubelet are fakes (tests/kubernetes_fake); kubectl is the real one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes_fake.cluster import ADMIN, FakeCluster, documents_of
from tests.kubernetes_fake.kinds import JOBS, STATEFUL_SETS
from tests.kubernetes_fake.kubelet import Ended
from tests.kubernetes_fake.server import Fault, evict
from tests.process.harness import ROOT, WORKERS, Job, OutsideEtcd, until

DEPLOY = ROOT / "deploy" / "kubernetes"
TOKEN = "token-of-the-service-account"
DRAINED = 100
"""Exit status of a node that leaves in good order, in the manifest of the Indexed Job."""
KUBECTL = shutil.which("kubectl")

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def cluster_job(
    etcd: OutsideEtcd, tmp_path: Path, *options: str, folder: str = "base", **size: int
) -> Iterator[tuple[Job, FakeCluster]]:
    """A workload of deploy/kubernetes with its Role. Only the size and the launcher's options for this host differ."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    environment = {"EDL_SECRET_FILE": str(secret)}
    job = Job(tmp_path, [etcd.endpoint], script=(str(WORKERS / "rejoin_plain.py"),), environment=environment)
    with job:
        path = f"{Path(sys.executable).parent}:{job.base_environment()['PATH']}"
        with FakeCluster(tmp_path, {**job.base_environment(), "PATH": path}) as cluster:
            (role,) = [one for one in documents_of(DEPLOY / folder / "access.yaml") if one["kind"] == "Role"]
            cluster.allow(TOKEN, role)
            token_file = tmp_path / "token"
            token_file.write_text(TOKEN)
            conf = f"--scheduler-conf=api={cluster.server.url},namespace=default,token_file={token_file},poll=1"
            conf += f",ca={cluster.ca}" if cluster.ca else ""
            ours = [f"--rdzv-id={job.name}", f"--rdzv-endpoint=etcd://{etcd.endpoint}", conf]
            ours.append(f"--checkpoint-dir={tmp_path / 'checkpoints'}")
            (entry,) = documents_of(DEPLOY / folder / ("statefulset.yaml" if folder == "base" else "job.yaml"))
            entry["spec"].update(size)
            container = entry["spec"]["template"]["spec"]["containers"][0]
            (mounted,) = [one for one in container["env"] if one["name"] == "EDL_SECRET_FILE"]
            mounted["value"] = str(secret)  # as if the Secret had been mounted there
            *given, script = container["args"]
            assert script == "/app/train.py"
            given.remove("--http-host=0.0.0.0")  # the pods of the fake cluster share the host, with an address each
            container["args"] = [*given, *ours, *options, *job.script, f"--folder={job.steps_folder}", "--pause=0.1"]
            cluster.apply(entry)
            try:
                yield job, cluster
            except BaseException:
                cluster.dump()
                raise


def size_of(cluster: FakeCluster) -> int:
    return int(cluster.get(STATEFUL_SETS, "train")["spec"]["replicas"])


def by_kubectl(cluster: FakeCluster, nodes: int) -> None:
    assert KUBECTL is not None
    where = [f"--kubeconfig={cluster.kubeconfig()}", f"--cache-dir={cluster.folder / 'kubectl'}"]
    command = [KUBECTL, *where, "scale", "statefulset/train", f"--replicas={nodes}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip())
    assert done.stdout == "statefulset.apps/train scaled\n"


def by_patch(cluster: FakeCluster, nodes: int) -> None:
    """Set the number of replicas by a patch, as an autoscaler does."""
    context = ssl.create_default_context(cafile=cluster.ca) if cluster.ca else None
    request = urllib.request.Request(  # noqa: S310 - the fake's own address
        f"{cluster.server.url}/apis/apps/v1/namespaces/default/statefulsets/train/scale",
        json.dumps({"spec": {"replicas": nodes}}).encode(),
        {"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/merge-patch+json"},
        method="PATCH",
    )
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:  # noqa: S310
        assert json.load(answer)["spec"]["replicas"] == nodes


def check_steps(job: Job) -> None:
    """Every step once, and none left out."""
    steps = [step.step for step in job.steps() if step.rank == 0]
    assert steps == list(range(1, len(steps) + 1))


def worlds(job: Job) -> list[int]:
    """Sizes of the worlds that trained, in their order."""
    rounds = {step.round: step.world for step in job.steps()}
    return [world for _, world in sorted(rounds.items())]


def ended(cluster: FakeCluster, *pods: str) -> list[Ended]:
    """Wait until these pods have ended; how all have that ended so far."""
    until(lambda: {one.pod for one in cluster.ended()} >= set(pods), f"the end of {', '.join(pods)}")
    return cluster.ended()


def check_end(job: Job, cluster: FakeCluster) -> None:
    """The job comes to its end; the StatefulSet, which would start its pods again, is made 0."""
    job.end_soon()
    until(lambda: size_of(cluster) == 0 and not cluster.pods(), "no pod is left")
    assert [one for one in cluster.ended() if one.code] == []
    assert (job.steps_folder / "result.json").exists()
    check_steps(job)


@pytest.mark.slow
def test_the_world_follows_the_statefulset(etcd: OutsideEtcd, tmp_path: Path) -> None:
    """``kubectl scale`` 2 -> 4 -> 1: no step is repeated, and drained pods exit with 0."""
    scale = by_kubectl
    if KUBECTL is None or shutil.which("openssl") is None:
        print("kubectl or openssl is missing (apt-get install kubernetes-client openssl): scaling by PATCH")
        scale = by_patch
    with cluster_job(etcd, tmp_path) as (job, cluster):
        seen = job.wait_world(2)
        job.wait_steps(5)
        scale(cluster, 4)
        seen = job.wait_world(4, after=seen.round)
        assert set(seen.nodes.values()) == {"train-0", "train-1", "train-2", "train-3"}
        until(lambda: cluster.get(STATEFUL_SETS, "train")["status"]["readyReplicas"] == 4, "all answer at /readyz")
        job.wait_steps(5)
        scale(cluster, 1)
        seen = job.wait_world(1, after=seen.round)
        assert seen.nodes == {0: "train-0"}
        leavers = ("train-1", "train-2", "train-3")
        left = sorted((one.pod, one.code, one.asked) for one in ended(cluster, *leavers))
        print(f"ended (pod, exit code, by SIGTERM): {left}")
        assert left == [(pod, 0, True) for pod in leavers]
        job.wait_steps(5)
        sizes = worlds(job)
        print(f"worlds: {sizes}")
        # One change if the Master sees the new size before pods are asked to end, else one for each that is earlier.
        shrinking = sizes[sizes.index(4) :]
        assert shrinking == sorted(set(shrinking), reverse=True)
        assert shrinking[-1] == 1
        check_steps(job)
        check_end(job, cluster)


@pytest.mark.soak
def test_the_master_sets_the_size(etcd: OutsideEtcd, tmp_path: Path) -> None:
    """``--scale-owner=master``: a request comes to the Master, which has the StatefulSet give and take pods."""
    with cluster_job(etcd, tmp_path, "--scale-owner=master", replicas=1) as (job, cluster):
        seen = job.wait_world(1)
        job.wait_steps(5)
        done = job.cli("scale", "3", "--reason=the test")
        assert done.returncode == 0, done.stderr
        assert size_of(cluster) == 3
        seen = job.wait_world(3, after=seen.round)
        job.wait_steps(5)
        done = job.cli("scale", "1", "--no-wait")
        assert done.returncode == 0, done.stderr
        seen = job.wait_world(1, after=seen.round)
        assert seen.nodes == {0: "train-0"}
        until(lambda: size_of(cluster) == 1 and set(cluster.pods()) == {"train-0"}, "the pods are given back")
        job.wait_steps(5)
        assert worlds(job)[-2:] == [3, 1]
        check_end(job, cluster)


@pytest.mark.soak
def test_a_pending_pod_and_a_refusal_harm_nobody(etcd: OutsideEtcd, tmp_path: Path) -> None:
    """A pod that finds no host, and an API server that says 403 to everything: those that train go on."""
    with cluster_job(etcd, tmp_path, replicas=1) as (job, cluster):
        cluster.room(1)
        seen = job.wait_world(1)
        by_patch(cluster, 2)
        until(lambda: "train-1" in cluster.pods(), "the second pod")
        status = job.wait_status(lambda status: "Insufficient cpu" in status["scale"]["waiting"], "the reason")
        assert status["scale"]["desired"] == 2 and status["scale"]["nodes"] == 1
        fault = cluster.fail(Fault(403))
        until(lambda: fault.hits >= 2, "refusals")
        job.wait_steps(20, world=1)
        assert worlds(job) == [1], "the round was never stopped"
        cluster.room(2)
        job.wait_world(2, after=seen.round)
        job.wait_steps(5)
        cluster.heal()
        check_end(job, cluster)


@pytest.mark.soak
def test_an_indexed_job_resizes_loses_a_pod_and_completes(etcd: OutsideEtcd, tmp_path: Path) -> None:
    """The Master patches parallelism and completions; an evicted pod leaves in good order, which does not complete its
    index nor count as a failure; at the end the Job is complete."""
    size = {"parallelism": 1, "completions": 1}
    with cluster_job(etcd, tmp_path, folder="indexed-job", **size) as (job, cluster):
        seen = job.wait_world(1)
        job.wait_steps(5)
        assert job.cli("scale", "2").returncode == 0
        seen = job.wait_world(2, after=seen.round)
        (second,) = [name for name in cluster.pods() if name.startswith("train-1-")]
        job.wait_steps(5)
        store = cluster.server.store
        cluster.do(lambda: evict(store, "default", second, "PreemptionByScheduler", "a more important pod"))
        seen = job.wait_world(1, after=seen.round)
        assert [(one.code, one.asked) for one in ended(cluster, second)] == [(DRAINED, True)]
        seen = job.wait_world(2, after=seen.round)
        assert second not in seen.nodes.values()
        job.wait_steps(5)
        status = cluster.get(JOBS, "train")["status"]
        assert (status["failed"], status["succeeded"]) == (0, 0)
        job.end_soon()
        until(lambda: cluster.get(JOBS, "train")["status"].get("conditions"), "the end of the Job")
        (condition,) = cluster.get(JOBS, "train")["status"]["conditions"]
        assert condition["type"] == "Complete"
        check_steps(job)
