"""Webhooks: the notification's JSON document, posted with a signature."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass, field

from edl import __version__
from edl.errors import NotificationError
from edl.notify.notification import Notification

TRANSIENT = (408, 425, 429)
"""Statuses below 500 after which another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """One webhook. ``key``: signs the documents; empty: they are not signed."""

    url: str = field(repr=False)
    label: str
    key: str = field(default="", repr=False)

    def send(self, notification: Notification, now_s: float, limit_s: float) -> None:
        """Post the notification; any status from 200 to 299 is success. Raises ``NotificationError``."""
        body, timestamp = notification.document(), f"{now_s:.0f}"
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"edl/{__version__}",
            "EDL-Notification-Id": notification.id,
            "EDL-Timestamp": timestamp,
        }
        if self.key:
            headers["EDL-Signature"] = signature(self.key, timestamp, body)
        request = urllib.request.Request(self.url, body, headers, method="POST")  # noqa: S310 - http and https only
        _call(request, limit_s)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A URL that is called from time to time, and raises an alarm elsewhere when it is not."""

    url: str = field(repr=False)
    label: str

    def send(self, notification: Notification, now_s: float, limit_s: float) -> None:
        """Call it, without the notification. Raises ``NotificationError``."""
        headers = {"User-Agent": f"edl/{__version__}"}
        _call(urllib.request.Request(self.url, headers=headers), limit_s)  # noqa: S310 - http and https only


def _call(request: urllib.request.Request, limit_s: float) -> None:
    """Any status from 200 to 299 is success. Raises ``NotificationError``."""
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=limit_s):
            pass
    except urllib.error.HTTPError as error:
        with error:
            retry = error.code >= 500 or error.code in TRANSIENT
            raise NotificationError(f"it answered with status {error.code}", retry=retry) from None
    except urllib.error.URLError as error:
        why = getattr(error.reason, "strerror", "") or str(error.reason)
        raise NotificationError(f"it cannot be reached: {why}", retry=True) from None
    except TimeoutError:
        raise NotificationError(f"it did not answer within {limit_s:g} s", retry=True) from None
    except (OSError, http.client.HTTPException) as error:
        raise NotificationError(f"the connection failed: {type(error).__name__}", retry=True) from None


def signature(key: str, timestamp: str, body: bytes) -> str:
    """The value of the header ``EDL-Signature``: HMAC-SHA256 over the timestamp, a dot and the body."""
    signed = timestamp.encode() + b"." + body
    return "sha256=" + hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirection an error: a POST would be repeated as a GET, or its content sent to another host."""

    def redirect_request(self, *arguments: object) -> None:
        """Follow none."""
