"""Parameter servers: processes that hold a job's parameters, kept running and known to the job.

A launcher with ``--role=pserver`` does nothing else; in a job with ``--run-mode=ps`` those that train have some as well
(``--servers-per-node``). The Master's placement machine says which of them holds what.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
from collections.abc import Mapping
from typing import Any

from edl.agent.workers.log_paths import server_log
from edl.checkpoint.memory.memory_files import available_bytes
from edl.config import JobSpec
from edl.errors import SettingError, UsageError
from edl.launch.helper_process import HelperProcess
from edl.launch.helpers import serve_helpers
from edl.launch.settings import PserverSettings, ServerSettings
from edl.types import JobId

NEEDED = ("numpy", "xxhash")
"""Packages without which no pserver runs. Without numba it does, slowly."""
DRAIN_SHARE = 0.5
"""Of ``--shutdown-timeout``: how long pservers that leave may take to hand over what they hold."""


def check_packages() -> None:
    """Raises ``SettingError`` when something is missing that every launcher of such a job needs."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingError("--run-mode", "ps", f"needs {' and '.join(missing)}", "Run: pip install 'edl[ps]'")


def secret_of(token: str) -> str:
    """By which pservers, trainers and the Master of a job know one another, out of the job's token."""
    return hmac.new(token.encode(), b"pservers", hashlib.sha256).hexdigest()


def environment_of(servers: ServerSettings) -> dict[str, str]:
    """What workers are told of pservers that were named one by one."""
    return {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(servers.listed)} if servers.listed else {}


class Pservers:
    """A ``helpers.Kind``."""

    what, service, folder = "pserver", "ps", "servers"
    grace_s = 0.0  # what one holds is of no use once its key is gone
    farewell_s = 0.0
    fenced = True

    def __init__(
        self, servers: ServerSettings, job: JobId, secret: str, *, checkpoint_dir: str, shutdown_s: float,
        lease_s: float,
    ) -> None:  # fmt: skip
        self.count = servers.count
        self._ports = servers.ports
        self._host = servers.host
        self._memory_bytes = servers.memory_bytes or available_bytes() // 2 // max(1, servers.count)
        self._job = job
        self._secret = secret
        self._log_folder = servers.log_folder
        self._checkpoint_dir = checkpoint_dir
        self.drain_s = shutdown_s * DRAIN_SHARE
        self._lease_s = lease_s

    async def start(self, index: int, name: str, host: str) -> HelperProcess:
        """See ``Kind``."""
        options = [
            f"--host={self._host or host}",
            f"--port={self._ports[index] if self._ports else 0}",
            f"--name={name}",
            f"--most-bytes={self._memory_bytes}",
            f"--job={self._job}",
            f"--grace={self.drain_s:g}",
            f"--lease={self._lease_s:g}",
        ]
        if self._checkpoint_dir:
            options.append(f"--checkpoint-dir={self._checkpoint_dir}")
        log_file = server_log(self._log_folder, index)
        return await HelperProcess.start(self.what, ("ps", "server", *options), {"secret": self._secret}, log_file)

    def told(self, process: HelperProcess, host: str) -> Mapping[str, Any]:
        """See ``Kind``."""
        return {
            "host": self._host or host,
            "port": process.ready["port"],
            "path": process.ready.get("path", ""),
            "machine": process.ready.get("machine", ""),
            "secret": self._secret,
            "most_bytes": self._memory_bytes,
        }


async def serve_parameters(settings: PserverSettings) -> int:
    """``--role=pserver``; returns the exit status."""
    check_packages()

    def make(spec: JobSpec, token: str) -> Pservers:
        if not spec.servers:
            raise UsageError(f"job {spec.job} has no parameter servers: start its launchers with --run-mode=ps")
        return Pservers(
            settings.servers,
            spec.job,
            secret_of(token),
            checkpoint_dir=settings.checkpoint_dir,
            shutdown_s=settings.helper.grace_s,
            lease_s=spec.timeouts.lease_ttl_s,
        )

    return await serve_helpers(settings.helper, make, "leaving: the other pservers take over what is held here")
