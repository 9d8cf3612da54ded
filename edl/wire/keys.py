"""Names of a job's keys in the store."""

from __future__ import annotations

from dataclasses import dataclass

from edl.types import JobId, NodeId


@dataclass(frozen=True, slots=True)
class JobKeys:
    """All keys of one job lie under ``prefix``; only ``farewell`` and ``launchers`` outlive it for a moment."""

    job: JobId

    @property
    def prefix(self) -> str:
        """Everything a running job owns."""
        return f"/edl/{self.job}/"

    @property
    def spec(self) -> str:
        """The ``JobSpec`` all launchers must agree on."""
        return f"{self.prefix}spec"

    @property
    def origin(self) -> str:
        """The ``Origin`` of the launcher that has founded the job."""
        return f"{self.prefix}origin"

    @property
    def token(self) -> str:
        """The secret that every call carries."""
        return f"{self.prefix}token"

    @property
    def master(self) -> str:
        """The election key, on the Master's lease."""
        return f"{self.prefix}master"

    @property
    def record(self) -> str:
        """The ``Record`` the next Master continues from, without its world."""
        return f"{self.prefix}record"

    @property
    def world(self) -> str:
        """The world of the record: it names every node, so it is written only when it is another one."""
        return f"{self.prefix}world"

    @property
    def over(self) -> str:
        """There once the job has ended, until the last of its launchers has heard."""
        return f"{self.prefix}over"

    @property
    def scale(self) -> str:
        """The size that is wanted (``Sizing``), also part of the record; its revision tells stale wishes."""
        return f"{self.prefix}scale"

    @property
    def nodes(self) -> str:
        """Prefix of the nodes' leased keys."""
        return f"{self.prefix}nodes/"

    def node(self, node: NodeId) -> str:
        """One node's leased key."""
        return f"{self.nodes}{node}"

    @property
    def journal(self) -> str:
        """Prefix of the job's history."""
        return f"{self.prefix}journal/"

    def journal_entry(self, number: int) -> str:
        """One line of history; sorted by name means sorted by number."""
        return f"{self.journal}{number:012d}"

    @property
    def services(self) -> str:
        """Prefix of what the Master's services keep."""
        return f"{self.prefix}services/"

    def service(self, service: str, name: str) -> str:
        """One thing that a service keeps."""
        return f"{self.services}{service}/{name}"

    @property
    def helpers(self) -> str:
        """Prefix of the leased keys of processes that help a service, such as remote readers of data."""
        return f"{self.prefix}helpers/"

    def helper(self, service: str, name: str) -> str:
        """One helper's leased key."""
        return f"{self.helpers}{service}/{name}"

    @property
    def farewell(self) -> str:
        """The outcome of a job that has just ended, on a short lease, for its launchers that come too late."""
        return f"/edl-ended/{self.job}"

    @property
    def launchers(self) -> str:
        """Prefix of the names of nodes whose launchers have joined this job and have not left it in good order."""
        return f"/edl-launchers/{self.job}/"

    def launcher(self, node: NodeId) -> str:
        """One node's."""
        return f"{self.launchers}{node}"
