"""Access control of the HTTP interface: tokens, whose files are reread when they change, and a rate limit per peer."""

from __future__ import annotations

import collections
import enum
import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Callable
from pathlib import Path

TOKEN = re.compile(r"[\x21-\x7e]{8,1024}")
"""The form of a token: 8 to 1024 visible ASCII characters."""
MOST_BYTES = 64 * 1024
"""Limit on the size of a token file in bytes."""


class Rights(enum.Enum):
    """Permissions that a token gives."""

    FULL = "full"
    READ = "read"
    """Only ``GET`` requests."""


class TokenFile:
    """The tokens of one file, one per line; empty lines and lines that begin with ``#`` are ignored."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._digests: tuple[bytes, ...] = ()

    def read(self) -> bool:
        """Read the file if it has changed since the last call; returns whether it had. Blocks on the file system.

        Raises ``OSError``, or ``ValueError``, which names the line but never the token. After an error the previous
        tokens stay valid.
        """
        stat = os.stat(self.path)
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if stamp == self._stamp:
            return False
        self._digests = tuple(_digest(one) for one in tokens_in(self.path))
        self._stamp = stamp
        return True

    def has(self, digest: bytes) -> bool:
        """Whether the file contains the token with this digest, compared in constant time."""
        return _among(digest, self._digests)


def tokens_in(path: str) -> list[str]:
    """The tokens in a file, as ``TokenFile`` reads them. Raises ``OSError``, or ``ValueError`` that names the line."""
    with Path(path).open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"longer than {MOST_BYTES} bytes, too long for a list of tokens")
    found = []
    for number, line in enumerate(data.decode("latin-1").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not TOKEN.fullmatch(text):
            raise ValueError(f"line {number} is not a token: use 8 to 1024 visible ASCII characters without spaces")
        found.append(text)
    return found


class Tokens:
    """All tokens that this launcher accepts: the job's own, or those of the two files."""

    def __init__(self, job_token: Callable[[], str], full: str, read: str, log: Callable[[str], None]) -> None:
        self._job_token = job_token
        self._full = TokenFile(full) if full else None
        self._read = TokenFile(read) if read else None
        self._log = log
        self._said: dict[str, str] = {}

    def refresh(self) -> None:
        """Reread the files that have changed. Blocks on the file system. A file that cannot be read is logged once; its
        previous tokens stay valid."""
        for file in (one for one in (self._full, self._read) if one is not None):
            try:
                first = file.path not in self._said
                if file.read() and not first:
                    self._log(f"HTTP: {file.path} has changed; its new tokens are valid now")
                self._said[file.path] = ""
            except (OSError, ValueError) as error:
                text = error.strerror or "" if isinstance(error, OSError) else str(error)
                if self._said.get(file.path) != text:
                    self._log(f"HTTP: cannot read {file.path}: {text}. The previous tokens stay valid")
                self._said[file.path] = text

    def rights(self, authorization: str) -> Rights | None:
        """The rights that an ``Authorization`` header gives; None: it has no valid token."""
        scheme, _, token = authorization.partition(" ")
        digest = _digest(token.strip())
        full = self._full.has(digest) if self._full is not None else _among(digest, (_digest(self._job_token()),))
        read = self._read.has(digest) if self._read is not None else False
        if scheme.lower() != "bearer" or not token.strip():
            return None  # the job's token may not be known yet and is empty then
        if full:
            return Rights.FULL
        return Rights.READ if read else None


def _digest(token: str) -> bytes:
    """SHA-256 of a token. Comparing digests, which have equal length, reveals nothing about a token by its duration."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _among(digest: bytes, known: tuple[bytes, ...]) -> bool:
    found = False
    for one in known:
        found |= hmac.compare_digest(digest, one)
    return found


class RateLimit:
    """A token bucket per peer: ``rate`` requests per second, ``burst`` at once. The ``peers`` most recent peers are
    remembered."""

    def __init__(self, rate: float, burst: float, peers: int) -> None:
        self._rate, self._burst, self._peers = rate, burst, peers
        self._buckets: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def admits(self, peer: str, now_s: float) -> bool:
        """Count a request of this peer; returns whether the rate limit admits it."""
        left, then_s = self._buckets.pop(peer, (self._burst, now_s))
        left = min(self._burst, left + (now_s - then_s) * self._rate)
        admitted = left >= 1.0
        self._buckets[peer] = (left - 1.0 if admitted else left, now_s)
        if len(self._buckets) > self._peers:
            self._buckets.popitem(last=False)
        return admitted

    def __len__(self) -> int:
        return len(self._buckets)


def unmapped(host: str) -> str:
    """The address of a peer as people write it: one of IPv4 comes in the form of IPv6 from a socket for both."""
    text = host.removeprefix("::ffff:")
    return text if "." in text and ":" not in text else host


def peer_of(host: str) -> str:
    """The address under which a peer is counted: its IPv4 address, or its IPv6 /64 network, because one host may use
    every address in that."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.IPv6Network((address, 64), strict=False))
