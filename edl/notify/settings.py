"""The settings of a launcher's notifications."""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.wire.severity import Severity


@dataclass(frozen=True, slots=True)
class NotifySettings:
    """The channels of a launcher, and from which severity on they are used."""

    urls: tuple[str, ...] = field(default=(), repr=False)
    """Addresses of the channels, which may contain secrets."""
    least: Severity = Severity.WARNING


NO_NOTIFICATIONS = NotifySettings()
MOST_BYTES = 65536
"""Limit on the size of a file with addresses."""
FILE_ADVICE = "Write one URL a line into a file of your own with mode 600"
