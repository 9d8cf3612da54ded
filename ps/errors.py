"""Errors between a parameter server and its peers. All are ``PsError``; they differ in what the caller should do."""

from __future__ import annotations

from edl.errors import PsError
from edl.exit_codes import START_OVER


class Unreachable(PsError):
    """The peer does not answer, or the connection broke. The request may or may not have been carried out."""

    definite = False


class TimedOut(Unreachable):
    """There was no answer within the deadline."""


class HungUp(Unreachable):
    """The peer has closed the connection."""


class DamagedFrame(Unreachable):
    """The received data is damaged or not of this protocol. The connection is closed; a new one may work."""


class Denied(PsError):
    """The peer refuses this process: wrong secret, a Master that has been replaced, or a trainer that is revoked.

    ``kind``: ``token`` for a wrong secret, otherwise the reason given by the peer.
    """

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


class RolledBack(PsError):
    """The parameters are older than what this trainer has seen, or it has been replaced: its process must restart. The
    launcher restarts it when it exits with this error."""

    worker_status = START_OVER
