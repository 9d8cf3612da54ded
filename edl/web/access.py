"""Who may do what, and how often: tokens from files that may change, and a bounded count of requests."""

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
"""What a token may look like: visible ASCII, not too short."""
MOST_BYTES = 64 * 1024
"""Of a file with tokens."""


class Rights(enum.Enum):
    """What somebody may do."""

    FULL = "full"
    READ = "read"


class TokenFile:
    """Tokens of one file, one a line; empty lines and lines that begin with ``#`` do not count."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._digests: tuple[bytes, ...] = ()

    def read(self) -> bool:
        """Read it if it has changed; returns whether it had. Blocks.

        Raises ``OSError``, or ``ValueError`` (which names a line, never a token); the tokens known so far stay then.
        """
        stat = os.stat(self.path)
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if stamp == self._stamp:
            return False
        self._digests = tuple(_digest(one) for one in tokens_in(self.path))
        self._stamp = stamp
        return True

    def has(self, digest: bytes) -> bool:
        """Whether one of its tokens is this one; takes as long whichever it is."""
        return _among(digest, self._digests)


def tokens_in(path: str) -> list[str]:
    """See ``TokenFile``."""
    with Path(path).open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes, which is no list of tokens")
    found = []
    for number, line in enumerate(data.decode("latin-1").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not TOKEN.fullmatch(text):
            raise ValueError(f"line {number} is no token: 8 to 1024 visible ASCII characters without spaces")
        found.append(text)
    return found


class Tokens:
    """All tokens that count here."""

    def __init__(self, job_token: Callable[[], str], full: str, read: str, log: Callable[[str], None]) -> None:
        self._job_token = job_token
        self._full = TokenFile(full) if full else None
        self._read = TokenFile(read) if read else None
        self._log = log
        self._said: dict[str, str] = {}

    def refresh(self) -> None:
        """Read the files that have changed. Blocks. One that cannot be read is named once, and what it said holds."""
        for file in (one for one in (self._full, self._read) if one is not None):
            try:
                first = file.path not in self._said
                if file.read() and not first:
                    self._log(f"HTTP: {file.path} has changed; its tokens count from now on")
                self._said[file.path] = ""
            except (OSError, ValueError) as error:
                text = error.strerror or "" if isinstance(error, OSError) else str(error)
                if self._said.get(file.path) != text:
                    self._log(f"HTTP: cannot read {file.path}: {text}. The tokens known so far stay")
                self._said[file.path] = text

    def rights(self, authorization: str) -> Rights | None:
        """What the sender of this header may do; None: it carries no token that is known."""
        scheme, _, token = authorization.partition(" ")
        digest = _digest(token.strip())
        full = self._full.has(digest) if self._full is not None else _among(digest, (_digest(self._job_token()),))
        read = self._read.has(digest) if self._read is not None else False
        if scheme.lower() != "bearer" or not token.strip():
            return None  # the job's own may not be known yet: that is empty, too
        if full:
            return Rights.FULL
        return Rights.READ if read else None


def _digest(token: str) -> bytes:
    """Tokens are compared by digests of one length: how long a comparison takes says nothing about a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _among(digest: bytes, known: tuple[bytes, ...]) -> bool:
    found = False
    for one in known:
        found |= hmac.compare_digest(digest, one)
    return found


class RateLimit:
    """A bucket of tokens for each peer. Only so many peers are remembered: those that asked last."""

    def __init__(self, rate: float, burst: float, peers: int) -> None:
        self._rate, self._burst, self._peers = rate, burst, peers
        self._buckets: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def admits(self, peer: str, now_s: float) -> bool:
        """Whether this request of the peer is within its rate."""
        left, then_s = self._buckets.pop(peer, (self._burst, now_s))
        left = min(self._burst, left + (now_s - then_s) * self._rate)
        admitted = left >= 1.0
        self._buckets[peer] = (left - 1.0 if admitted else left, now_s)
        if len(self._buckets) > self._peers:
            self._buckets.popitem(last=False)
        return admitted

    def __len__(self) -> int:
        return len(self._buckets)


def peer_of(host: str) -> str:
    """The address by which a peer is counted: for IPv6 its network, of which one host has all addresses."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.IPv6Network((address, 64), strict=False))
