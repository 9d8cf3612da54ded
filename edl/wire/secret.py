"""The secret shared by a job's processes, and the keys derived from it.

Keys are derived by HKDF with SHA-256 (RFC 5869), with one label per use, so that no key reveals another.
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
"""Prefix of the value stored instead of a token if there is a secret; its fingerprint follows."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A job's secret, as given by the user."""

    value: bytes = field(repr=False)

    def derive(self, label: str, size: int = 32) -> bytes:
        """Derive ``size`` bytes for one use by HKDF, at most 8,160."""
        key = hmac.new(_SALT, self.value, hashlib.sha256).digest()
        block, out = b"", b""
        for number in range(1, -(-size // 32) + 1):
            block = hmac.new(key, block + label.encode() + bytes([number]), hashlib.sha256).digest()
            out += block
        return out[:size]

    def token(self, job: JobId) -> str:
        """Token by which launchers of this job identify each other; it differs between jobs with the same secret."""
        return self.derive(f"token of job {job}").hex()

    def of_readers(self, job: JobId) -> str:
        """Token by which this job's remote readers and workers identify each other. It grants nothing else: workers run
        arbitrary code, so they get this token instead of the secret."""
        return self.derive(f"readers of job {job}").hex()

    @property
    def fingerprint(self) -> str:
        """Identifies a secret in messages without revealing it."""
        return self.derive("fingerprint", 4).hex()


def stored_token(secret: Secret | None) -> bytes:
    """Value stored by a job's founder: a new token, or the fingerprint of the secret from which it derives."""
    return secrets.token_hex(16).encode() if secret is None else _MARK + secret.fingerprint.encode()


def token_of(stored: bytes, secret: Secret | None, job: JobId) -> str | None:
    """The job's token, from the store or derived from the secret; None if ``secret`` is not the job's."""
    if stored.startswith(_MARK) != (secret is not None):
        return None
    if secret is None:
        return stored.decode()
    return secret.token(job) if stored == stored_token(secret) else None


def described(stored: bytes) -> str:
    """Describe the secret of a running job."""
    return f"a secret with the fingerprint {stored[len(_MARK) :].decode()}" if stored.startswith(_MARK) else "none"


def described_own(secret: Secret | None) -> str:
    """Describe this launcher's own secret."""
    return "none" if secret is None else f"a secret with the fingerprint {secret.fingerprint}"
