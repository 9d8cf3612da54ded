"""Alarms of watchdogs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alarm:
    """A problem that a watchdog has found and that persists."""

    name: str
    """Name of the watchdog, such as ``disk-space``."""
    about: str = ""
    """What it watches, such as a directory; tells alarms of one watchdog apart. Empty: there is only one."""
    severity: str = "warning"
    """``info``, ``warning`` or ``critical``."""
    text: str = ""
    """The values that raised it, and the next action."""
    node: str = ""
    """The node that it is about, set by the Master; empty: the whole job."""
    shared: bool = False
    """Other nodes find the same problem, such as a full file system that all of them use: it is reported once."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies the alarm while it persists, whatever its text."""
        return (self.node, self.name, self.about)
