"""The launcher's options about the job's store: kind, addresses, credentials and timeouts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.adapters.etcd_plan import parse_endpoints, tls_files
from edl.adapters.secret_file import secret_from
from edl.config import NodeRange, environment
from edl.errors import SettingError, UsageError
from edl.launch.naming import private_name
from edl.launch.settings import CONF_KEYS, CONNECT_TIMEOUT_S, Backend, StoreSettings
from edl.types import JobId

BACKENDS = {
    "etcd": Backend.ETCD,
    "etcd-v2": Backend.ETCD,
    "etcd-embedded": Backend.EMBEDDED,
    # torchrun's names for a store that needs no separate server.
    "c10d": Backend.EMBEDDED,
    "static": Backend.EMBEDDED,
}

REQUEST_TIMEOUT_S = {Backend.ETCD: 2.0, Backend.EMBEDDED: 0.5}
"""Default timeouts of a call. A write in progress when etcd's leader dies is never answered and is sent again after a
part of the timeout, which so adds to the recovery from the loss of a host with an embedded member. Embedded members
answer in milliseconds."""


def job_and_store(options: Mapping[str, Any], nodes: NodeRange, checkpoint_dir: str) -> tuple[JobId, StoreSettings]:
    """The name of the job, and the settings of its store. Raises ``UsageError`` if the job's nodes could not find each
    other."""
    endpoints, standalone = endpoints_from(options), options["standalone"]
    if standalone and endpoints:
        raise UsageError("--standalone and --rdzv-endpoint exclude each other: a standalone job has a private store")
    backend, private = _backend(options, endpoints), standalone or not endpoints
    if backend is Backend.EMBEDDED and private and nodes.minimum > 1:
        raise SettingError(
            "--rdzv-endpoint",
            None,
            f"--nnodes={nodes} needs a store that every node can reach",
            "Give the same --rdzv-endpoint=HOST:PORT on all nodes",
        )
    job = JobId(options["rdzv_id"] or (private_name(checkpoint_dir) if private else "default"))
    return job, _store(options, backend, endpoints, job)


def store_from(options: Mapping[str, Any], job: JobId) -> StoreSettings:
    """The settings of this job's store, and the job's secret. Raises ``SettingError``."""
    endpoints = endpoints_from(options)
    return _store(options, _backend(options, endpoints), endpoints, job)


def _backend(options: Mapping[str, Any], endpoints: tuple[str, ...]) -> Backend:
    """The kind of store: ``--rdzv-backend``, or else inferred from the endpoint. Raises ``SettingError``."""
    external = _endpoint(options).startswith(("etcd://", "etcds://"))
    name = options["rdzv_backend"] or ("etcd" if external else "etcd-embedded")
    if name not in BACKENDS:
        why = f"not one of {', '.join(BACKENDS)}; torchrun's rendezvous plug-ins are not supported"
        raise SettingError("--rdzv-backend", name, why)
    if BACKENDS[name] is Backend.ETCD and not endpoints:
        raise SettingError(
            "--rdzv-endpoint", None, "--rdzv-backend=etcd needs an address", "Use HOST:PORT[,HOST:PORT…]"
        )
    return BACKENDS[name]


def _store(options: Mapping[str, Any], backend: Backend, endpoints: tuple[str, ...], job: JobId) -> StoreSettings:
    conf = _conf(options["rdzv_conf"])
    files = tls_files(_endpoint(options), conf)
    for key, path in files.items():
        if path and not Path(path).is_file():
            raise SettingError(f"--rdzv-conf {key}", path, "no such file")
    secret, secret_file = secret_from(options["secret_file"].strip(), environment().get("EDL_SECRET", ""), job)
    return StoreSettings(
        backend=backend,
        endpoints=endpoints,
        data_dir=conf.get("data_dir", ""),
        request_timeout_s=conf.get("request_timeout", REQUEST_TIMEOUT_S[backend]),
        connect_timeout_s=conf.get("connect_timeout", CONNECT_TIMEOUT_S),
        user=conf.get("user", ""),
        password=conf.get("password", ""),
        secret=secret,
        secret_file=secret_file,
        **files,
    )


def _endpoint(options: Mapping[str, Any]) -> str:
    """``--rdzv-endpoint``, which may come from a file with a newline at its end."""
    return str(options["rdzv_endpoint"]).strip()


def endpoints_from(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The addresses of the store's members; empty: a private store. Raises ``SettingError``."""
    text = _endpoint(options)
    if re.fullmatch(r"(localhost|127\.0\.0\.1|\[?::1\]?):0", text):
        return ()  # torchrun's way to ask for a private store on a free port
    return parse_endpoints(text)


def _conf(text: str) -> dict[str, Any]:
    """Parse ``--rdzv-conf``, which has only keys in ``CONF_KEYS`` by now. Raises ``SettingError``."""
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = item.partition("=")
        if not separator:
            raise SettingError("--rdzv-conf", item, "needs a value", f"Write {key}=VALUE")
        try:
            values[key] = CONF_KEYS[key](value)
        except ValueError:
            raise SettingError(
                "--rdzv-conf", item, f"{value!r} is not a number", "Write seconds, such as 2.5"
            ) from None
        if CONF_KEYS[key] is float and not 0 < values[key] < math.inf:
            raise SettingError(
                "--rdzv-conf", item, "must be more than 0 seconds, and finite", "Write seconds, such as 2.5"
            )
    return values
