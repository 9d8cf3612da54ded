"""The Kubernetes adapters' parsing of settings, names and pods, without a server."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from edl.errors import SettingError
from edl.job_records import SchedulerChoice
from edl.launch.scale_options import KINDS
from edl.schedulers.kubernetes import CONF_KEYS, check, pods
from edl.schedulers.kubernetes.access import Options, options_from
from edl.schedulers.kubernetes.kinds import kind_from

Json = dict[str, Any]
INSIDE = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
OPTIONS = Options("https://10.0.0.1", "ml")


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """A service account's files as mounted into a pod."""
    for name, text in (("token", "t"), ("ca.crt", "c"), ("namespace", "ml\n")):
        (tmp_path / name).write_text(text)
    return tmp_path


# --- settings --------------------------------------------------------------------------------------------------------


def test_a_pod_needs_no_settings(account: Path) -> None:
    options = options_from({}, INSIDE, account)
    assert options == Options("https://10.0.0.1:443", "ml", str(account / "token"), str(account / "ca.crt"))
    six = options_from({}, {**INSIDE, "KUBERNETES_SERVICE_HOST": "fd00::1"}, account)
    assert six.url == "https://[fd00::1]:443"
    assert options_from({}, {**INSIDE, "POD_NAMESPACE": "other"}, account).namespace == "other"
    assert options_from({"namespace": "mine"}, {**INSIDE, "POD_NAMESPACE": "other"}, account).namespace == "mine"


def test_the_pods_credentials_go_to_its_own_server_only(account: Path) -> None:
    options = options_from({"api": "https://elsewhere:6443/"}, INSIDE, account)
    assert (options.url, options.token_file, options.ca) == ("https://elsewhere:6443", "", "")


def test_a_token_is_not_shown_on_the_way(account: Path) -> None:
    token = str(account / "token")
    with pytest.raises(SettingError, match="would send the token"):
        options_from({"api": "http://10.0.0.1:8001", "token_file": token}, {}, account)
    for api in ("http://127.0.0.1:8001", "http://localhost:8001", "http://[::1]:8001"):
        assert options_from({"api": api, "token_file": token}, {}, account).token_file == token
    assert options_from({"api": "http://10.0.0.1:8001"}, {}, account).token_file == "", "there is none to show"


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({}, "does not run in a Kubernetes pod"),
        ({"apis": "x"}, "apis: Kubernetes knows api, namespace"),
        ({"api": "ftp://x"}, "must be a URL"),
        ({"api": "https://"}, "must be a URL"),
        ({"api": "https://x:0"}, "must be a URL"),
        ({"api": "https://x:port"}, "must be a URL"),
        ({"api": "https://user@x"}, "must be a URL"),
        ({"api": "https://x", "token_file": "/nowhere"}, "token_file=/nowhere: no such file"),
        ({"api": "https://x", "ca": "/nowhere"}, "ca=/nowhere: no such file"),
        ({"api": "https://x", "timeout": "soon"}, "timeout=soon: must be from"),
        ({"api": "https://x", "timeout": "0"}, "timeout=0: must be from"),
        ({"api": "https://x", "poll": "1e9"}, "poll=1e9: must be from"),
        ({"api": "https://x", "poll": "nan"}, "poll=nan: must be from"),
        ({"api": "https://x", "indexed": "perhaps"}, "must be true or false"),
    ],
)
def test_wrong_settings(conf: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=words):
        options_from(conf, {}, tmp_path)


def test_the_table_of_options_knows_these_settings() -> None:
    kinds = [kind for kind in KINDS.values() if kind.module == "edl.schedulers.kubernetes"]
    assert {key for kind in kinds for key in kind.conf} == set(CONF_KEYS)


def test_a_missing_package_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = SchedulerChoice("statefulset", "train", {"api": "https://10.0.0.1"})
    check(wanted)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="pip install aiohttp"):
        check(wanted)


# --- kinds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted",
    [
        "statefulset/",
        "statefulset/Train",
        "statefulset/a/b",
        "job/../x",
        "custom:g/v1/x",
        "custom:g//p/n",
        "deployment/x",
    ],
)
def test_names_that_cannot_be(wanted: str) -> None:
    with pytest.raises(SettingError, match="must be"):
        kind_from(wanted, OPTIONS)


@pytest.mark.parametrize(
    ("wanted", "path", "rule"),
    [
        ("statefulset/train", "/apis/apps/v1/namespaces/ml/statefulsets/train/scale", "apps statefulsets/scale"),
        ("job/train", "/apis/batch/v1/namespaces/ml/jobs/train", "batch jobs"),
        ("volcano/train", "/apis/batch.volcano.sh/v1alpha1/namespaces/ml/jobs/train", "batch.volcano.sh jobs"),
        (
            "paddlejob/train",
            "/apis/batch.paddlepaddle.org/v1/namespaces/ml/paddlejobs/train",
            "batch.paddlepaddle.org paddlejobs",
        ),
        (
            "custom:kubeflow.org/v1/pytorchjobs/train",
            "/apis/kubeflow.org/v1/namespaces/ml/pytorchjobs/train/scale",
            "kubeflow.org pytorchjobs/scale",
        ),
    ],
)
def test_where_the_size_is(wanted: str, path: str, rule: str) -> None:
    target = kind_from(wanted, OPTIONS).target
    assert (target.path, f"{target.group} {target.resource}") == (path, rule)


@pytest.mark.parametrize(
    ("wanted", "pod", "index"),
    [
        ("statefulset/train", "train-12", 12),
        ("statefulset/train", "train-x", -1),
        ("statefulset/train", "other-train-1", -1),
        ("job/train", "train-3-x7k2p", 3),
        ("job/train", "train-3", -1),
        ("volcano/train", "train-worker-4", 4),
        ("paddlejob/train", "train-worker-5", 5),
        ("paddlejob/train", "train-ps-5", -1),
        ("custom:kubeflow.org/v1/pytorchjobs/train", "train-2", -1),
    ],
)
def test_the_index_of_a_pod(wanted: str, pod: str, index: int) -> None:
    assert kind_from(wanted, OPTIONS).index(pod) == index


# --- pods ------------------------------------------------------------------------------------------------------------


def pod(name: str = "train-0", *, host: str = "host", phase: str = "Running", **about: Any) -> Json:
    spec = {"nodeName": host} if host else {}
    return {"metadata": {"name": name, **about}, "spec": spec, "status": {"phase": phase}}


def waiting(reason: str, message: str = "") -> Json:
    entry = pod()
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    entry["status"]["containerStatuses"] = [{"state": state}]
    return entry


def unplaced(message: str) -> Json:
    entry = pod(host="", phase="Pending")
    entry["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": message}]
    return entry


GOING: dict[str, Any] = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}


def test_what_holds_pods_up() -> None:
    few = "0/3 nodes are available: 3 Insufficient cpu."
    assert pods.pending_reasons([pod(), unplaced(few), unplaced(few)], 3) == (
        "2 pods pending: 0/3 nodes are available: 3 Insufficient cpu"
    )
    assert pods.pending_reasons([pod()], 1) == ""
    assert pods.pending_reasons([pod()], 3) == "2 pods not created yet"
    assert pods.pending_reasons([unplaced(few)], 0) == "1 pod pending: 0/3 nodes are available: 3 Insufficient cpu"
    assert pods.pending_reasons([pod(host="", phase="Pending")], 1) == "1 pod pending: waiting for the scheduler"
    assert pods.pending_reasons([waiting("ContainerCreating")], 1) == ""
    assert (
        pods.pending_reasons([waiting("ErrImagePull", "no such image")], 1)
        == "1 pod pending: ErrImagePull: no such image"
    )
    assert pods.pending_reasons([{**unplaced(few), "metadata": {"name": "x", **GOING}}], 1) == "1 pod not created yet"
    assert pods.pending_reasons([pod(host="", phase="Succeeded")], 1) == ""
    assert len(pods.pending_reasons([unplaced("x" * 5000)], 1)) < 300


def test_which_pods_are_placed() -> None:
    assert pods.placed(pod())
    assert not pods.placed(pod(host=""))
    assert not pods.placed(pod(**GOING))
    assert not pods.placed(pod(phase="Failed"))


def test_which_pods_will_be_removed() -> None:
    assert pods.pending_removal(pod()) is None
    assert pods.pending_removal(pod(**GOING)) == ("the pod is being deleted", 30.0)
    assert pods.pending_removal(pod(phase="Succeeded", **GOING)) is None, "it has ended already"
    entry = pod()
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": ""}
    entry["status"]["conditions"] = [{**condition, "status": "False"}]
    assert pods.pending_removal(entry) is None
    entry["status"]["conditions"] = [condition]
    assert pods.pending_removal(entry) == ("DeletionByTaintManager", 0.0)
    entry["metadata"].update(GOING)
    assert pods.pending_removal(entry) == ("DeletionByTaintManager", 30.0)


def host(*taints: tuple[str, str]) -> Json:
    return {
        "metadata": {"name": "host"},
        "spec": {"taints": [{"key": key, "effect": effect} for key, effect in taints]},
    }


def test_which_taints_doom_a_pod() -> None:
    unreachable = "node.kubernetes.io/unreachable"
    assert pods.removal_by_taint(pod(), None) is None
    assert pods.removal_by_taint(pod(), host(("dedicated", "NoSchedule"))) is None
    words = f"its host host has the taint {unreachable}"
    assert pods.removal_by_taint(pod(), host((unreachable, "NoExecute"))) == (words, 0.0)
    patient = pod()
    patient["spec"]["tolerations"] = [
        {"key": unreachable, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    ]
    assert pods.removal_by_taint(patient, host((unreachable, "NoExecute"))) == (words, 300.0)
    immune = pod()
    immune["spec"]["tolerations"] = [{"operator": "Exists"}]
    assert pods.removal_by_taint(immune, host((unreachable, "NoExecute"))) is None
    spot = "aws-node-termination-handler/spot-itn"
    assert pods.removal_by_taint(immune, host((spot, "NoSchedule"))) == (f"its host host has the taint {spot}", 0.0)
