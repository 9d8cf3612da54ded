"""Parameter servers: processes that hold a job's parameters, kept running and registered in the store.

A launcher with ``--role=pserver`` runs nothing else; in a job with ``--run-mode=ps``, launchers with workers run some
as well (``--servers-per-node``). The Master's placement machine decides which of them holds what.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
from collections.abc import Mapping
from typing import Any

from edl.agent.workers.log_paths import server_log
from edl.config import JobSpec
from edl.errors import SettingError, UsageError
from edl.free_memory import available_bytes
from edl.launch.helper_process import HelperProcess
from edl.launch.helper_role import serve_helpers
from edl.launch.settings import PserverSettings, ServerSettings
from edl.types import JobId

NEEDED = ("numpy", "xxhash")
"""Packages that a pserver needs. It also works without numba, but slowly."""
FINISH_S = 8.0
"""Seconds that pservers may take at the end to write evicted rows; see ``ps.server.process``."""
DRAIN_SHARE = 0.5
"""Fraction of ``--shutdown-timeout`` that draining pservers may take to hand over their buckets."""


def check_packages() -> None:
    """Check that the packages which every launcher of a job with pservers needs are installed. Raises
    ``SettingError``."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingError("--run-mode", "ps", f"needs {' and '.join(missing)}", "Run: pip install 'edl[ps]'")


def secret_of(token: str) -> str:
    """The secret that pservers, trainers and the Master of a job share, derived from the job's token."""
    return hmac.new(token.encode(), b"pservers", hashlib.sha256).hexdigest()


def environment_of(servers: ServerSettings) -> dict[str, str]:
    """The variable that tells workers the addresses of all pservers; none unless ``--servers`` lists them."""
    return {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(servers.listed)} if servers.listed else {}


class Pservers:
    """Pservers as a kind of helper process (``helpers.HelperKind``)."""

    what, service, folder = "pserver", "ps", "servers"
    grace_s = FINISH_S
    farewell_s = 0.0
    fenced = True

    def __init__(
        self, servers: ServerSettings, job: JobId, secret: str, *, checkpoint_dir: str, shutdown_s: float,
        lease_s: float, log_folder: str = "",
    ) -> None:  # fmt: skip
        """``log_folder``: where each has a file for its output; empty: on the console."""
        self.count = servers.count
        self._ports = servers.ports
        self._host = servers.host
        self._memory_bytes = servers.memory_bytes or available_bytes() // 2 // max(1, servers.count)
        self._job = job
        self._secret = secret
        self._log_folder = log_folder
        self._checkpoint_dir = checkpoint_dir
        self.drain_s = shutdown_s * DRAIN_SHARE
        self._lease_s = lease_s

    async def start(self, index: int, name: str, host: str) -> HelperProcess:
        """Start pserver number ``index`` of this launcher. Raises ``WorkerStartError``."""
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

    def key_content(self, process: HelperProcess, host: str) -> Mapping[str, Any]:
        """A pserver's address, secret, memory limit in bytes, and whether it has a checkpoint directory."""
        return {
            "host": self._host or host,
            "port": process.ready["port"],
            "path": process.ready.get("path", ""),
            "machine": process.ready.get("machine", ""),
            "secret": self._secret,
            "most_bytes": self._memory_bytes,
            "saves": bool(self._checkpoint_dir),
        }


async def serve_parameters(settings: PserverSettings) -> int:
    """Run a launcher with ``--role=pserver`` until it leaves or the job ends; returns the exit status."""
    check_packages()

    def make(spec: JobSpec, token: str) -> Pservers:
        if not spec.servers:
            raise UsageError(f"job {spec.job} has no parameter servers: start its launchers with --run-mode=ps")
        return Pservers(
            settings.servers,
            spec.job,
            secret_of(token),
            checkpoint_dir=settings.checkpoint_dir,
            log_folder=settings.log_folder,
            shutdown_s=settings.helper.grace_s,
            lease_s=spec.timeouts.lease_ttl_s,
        )

    return await serve_helpers(settings.helper, make, "leaving: the other pservers are taking over from those here")
