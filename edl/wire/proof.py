"""Two sides prove to one another that they know the same secret, without ever sending it.

Each draws a nonce; a proof is the HMAC over both, and over which side gives it, so that none can be used again or
turned round.
"""

from __future__ import annotations

import hmac
import secrets

NONCE_BYTES = 32
PROOF_BYTES = 32
CALLER = b"client"
CALLED = b"server"


def draw() -> bytes:
    """A nonce."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(secret: str, side: bytes, caller: bytes, called: bytes) -> bytes:
    """The proof of one side (``CALLER`` or ``CALLED``), from both sides' nonces."""
    return hmac.digest(secret.encode(), side + caller + called, "sha256")


def holds(proof: bytes, secret: str, side: bytes, caller: bytes, called: bytes) -> bool:
    """Whether it is what only somebody with the secret could give."""
    return hmac.compare_digest(proof, prove(secret, side, caller, called))
