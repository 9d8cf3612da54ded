"""Settings of a launcher's HTTP side, and the limits on its use of resources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Where and how a launcher serves HTTP. Paths are empty if they were not given."""

    port: int
    """Port to listen on; 0: any free one."""
    host: str = ""
    """Address to listen on; empty: the node's address."""
    token_file: str = ""
    """File of tokens with full access, one per line; empty: the job's own token has it."""
    read_token_file: str = ""
    """File of read-only tokens, one per line."""
    cert: str = ""
    """Certificate for TLS, PEM; empty: plain HTTP."""
    key: str = ""
    """Key of the certificate, without a password."""
    client_ca: str = ""
    """File of authorities; clients must present a certificate that one of them has signed."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one server on clients and requests."""

    body_bytes: int = 1024 * 1024
    """Largest request body."""
    body_s: float = 10.0
    """Time limit for a request body to arrive."""
    send_s: float = 10.0
    """Time limit for a client to read a response, or a part of a stream."""
    idle_s: float = 15.0
    """Time limit for a request head, counted from the end of the previous request."""
    handshake_s: float = 5.0
    """Time limit for the TLS handshake."""
    master_s: float = 10.0
    """Time limit for the Master to write a request to the store."""
    asking: int = 64
    """Requests that may wait for the store; further ones are refused at once, so that they do not pile up while the
    store is unavailable."""
    rate: float = 50.0
    """Requests per second of one peer."""
    burst: float = 100.0
    """Requests that one peer may send at once."""
    peers: int = 1024
    """Peers whose rates are remembered."""
    connections: int = 256
    """Open connections in total."""
    connections_each: int = 64
    """Open connections of one peer."""
    streams: int = 16
    """Open event streams."""
    heartbeat_s: float = 15.0
    """Seconds between two heartbeats of a stream without events."""
    rest_s: float = 10.0
    """Seconds after the start until the HTTP library is imported; a client that connects starts the import earlier."""
    refresh_s: float = 1.0
    """Seconds between two checks whether files with tokens or certificates have changed."""
