"""What the HTTP side of a launcher was told, and the bounds that keep it small."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Where and how a launcher answers HTTP. Paths are empty where nothing was given."""

    port: int
    """0: any that is free."""
    host: str = ""
    """Address to listen on; empty: that of the node."""
    token_file: str = ""
    """Tokens that may do everything, one a line; empty: the job's own token."""
    read_token_file: str = ""
    """Tokens that may only look."""
    cert: str = ""
    key: str = ""
    client_ca: str = ""
    """Clients have to show a certificate that one of these authorities has signed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server takes at most, from whomever."""

    body_bytes: int = 1024 * 1024
    body_s: float = 10.0
    """For a body to arrive."""
    send_s: float = 10.0
    """For an answer to be taken; also for each part of a stream."""
    idle_s: float = 15.0
    """For the head of a request, counted from the end of the last one."""
    handshake_s: float = 5.0
    """For TLS."""
    master_s: float = 10.0
    """For the Master to have a wish in the store."""
    asking: int = 64
    """Wishes that may wait for that; further ones are answered at once, so that none heap up while the store is away.
    """
    rate: float = 50.0
    """Requests a second of one peer."""
    burst: float = 100.0
    """Requests of one peer that may come at once."""
    peers: int = 1024
    """Peers that are counted apart."""
    connections: int = 256
    connections_each: int = 64
    """Of one peer."""
    streams: int = 16
    """Streams of events."""
    heartbeat_s: float = 15.0
    """Between two signs of life of a stream in which nothing happens."""
    rest_s: float = 10.0
    """After the start, before the library is imported, unless somebody connects."""
    refresh_s: float = 1.0
    """Between two looks at whether a file with tokens or certificates has changed."""
