"""Finds the API server and the credentials: from the pod that this launcher runs in, or from ``--scheduler-conf``."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from edl.config import environment
from edl.errors import SettingError
from edl.schedulers.deps import seconds

SETTING = "--scheduler-conf"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which a pod finds the credentials of its service account."""
CONF_KEYS = {
    "api": "URL of the API server. Default: the pod's own cluster.",
    "namespace": "Namespace of the object. Default: that of the pod.",
    "token_file": "File with the bearer token, reread when it changes. Default: the pod's service account.",
    "ca": "File with the CA certificates of the API server. Default: those of the pod, otherwise the system's.",
    "timeout": "Seconds that one call may take, retries included. Default: 10.",
    "poll": "Seconds between two reads of the size while no pod changes. Default: 10.",
    "task": "Task of a Volcano Job whose replicas are the nodes. Default: its only one, or the one named worker.",
    "selector": "Labels of the nodes' pods, separated by ';'. Default: the object's own selector.",
    "indexed": "true: a custom resource removes the pod with the highest ordinal first. Default: false.",
    "watch_nodes": "true: taints of the hosts count as notices as well (needs a ClusterRole). Default: false.",
}
"""Keys of ``--scheduler-conf`` for Kubernetes, with descriptions."""


@dataclass(frozen=True, slots=True)
class Options:
    """The checked settings of one adapter; see ``CONF_KEYS``."""

    url: str
    """URL of the API server, without a trailing slash."""
    namespace: str
    token_file: str = ""
    ca: str = ""
    timeout_s: float = 10.0
    poll_s: float = 10.0
    task: str = ""
    selector: str = ""
    indexed: bool = False
    watch_nodes: bool = False


def options_from(
    conf: Mapping[str, str], variables: Mapping[str, str] | None = None, account: Path = SERVICE_ACCOUNT
) -> Options:
    """Parse ``--scheduler-conf`` and fill in defaults from the pod. Raises ``SettingError``."""
    variables = environment() if variables is None else variables
    unknown = sorted(set(conf) - set(CONF_KEYS))
    if unknown:
        raise SettingError(SETTING, unknown[0], f"Kubernetes knows {', '.join(CONF_KEYS)}")
    given = conf.get("api", "")
    url = _url(given) if given else _of_the_cluster(variables)
    # The pod's credentials are only sent to the pod's own cluster.
    inside = account if not given else None
    token_file = conf.get("token_file") or _existing(inside, "token")
    ca = conf.get("ca") or _existing(inside, "ca.crt")
    for key, path in (("token_file", conf.get("token_file")), ("ca", conf.get("ca"))):
        if path and not Path(path).is_file():
            raise SettingError(SETTING, f"{key}={path}", "no such file")
    _keep_secret(url, token_file)
    return Options(
        url=url,
        namespace=conf.get("namespace") or variables.get("POD_NAMESPACE") or _namespace(account),
        token_file=token_file,
        ca=ca,
        timeout_s=seconds(conf, "timeout", 10.0),
        poll_s=seconds(conf, "poll", 10.0),
        task=conf.get("task", ""),
        selector=conf.get("selector", "").replace(";", ","),
        indexed=_flag(conf, "indexed"),
        watch_nodes=_flag(conf, "watch_nodes"),
    )


def _of_the_cluster(variables: Mapping[str, str]) -> str:
    """URL of the API server of the pod's own cluster. Raises ``SettingError`` outside a pod."""
    host, port = variables.get("KUBERNETES_SERVICE_HOST", ""), variables.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        advice = f"Name it: {SETTING}=api=https://HOST:PORT,namespace=…,token_file=…,ca=…"
        raise SettingError("--scheduler", "kubernetes", "this launcher does not run in a Kubernetes pod", advice)
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _url(text: str) -> str:
    parts = urlsplit(text)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise SettingError(SETTING, f"api={text}", "must be a URL such as https://10.0.0.1:6443")
    return text.rstrip("/")


def _keep_secret(url: str, token_file: str) -> None:
    """Raise ``SettingError`` if a token would be sent without TLS, except to this host."""
    parts = urlsplit(url)
    if parts.scheme == "https" or not token_file or parts.hostname == "localhost":
        return
    try:
        inside = ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        inside = False
    if not inside:
        raise SettingError(SETTING, f"api={url}", "would send the token unencrypted over the network", "Use https")


def _existing(folder: Path | None, name: str) -> str:
    return str(folder / name) if folder is not None and (folder / name).is_file() else ""


def _namespace(account: Path) -> str:
    file = account / "namespace"
    return file.read_text().strip() if file.is_file() else "default"


def _flag(conf: Mapping[str, str], key: str) -> bool:
    text = conf.get(key, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise SettingError(SETTING, f"{key}={conf[key]}", "must be true or false")
    return text in ("true", "1")
