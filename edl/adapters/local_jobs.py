"""Small files by which ``edl status`` finds the jobs on this host without an endpoint."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from edl.adapters.leftovers import here, is_gone, is_near, this_process
from edl.adapters.runtime_folder import runtime_folder
from edl.types import JobId, NodeId


@dataclass(frozen=True, slots=True)
class LocalJob:
    """One launcher's job, with the endpoints of its store."""

    job: JobId
    node: NodeId
    endpoints: tuple[str, ...]
    pid: int = 0
    """The launcher's pid, in those returned by ``local_jobs``."""
    secret_file: str = ""
    """Path of the file with the job's secret, if there is one."""

    @property
    def path(self) -> Path:
        """The file of this launcher."""
        return runtime_folder() / f"{self.job}@{os.getpid()}-{here()}.json"

    def write(self) -> None:
        """Write the file. Without space on the disk there is none, and ``edl status`` needs an endpoint."""
        local_jobs()  # removes those of launchers that were killed
        with contextlib.suppress(OSError):
            fields = {"job": self.job, "node": self.node, "endpoints": self.endpoints, "secret_file": self.secret_file}
            self.path.write_text(json.dumps({**fields, **this_process()}))

    def keep(self) -> None:
        """Write the file again if somebody has removed it."""
        if not self.path.exists():
            self.write()

    def remove(self) -> None:
        """Delete the file, if it exists and can be deleted."""
        with contextlib.suppress(OSError):
            self.path.unlink()


def local_jobs() -> list[LocalJob]:
    """The jobs of this user's running launchers on this host; files of dead ones are deleted. A temporary directory
    that several hosts or containers share has files of processes that cannot be seen from here."""
    found = []
    for path in sorted(runtime_folder().glob("*@*.json")):
        try:
            plain = json.loads(path.read_text())
            known = "where" in plain  # an older edl does not write that
            there = Path(f"/proc/{plain['pid']}").exists()
            if is_gone(plain) if known else not there:
                path.unlink()
                continue
            if not there or (known and not is_near(plain)):
                continue
            who = JobId(plain["job"]), NodeId(plain["node"]), tuple(plain["endpoints"]), plain["pid"]
            found.append(LocalJob(*who, plain.get("secret_file", "")))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half written or just removed: its launcher is starting or ending
    return found
