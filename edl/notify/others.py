"""Channels of the library apprise: chats and paging services."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from edl.errors import NotificationError
from edl.notify.notification import Notification
from edl.wire.severity import Severity

_TYPES = {Severity.INFO: "info", Severity.WARNING: "warning", Severity.CRITICAL: "failure"}
"""apprise's kinds of messages."""


@dataclass(frozen=True, slots=True)
class AppriseChannel:
    """One address of apprise."""

    url: str = field(repr=False)
    label: str

    def send(self, notification: Notification, now_s: float, limit_s: float) -> None:
        """Send through apprise, which has its own timeouts. Raises ``NotificationError``; apprise gives no reasons."""
        sender = opened(self.url)
        if sender is None:
            raise NotificationError("apprise does not understand the address", retry=False)
        kind = _TYPES[notification.severity]
        if not sender.notify(title=notification.subject, body=notification.body, notify_type=kind):
            raise NotificationError("apprise could not deliver it, and gives no reason", retry=True)


def opened(url: str) -> Any:
    """The object of apprise for an address; None if it does not understand it. Raises ``ImportError`` without
    apprise."""
    import apprise  # an extra, and slow to import

    # What it logs may contain the address.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    sender = apprise.Apprise()
    return sender if sender.add(url) else None
