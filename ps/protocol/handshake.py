"""The handshake of a connection to a parameter server: both sides prove that they know its secret, then the caller
identifies itself.

Pure: computes the bytes to send and validates those received. The caller sends ``Calling.opening``, reads
``ANSWER_BYTES``, sends ``Calling.answer(...)`` and a HELLO frame. The server reads ``OPENING_BYTES``, sends
``Called.answer``, reads ``PROOF_BYTES`` and, if ``Called.accepts``, the HELLO. It answers OK, or REFUSED with a reason,
and closes.
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
"""Request number of the HELLO frame."""

TRAINER = "trainer"
SERVER = "server"
MASTER = "master"
TOOL = "tool"
ROLES = (TRAINER, SERVER, MASTER, TOOL)


@dataclass(frozen=True, slots=True)
class CallerHello:
    """Identification of a caller."""

    role: str
    number: int = 0
    """Number of a trainer or pserver."""
    name: str = ""
    token: int = 0
    """A Master's fencing token."""
    check: bool = True
    """Bodies have checksums in both directions if the connection could damage them (TCP without TLS)."""

    def pack(self) -> bytes:
        """Encode as the head of the HELLO frame."""
        return pack_head(asdict(self))

    @staticmethod
    def unpack(head: bytes) -> CallerHello:
        """The inverse of ``pack``. Raises ``ProtocolError``."""
        plain = unpack_head(head)
        role, number, name = plain.get("role"), plain.get("number"), plain.get("name")
        token, check = plain.get("token"), plain.get("check")
        good = role in ROLES and isinstance(name, str) and len(name) <= 200 and type(check) is bool
        if not good or not _is_count(number) or not _is_count(token):
            raise ProtocolError(f"not a HELLO: {str(plain)[:200]}")
        return CallerHello(str(role), int(number or 0), str(name), int(token or 0), bool(check))

    def __str__(self) -> str:
        number = f" {self.number}" if self.number else ""
        return f"{self.role}{number}" + (f" ({self.name})" if self.name else "")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


class Calling:
    """The caller's side of the handshake."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._mine = draw()
        self.opening = MAGIC + self._mine

    def answer(self, said: bytes) -> bytes:
        """Our proof, after verifying the server's nonce and proof. Raises ``ProtocolError`` if they are not valid."""
        theirs, proof = said[:NONCE_BYTES], said[NONCE_BYTES:]
        if not holds(proof, self._secret, CALLED, self._mine, theirs):
            raise ProtocolError("the server does not know the secret")
        return prove(self._secret, CALLER, self._mine, theirs)


class Called:
    """The server's side of the handshake."""

    def __init__(self, secret: str, opening: bytes) -> None:
        """Raises ``ProtocolError`` if the caller uses another protocol."""
        if opening[: len(MAGIC)] != MAGIC:
            raise ProtocolError(f"the caller uses another protocol (its data begins with {opening[:8]!r})")
        self._secret = secret
        self._theirs = opening[len(MAGIC) :]
        self._mine = draw()
        self.answer = self._mine + prove(secret, CALLED, self._theirs, self._mine)

    def accepts(self, proof: bytes) -> bool:
        """True if the caller knows the secret."""
        return holds(proof, self._secret, CALLER, self._theirs, self._mine)
