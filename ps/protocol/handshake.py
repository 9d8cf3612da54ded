"""How a connection to a parameter server begins: both sides prove that they know its secret, then say who they are.

Pure: which bytes to send, and whether those that came will do. The caller sends ``Calling.opening``, reads
``ANSWER_BYTES``, sends ``Calling.answer(...)`` and a HELLO frame; the called side reads ``OPENING_BYTES``, sends
``Called.answer``, reads ``PROOF_BYTES`` and, when ``Called.accepts``, the HELLO. It answers OK, or REFUSED with a
reason, and closes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from edl.errors import ProtocolError
from edl.wire.proof import CALLED, CALLER, NONCE_BYTES, PROOF_BYTES, draw, holds, prove
from ps.protocol.frames import pack_head, unpack_head

MAGIC = b"edl-ps-1"
OPENING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
MOST_HELLO = 4096
HELLO_NUMBER = 1
"""Number of the request that the HELLO frame is."""

TRAINER = "trainer"
SERVER = "server"
MASTER = "master"
TOOL = "tool"
ROLES = (TRAINER, SERVER, MASTER, TOOL)


@dataclass(frozen=True, slots=True)
class Hello:
    """Who calls."""

    role: str
    number: int = 0
    """Of a trainer or a pserver."""
    name: str = ""
    token: int = 0
    """A Master's fencing token."""
    check: bool = True
    """Bodies have checksums in both directions where the line could damage them (over TCP without TLS)."""

    def pack(self) -> bytes:
        """The head of the HELLO frame."""
        return pack_head(asdict(self))

    @staticmethod
    def unpack(head: bytes) -> Hello:
        """The inverse. Raises ``ProtocolError``."""
        plain = unpack_head(head)
        role, number, name = plain.get("role"), plain.get("number"), plain.get("name")
        token, check = plain.get("token"), plain.get("check")
        good = role in ROLES and isinstance(name, str) and len(name) <= 200 and type(check) is bool
        if not good or not _is_count(number) or not _is_count(token):
            raise ProtocolError(f"not a HELLO: {str(plain)[:200]}")
        return Hello(str(role), int(number or 0), str(name), int(token or 0), bool(check))

    def __str__(self) -> str:
        number = f" {self.number}" if self.number else ""
        return f"{self.role}{number}" + (f" ({self.name})" if self.name else "")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


class Calling:
    """The side that calls."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._mine = draw()
        self.opening = MAGIC + self._mine

    def answer(self, said: bytes) -> bytes:
        """Our proof, for the other side's nonce and proof. Raises ``ProtocolError`` when that does not hold."""
        theirs, proof = said[:NONCE_BYTES], said[NONCE_BYTES:]
        if not holds(proof, self._secret, CALLED, self._mine, theirs):
            raise ProtocolError("the other side does not know the secret")
        return prove(self._secret, CALLER, self._mine, theirs)


class Called:
    """The side that is called."""

    def __init__(self, secret: str, opening: bytes) -> None:
        """Raises ``ProtocolError`` when the caller speaks something else."""
        if opening[: len(MAGIC)] != MAGIC:
            raise ProtocolError(f"somebody who speaks another protocol (begins with {opening[:8]!r})")
        self._secret = secret
        self._theirs = opening[len(MAGIC) :]
        self._mine = draw()
        self.answer = self._mine + prove(secret, CALLED, self._theirs, self._mine)

    def accepts(self, proof: bytes) -> bool:
        """Whether the caller knows the secret."""
        return holds(proof, self._secret, CALLER, self._theirs, self._mine)
