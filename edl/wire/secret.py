"""What those who belong to a job have in common: one secret, and what is derived from it.

Keys come out of it by HKDF with SHA-256 (RFC 5869), one label for each use, so that none tells anything of another.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from edl.types import JobId

LEAST_BYTES = 16
_SALT = b"edl job secret, version 1"
_MARK = b"secret:"
"""Begins what the store holds in place of a token where there is a secret; its fingerprint follows."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A job's secret, as it was given."""

    value: bytes = field(repr=False)

    def derive(self, label: str, size: int = 32) -> bytes:
        """HKDF: ``size`` bytes for one use, at most 8,160."""
        key = hmac.new(_SALT, self.value, hashlib.sha256).digest()
        block, out = b"", b""
        for number in range(1, -(-size // 32) + 1):
            block = hmac.new(key, block + label.encode() + bytes([number]), hashlib.sha256).digest()
            out += block
        return out[:size]

    def token(self, job: JobId) -> str:
        """By which the launchers of this job know one another; those of another job with this secret have another."""
        return self.derive(f"token of job {job}").hex()

    def of_readers(self, job: JobId) -> str:
        """By which this job's readers of data and its workers know one another. It opens nothing else: workers run
        whatever the script loads, so they hold this and not the secret."""
        return self.derive(f"readers of job {job}").hex()

    @property
    def fingerprint(self) -> str:
        """Tells secrets apart in messages, and nothing else about them."""
        return self.derive("fingerprint", 4).hex()


def stored_token(secret: Secret | None) -> bytes:
    """What the founder of a job leaves in the store: a new token, or whose secret makes it."""
    return secrets.token_hex(16).encode() if secret is None else _MARK + secret.fingerprint.encode()


def token_of(stored: bytes, secret: Secret | None, job: JobId) -> str | None:
    """The job's token, out of the store or out of the secret; None where ``secret`` is not that of the job."""
    if stored.startswith(_MARK) != (secret is not None):
        return None
    if secret is None:
        return stored.decode()
    return secret.token(job) if stored == stored_token(secret) else None


def described(stored: bytes) -> str:
    """The secret of a running job, in words."""
    return f"a secret with the fingerprint {stored[len(_MARK) :].decode()}" if stored.startswith(_MARK) else "none"


def own_words(secret: Secret | None) -> str:
    """The same of one's own."""
    return "none" if secret is None else f"a secret with the fingerprint {secret.fingerprint}"
