"""The interface of a channel."""

from __future__ import annotations

from typing import Protocol

from edl.notify.notification import Notification


class NotifyChannel(Protocol):
    """Where notifications are sent."""

    @property
    def label(self) -> str:
        """Kind and place for logs, without anything that may be secret: ``webhook hooks.example.com``."""
        ...

    def send(self, notification: Notification, now_s: float, limit_s: float) -> None:
        """Send one notification; blocks. ``now_s``: wall clock. ``limit_s``: timeout of each wait. Raises
        ``NotificationError``."""
        ...
