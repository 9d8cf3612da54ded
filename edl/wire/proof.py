"""Mutual proof that two sides know the same secret, without sending it.

Each side draws a nonce. A proof is the HMAC over both nonces and the side that gives it, so it can be neither
replayed nor reflected.
"""

from __future__ import annotations

import hmac
import secrets

NONCE_BYTES = 32
PROOF_BYTES = 32
CALLER = b"client"
CALLED = b"server"


def draw() -> bytes:
    """Return a random nonce."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(secret: str, side: bytes, caller: bytes, called: bytes) -> bytes:
    """The proof of one side (``CALLER`` or ``CALLED``), from both sides' nonces."""
    return hmac.digest(secret.encode(), side + caller + called, "sha256")


def holds(proof: bytes, secret: str, side: bytes, caller: bytes, called: bytes) -> bool:
    """Whether a proof is valid for the secret."""
    return hmac.compare_digest(proof, prove(secret, side, caller, called))
