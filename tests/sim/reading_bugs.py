"""Bugs planted in the shells around data leases: in the loader's client, and in the service at the Master."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from data_service.loader.lease_client import LeaseClient
from data_service.protocol.messages import DataRefused

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]


def asks_a_new_master_nothing(patch: Patch) -> None:
    """A request that was under way when the Master changed is not sent again."""
    patch.setattr(LeaseClient, "_say_again", lambda self: None)


def takes_late_answers(patch: Patch) -> None:
    """An answer counts for the request that waits now, whichever it is for: those of repeated requests count twice."""
    answered = LeaseClient._answered

    def takes(self: LeaseClient, message: Any) -> None:
        asked = self._sent
        if asked is not None:
            object.__setattr__(message, "id", asked.message.id)
        answered(self, message)

    patch.setattr(LeaseClient, "_answered", takes)


def gives_up_what_is_asked(patch: Patch) -> None:
    """A stale answer, of a round that is over, ends the client for good, also one that outlives rounds."""
    answered = LeaseClient._answered

    def ends(self: LeaseClient, message: Any) -> None:
        if isinstance(message, DataRefused) and message.kind == "stale":
            self._closed = True
        answered(self, message)

    patch.setattr(LeaseClient, "_answered", ends)


def loses_what_is_queued(patch: Patch) -> None:
    """With a new Master, requests that have not been sent yet go away."""
    again = LeaseClient._say_again

    def loses(self: LeaseClient) -> None:
        self._queue.clear()
        again(self)

    patch.setattr(LeaseClient, "_say_again", loses)
