"""Entries of the denylist: hosts and devices that jobs do not use."""

from __future__ import annotations

from dataclasses import dataclass

from edl.wire.records import NodeInfo


@dataclass(frozen=True, slots=True)
class DenylistEntry:
    """One host or one device, and why it is not used."""

    host: str
    """Name of the host (``NodeInfo.host_id``); for a device, the one in which it was last seen."""
    device: str = ""
    """UUID of the device; empty: the whole host."""
    reason: str = ""
    by: str = ""
    """Who added it: ``job NAME``, or a person."""
    run: str = ""
    """Identifies the run of the job that added it; empty: a person did."""
    since_s: float = 0.0
    """Time at which it was added, in seconds since 1970 by the clock of who added it."""
    until_s: float = 0.0
    """Time at which it expires, by the clock of who looks; 0: never."""
    checked: bool = False
    """A health check has found the host faulty: the job uses it again only when another one has found it good."""

    @property
    def name(self) -> str:
        """Identifies it in its place. A device has one entry, wherever it is."""
        return f"device/{self.device}" if self.device else f"host/{self.host}"

    def expired(self, wall_s: float) -> bool:
        """Whether it no longer counts at this time, in seconds since 1970."""
        return 0 < self.until_s <= wall_s

    def applies(self, info: NodeInfo, slot: int) -> bool:
        """Whether that slot of that node must not be used."""
        if not self.device:
            return bool(self.host) and self.host == info.host_id
        return slot < len(info.devices) and self.device in info.devices[slot].split(",")

    def covers(self, host: str, devices: str) -> bool:
        """Whether it is about one of these devices, separated by commas, or about the host."""
        return self.device in devices.split(",") if self.device else self.host == host
