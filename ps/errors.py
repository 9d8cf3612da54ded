"""What can go wrong between a parameter server and those that talk to it. All are ``PsError``; what to do differs."""

from __future__ import annotations

from edl.errors import PsError
from edl.exit_codes import BEGIN_ANEW


class Unreachable(PsError):
    """Nobody answers there, or the connection broke: what was asked for may or may not have been done."""

    definite = False
    retry_helps = True


class TimedOut(Unreachable):
    """No answer within the deadline."""


class HungUp(Unreachable):
    """The other side has ended the connection."""


class DamagedFrame(Unreachable):
    """What came is not what was sent, or not this protocol at all. The connection is closed; a new one may do."""


class Denied(PsError):
    """The other side refuses this peer: a wrong secret, a Master that has been replaced, a trainer that is revoked.

    ``kind`` is the reason as a word: ``token`` for the secret, else what the other side says.
    """

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


class RolledBack(PsError):
    """The parameters are older than what this trainer has seen, or it has been replaced: its process has to begin
    anew, which the launcher sees to when it ends with this error."""

    worker_status = BEGIN_ANEW
