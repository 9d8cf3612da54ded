"""Writing down a trainer's push intents on the pservers, and reading those of lost trainers. See ``ps.intents``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps import intents
from ps.client import routing
from ps.client.core import INTENT, Core
from ps.client.pool import PserverCall
from ps.client.routing import RoutingTable, SubRequest
from ps.protocol.frames import FrameOp


@dataclass(frozen=True, slots=True)
class Records:
    """The data records behind a push."""

    text: str = ""
    """Description for the trainer that may have to train on them again; empty if not needed."""
    redo: tuple[int, int] | None = None
    """Trainer and sequence number of an earlier push of the same records, which may have been applied in part."""


@dataclass
class _IntentRequest:
    """A request to the home bucket of a trainer's intents."""

    trainer: int
    seq: int = -1
    text: str = ""
    fence: bool = False
    clocked: bool = False
    keys: Sequence[NDArray[np.int64]] = ()
    head: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = [intents.home_key(self.trainer)]

    def call(self, sub_request: SubRequest, route: RoutingTable) -> PserverCall:
        """Build the call for a sub-request."""
        head = {"of": self.trainer, "seq": self.seq, "fence": self.fence}
        body = [self.text.encode()] if self.text else []
        return PserverCall(FrameOp.INTENT, {**head, "version": route.version, "history": route.history}, body)

    def landed(self, sub_request: SubRequest, head: Mapping[str, Any], body: memoryview) -> None:
        """Handle the answer to a sub-request."""
        self.head, self.text = head, bytes(body).decode()


def declare(core: Core, seq: int, text: str) -> None:
    """Record push ``seq`` as intended; returns once that would survive the loss of a pserver. Raises ``RolledBack`` if
    other trainers have taken over this trainer's records."""
    _fan_out(core, _IntentRequest(core.session.number, seq, text), "the intent of a push")


def fence(core: Core, trainer: int) -> tuple[int, str]:
    """Stop a lost trainer from pushing anything new; return the number and the text of its last intent."""
    request = _IntentRequest(trainer, fence=True)
    _fan_out(core, request, f"the last intent of trainer {trainer}")
    return int(request.head.get("seq", -1)), request.text


def _fan_out(core: Core, request: _IntentRequest, what: str) -> None:
    route = core.session.route
    sub_requests = routing.first_split(route, [route.unite(request.keys[0])])
    core.fan_out(request, sub_requests, route, INTENT, what, stands=False)
