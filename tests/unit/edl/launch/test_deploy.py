"""The manifests of deploy/kubernetes: valid for the published schemas, consistent with one another and with edl."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from edl.exit_codes import ExitCode
from edl.launch import __main__ as program
from edl.launch.resolved_options import ResolvedOptions
from edl.launch.settings import LaunchSettings
from edl.schedulers.kubernetes.access import options_from
from edl.schedulers.kubernetes.kinds import Patch, kind_from
from tests.kubernetes_fake.patches import patched
from tests.support.launching import launch_settings

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[4]
DEPLOY = ROOT / "deploy" / "kubernetes"
MANIFESTS = sorted(path for path in DEPLOY.rglob("*.yaml") if path.name != "kustomization.yaml")
KUSTOMIZATIONS = sorted(DEPLOY.rglob("kustomization.yaml"))
VERSIONS = ("1.31", "1.37")
"""Of Kubernetes: the oldest one in which the Indexed Job's fields are stable, and the newest with schemas."""
OURS = {
    "statefulset/train": "base",
    "job/train": "indexed-job",
    "volcano/train": "volcano",
    "paddlejob/train": "paddlejob",
}
FOREIGN = ("batch.volcano.sh", "batch.paddlepaddle.org")
"""Groups without published schemas: of these objects the pods are checked."""
CONF = {"api": "https://127.0.0.1:1", "namespace": "ml"}


def documents(path: Path) -> list[Json]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(DEPLOY)) for path in paths]


def validate(entry: Json, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    validator.validate(entry, version, strict=True)


def template_of(entry: Json) -> Json:
    """The pod template of the nodes."""
    spec = entry["spec"]
    match entry["kind"], entry["apiVersion"]:
        case "Job", "batch.volcano.sh/v1alpha1":
            (task,) = spec["tasks"]
            return dict(task["template"])
        case "PaddleJob", _:
            return dict(spec["worker"]["template"])
    return dict(spec["template"])


def workload(folder: str) -> Json:
    (found,) = [
        entry
        for path in sorted((DEPLOY / folder).glob("*.yaml"))
        for entry in documents(path)
        if entry["kind"] in ("StatefulSet", "Job", "PaddleJob") and "spec" in entry
    ]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=names(MANIFESTS))
def test_manifests_are_valid(path: Path, version: str) -> None:
    for entry in documents(path):
        if path.parent.parent.name == "overlays":
            continue  # a patch is no whole object; see below
        if entry["apiVersion"].startswith(FOREIGN):
            entry = {"apiVersion": "v1", "kind": "Pod", **template_of(entry)}
            entry["metadata"] = {**entry["metadata"], "name": "pod"}
        validate(entry, version)


def test_a_wrong_manifest_is_found() -> None:
    """The check itself works: it sees a field that does not exist, and one of the wrong type."""
    validator = pytest.importorskip("kubernetes_validate")
    for change in ({"replica": 2}, {"replicas": "two"}):
        entry = workload("base")
        entry["spec"].update(change)
        with pytest.raises(validator.ValidationError):
            validate(entry, VERSIONS[0])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("wanted", OURS)
def test_what_is_sent_leaves_valid_objects(wanted: str, version: str) -> None:
    """Each patch, applied as an API server applies it: the result is valid, and has the size."""
    kind = kind_from(wanted, options_from(CONF))
    entry = workload(OURS[wanted])
    entry["metadata"].update(resourceVersion="7", namespace="ml")
    if wanted.startswith("statefulset"):
        selector = "app.kubernetes.io/name=train"
        entry = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": entry["metadata"],
            "spec": {"replicas": 2},
        }
        entry["status"] = {"replicas": 2, "selector": selector}
        assert kind.selector(entry) == selector
    assert kind.nodes(entry) == 2
    for nodes in (5, 1):
        change = kind.patch(entry, nodes)
        assert isinstance(change, Patch) and json.loads(json.dumps(change.body)) == change.body
        entry = patched(entry, change.body, change.content_type, strategic=False)
        assert kind.nodes(entry) == nodes
        if not entry["apiVersion"].startswith(FOREIGN):
            validate(entry, version)


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=names(KUSTOMIZATIONS))
def test_kustomizations_name_what_is_there(path: Path) -> None:
    (entry,) = documents(path)
    found = entry["resources"] + [patch["path"] for patch in entry.get("patches", [])]
    for name in found:
        other = path.parent / name
        assert other.is_file() or (other / "kustomization.yaml").is_file(), name


@pytest.mark.parametrize("wanted", OURS)
def test_budgets_can_be_counted(wanted: str) -> None:
    """Kubernetes counts maxUnavailable by the /scale of what pods belong to; where there is none, as for a Job, a
    Volcano Job and a PaddleJob, it refuses every eviction, and elsewhere while one pod is pending. A number to keep
    works for all: the smallest with which the job trains."""
    budgets = [
        entry["spec"]
        for path in _applied(DEPLOY / OURS[wanted])
        for entry in documents(path)
        if "Budget" in entry["kind"]
    ]
    (budget,) = budgets
    least = next(one for one in arguments_of(wanted) if one.startswith("--nnodes="))
    assert "maxUnavailable" not in budget and f"--nnodes={budget['minAvailable']}:8" == least
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    labels = template_of(workload(OURS[wanted]))["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()


def arguments_of(wanted: str) -> list[str]:
    """Of the launcher."""
    (container,) = template_of(workload(OURS[wanted]))["spec"]["containers"]
    return list(container["args"])


def _applied(folder: Path) -> list[Path]:
    """Files that a kustomization names, and those of others that it names."""
    (entry,) = documents(folder / "kustomization.yaml")
    found: list[Path] = []
    for name in entry["resources"]:
        other = folder / name
        found += _applied(other) if other.is_dir() else [other]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", ["torch", "paddle"])
def test_overlays_are_valid(overlay: str, version: str) -> None:
    """Applied as kustomize does it, which this test does not need: its patches are strategic merge patches."""
    folder = DEPLOY / "overlays" / overlay
    (entry,) = documents(folder / "kustomization.yaml")
    result = workload("base")
    for one in entry["patches"]:
        (patch,) = documents(folder / one["path"])
        result = patched(result, patch, "application/strategic-merge-patch+json", strategic=True)
    validate(result, version)
    before, after = (template_of(one)["spec"]["containers"][0] for one in (workload("base"), result))
    assert {one["name"] for one in before["env"]} < {one["name"] for one in after["env"]}
    assert after["command"] == before["command"] and after["args"][-1] == before["args"][-1]
    differences = set(before["args"]) ^ set(after["args"])
    assert all(argument.startswith("--nproc-per-node=") for argument in differences), "else the two have drifted apart"


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is missing: apt-get install kubernetes-client")
@pytest.mark.parametrize("folder", ["base", "indexed-job", "volcano", "paddlejob", "overlays/torch", "overlays/paddle"])
def test_kubectl_can_build_them(folder: str) -> None:
    told = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True, check=False).stdout
    if 'Minor:"20"' in told:
        pytest.skip("kubectl 1.20 has kustomize 2, which does not know patches by file")
    done = subprocess.run(["kubectl", "kustomize", str(DEPLOY / folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = [document for document in yaml.safe_load_all(done.stdout) if document]
    for entry in built:
        if not entry["apiVersion"].startswith(FOREIGN):
            validate(entry, VERSIONS[-1])
    if folder.startswith("overlays"):
        (nodes,) = [one for one in built if one["kind"] == "StatefulSet" and one["metadata"]["name"] == "train"]
        assert template_of(nodes)["spec"]["containers"][0]["image"].startswith("registry.example.com/my-")


@pytest.mark.parametrize("wanted", OURS)
def test_roles_allow_what_edl_does_and_no_more(wanted: str) -> None:
    kind = kind_from(wanted, options_from(CONF))
    entries = documents(DEPLOY / OURS[wanted] / "access.yaml")
    account, role, binding = entries
    target = kind.target
    first = {"apiGroups": [target.group], "resources": [target.resource], "verbs": list(target.verbs)}
    assert role["rules"] == [
        {**first, "resourceNames": ["train"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    pod = template_of(workload(OURS[wanted]))["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]


@pytest.mark.parametrize("wanted", OURS)
def test_pods_start_the_launcher(wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As process 1, under the pod's name and address, with less time to end than the pod has, and few rights. The
    launcher takes all options and their values."""
    entry = workload(OURS[wanted])
    pod = template_of(entry)["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "edl.launch"]
    *options, script = container["args"]
    told = dict(option.split("=", 1) for option in options)
    (tmp_path / "train.py").touch()
    assert script == "/app/train.py"
    settings = launched([*options, f"--log-dir={tmp_path}", str(tmp_path / "train.py")], monkeypatch)
    assert settings.spec.timeouts.shutdown_s == float(told["--shutdown-timeout"])
    assert settings.http is not None and settings.http.host == "0.0.0.0", "for kubectl port-forward"
    assert told["--scheduler"] == wanted and told["--rdzv-id"] == entry["metadata"]["name"]
    assert float(told["--shutdown-timeout"]) < pod["terminationGracePeriodSeconds"]
    environment = {one["name"]: one for one in container["env"]}
    assert environment["POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert environment["EDL_NODE_ID"]["value"] == "$(POD_NAME)"
    assert environment["EDL_LOCAL_ADDR"]["value"] == "$(POD_IP)"
    (port,) = container["ports"]
    assert str(port["containerPort"]) == told["--http-port"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"]
    safety = container["securityContext"]
    assert safety["readOnlyRootFilesystem"] and not safety["allowPrivilegeEscalation"]
    assert safety["capabilities"] == {"drop": ["ALL"]}
    claimed = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == claimed


@pytest.mark.parametrize("wanted", OURS)
def test_only_who_has_the_secret_or_belongs_to_the_job_gets_in(wanted: str) -> None:
    pod = template_of(workload(OURS[wanted]))
    (container,) = pod["spec"]["containers"]
    environment = {one["name"]: one.get("value", "") for one in container["env"]}
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "secret"]
    assert mount["readOnly"] and environment["EDL_SECRET_FILE"] == f"{mount['mountPath']}/secret"
    (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == "secret"]
    assert volume["secret"] == {"secretName": "train", "defaultMode": 0o440}
    assert pod["spec"]["securityContext"]["fsGroup"], "by which the launcher's user may read it"
    assert "kubectl create secret generic train --from-literal=secret=" in (ROOT / "docs/kubernetes.md").read_text()
    nodes, store = policies(OURS[wanted]), policies("etcd")
    labels = pod["metadata"]["labels"]
    for policy in (*nodes, *store):
        assert policy["policyTypes"] == ["Ingress"]
        assert [rule["from"] for rule in policy["ingress"]] == [[{"podSelector": {"matchLabels": labels}}]]
    assert [policy["podSelector"]["matchLabels"] for policy in nodes if policy not in store] == [labels]
    (etcd,) = [one for one in documents(DEPLOY / "etcd" / "etcd.yaml") if one["kind"] == "StatefulSet"]
    (policy,) = store
    assert policy["podSelector"]["matchLabels"] == template_of(etcd)["metadata"]["labels"]


def policies(folder: str) -> list[Json]:
    entries = [entry for path in _applied(DEPLOY / folder) for entry in documents(path)]
    return [entry["spec"] for entry in entries if entry["kind"] == "NetworkPolicy"]


def launched(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> LaunchSettings:
    """Settings that the launcher derives from its command line in a pod."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    options = dict(program.run.make_context("edl-run", arguments).params)
    return launch_settings(ResolvedOptions(options, options.pop("script"), options.pop("arguments")))


def test_the_dashboard_page_names_the_port_of_the_pods() -> None:
    page = (ROOT / "docs/dashboard.md").read_text()
    (target,) = re.findall(r"kubectl port-forward statefulset/train \d+:(\d+)", page)
    assert f"--http-port={target}" in arguments_of("statefulset/train")


def test_nodes_that_have_left_a_volcano_job_do_not_complete_it() -> None:
    """Volcano compares the pods that have succeeded, those above the new size among them, with the new size."""
    assert "policies" not in workload("volcano")["spec"]
    assert "policies" not in workload("volcano")["spec"]["tasks"][0]


def test_exit_codes_of_the_indexed_job() -> None:
    """Only outcomes of the whole job fail it: one pod that contradicts the others must not end them. What left in good
    order costs nothing, and the limit of all other ends is none that a long job reaches."""
    spec = workload("indexed-job")["spec"]
    evicted, drained, over = spec["podFailurePolicy"]["rules"]
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    left, terminated = drained["onExitCodes"]["values"]
    assert terminated == ExitCode.TERMINATED and left not in list(ExitCode)
    arguments = template_of(workload("indexed-job"))["spec"]["containers"][0]["args"]
    assert f"--drained-exit-code={left}" in arguments
    passing = {
        ExitCode.OK,
        ExitCode.USAGE,
        ExitCode.NOT_ENOUGH_NODES,
        ExitCode.STORE_UNREACHABLE,
        ExitCode.JOB_CONFLICT,
        ExitCode.PORT_IN_USE,
        ExitCode.CANNOT_START_WORKER,
        ExitCode.CHECKPOINT_UNUSABLE,
        ExitCode.FOREIGN_JOB,
        ExitCode.INTERNAL,
        ExitCode.INTERRUPTED,
        ExitCode.TERMINATED,
    }
    assert over["onExitCodes"]["values"] == [code for code in ExitCode if code not in passing]
    assert (evicted["action"], drained["action"], over["action"]) == ("Ignore", "Ignore", "FailJob")
    assert spec["backoffLimit"] >= 1000
    assert spec["parallelism"] == spec["completions"] and spec["podReplacementPolicy"] == "Failed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy needs it"
