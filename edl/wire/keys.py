"""Names of a job's keys in the store."""

from __future__ import annotations

from dataclasses import dataclass

from edl.types import JobId, NodeId


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Keys of one job, all under ``prefix``; only ``farewell`` and ``launchers`` outlive it briefly."""

    job: JobId

    @property
    def prefix(self) -> str:
        """Prefix of all keys of a running job."""
        return f"/edl/{self.job}/"

    @property
    def spec(self) -> str:
        """The ``JobSpec`` that all launchers must agree on."""
        return f"{self.prefix}spec"

    @property
    def origin(self) -> str:
        """The ``Origin`` of the launcher that founded the job."""
        return f"{self.prefix}origin"

    @property
    def token(self) -> str:
        """The job token that every call carries."""
        return f"{self.prefix}token"

    @property
    def run(self) -> str:
        """Random text that tells this run of a job with a secret from its other runs, which have the same token."""
        return f"{self.prefix}run"

    @property
    def master(self) -> str:
        """The election key, attached to the Master's lease."""
        return f"{self.prefix}master"

    @property
    def last_write(self) -> str:
        """Which write of which Master was the last; every write of a Master changes it."""
        return f"{self.prefix}last-write"

    @property
    def record(self) -> str:
        """The ``Record`` from which the next Master continues, without its world."""
        return f"{self.prefix}record"

    @property
    def world(self) -> str:
        """The record's world. It names every node, so it is written only when it changes."""
        return f"{self.prefix}world"

    @property
    def goodput(self) -> str:
        """What the job's slots have spent their time on."""
        return f"{self.prefix}goodput"

    @property
    def over(self) -> str:
        """Exists once the job has ended, until the last launcher knows."""
        return f"{self.prefix}over"

    @property
    def scale(self) -> str:
        """The desired size (``Sizing``), also part of the record; its revision detects stale requests."""
        return f"{self.prefix}scale"

    @property
    def nodes(self) -> str:
        """Prefix of the nodes' leased keys."""
        return f"{self.prefix}nodes/"

    def node(self, node: NodeId) -> str:
        """Leased key of one node."""
        return f"{self.nodes}{node}"

    @property
    def history(self) -> str:
        """Prefix of the job's history."""
        return f"{self.prefix}history/"

    def history_entry(self, number: int) -> str:
        """One line of history; sorted by name means sorted by number."""
        return f"{self.history}{number:012d}"

    @property
    def services(self) -> str:
        """Prefix of the stored values of the Master's services."""
        return f"{self.prefix}services/"

    def service(self, service: str, name: str) -> str:
        """Key of one stored value of a service."""
        return f"{self.services}{service}/{name}"

    @property
    def companions(self) -> str:
        """Prefix of the values that the Master's companions leave for those of the next Master."""
        return f"{self.prefix}companions/"

    def companion(self, name: str) -> str:
        """Key of one such value."""
        return f"{self.companions}{name}"

    @property
    def helpers(self) -> str:
        """Prefix of the leased keys of a service's helpers, such as remote readers."""
        return f"{self.prefix}helpers/"

    def helper(self, service: str, name: str) -> str:
        """Leased key of one helper."""
        return f"{self.helpers}{service}/{name}"

    @property
    def farewell(self) -> str:
        """Outcome of a job that has just ended, on a short lease, for launchers that arrive late."""
        return f"/edl-ended/{self.job}"

    @property
    def launchers(self) -> str:
        """Prefix of the names of nodes whose launchers joined this job and did not leave gracefully."""
        return f"/edl-launchers/{self.job}/"

    def launcher(self, node: NodeId) -> str:
        """Launcher key of one node."""
        return f"{self.launchers}{node}"
