"""Remote readers: processes that read and decode data for a job's trainers, kept running and registered in the store.

A launcher with ``--role=reader`` runs nothing else; a launcher with workers may run some as well (``--readers=N``). The
Master passes their addresses to the trainers. The job runs without readers as well, so nothing waits for them.
"""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Mapping
from typing import Any

from edl.errors import SettingError
from edl.launch.helper_process import HelperProcess
from edl.launch.helper_role import serve_helpers
from edl.launch.settings import ReaderPool, ReaderSettings
from edl.types import JobId
from edl.wire.secret import Secret

FAREWELL_S = 0.5
"""Seconds between deleting a reader's key and ending it."""


def check_packages(count: int) -> None:
    """Check that the packages which readers need are installed, unless ``count`` is 0. Raises ``SettingError``."""
    if count and importlib.util.find_spec("pyarrow") is None:
        raise SettingError("--readers", count, "readers need pyarrow", "Run: pip install 'edl[data]'")


def authority_of(secret: Secret | None, job: JobId) -> str:
    """The key from which readers and workers of this job derive their certificates; empty: the job has no secret."""
    return "" if secret is None else secret.of_readers(job)


class ReaderHelpers:
    """Remote readers as a kind of helper process (``helpers.HelperKind``)."""

    what, service, folder = "reader", "data", "readers"
    drain_s = 0.0
    fenced = False

    def __init__(self, wanted: ReaderPool, grace_s: float, authority: str) -> None:
        """``grace_s``: seconds to finish open streams. ``authority``: see ``authority_of``."""
        self.count = wanted.count
        self._authority = authority
        self._capacity = wanted.capacity
        self._functions = wanted.functions
        self.grace_s = grace_s
        self.farewell_s = min(FAREWELL_S, grace_s)
        self._secrets: dict[int, str] = {}
        """By process id. A reader serves only clients that know its secret."""

    async def start(self, index: int, name: str, host: str) -> HelperProcess:
        """Start a reader with a new secret. Raises ``WorkerStartError``."""
        secret = secrets.token_hex(16)
        functions = [f"--function={name}" for name in self._functions]
        options = (f"--host={host}", f"--capacity={self._capacity}", f"--grace={self.grace_s:g}", *functions)
        order = {"secret": secret, "authority": self._authority}
        process = await HelperProcess.start(self.what, ("data_service", "reader", *options), order)
        self._secrets[process.pid] = secret
        return process

    def key_content(self, process: HelperProcess, host: str) -> Mapping[str, Any]:
        """A reader's address, capacity in streams, and secret."""
        secret = self._secrets[process.pid]
        return {"host": host, "port": process.ready["port"], "capacity": self._capacity, "secret": secret}


async def serve_readers(settings: ReaderSettings) -> int:
    """Run a launcher with ``--role=reader`` until it leaves or the job ends; returns the exit status."""
    check_packages(settings.readers.count)
    helper = settings.helper
    kind = ReaderHelpers(settings.readers, helper.grace_s, authority_of(helper.store.secret, helper.job))
    return await serve_helpers(helper, lambda spec, token: kind, "leaving: waiting for open streams to finish")
