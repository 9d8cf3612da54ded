"""Settings of a launcher's HTTP interface, and limits on its use of resources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Where and how a launcher serves HTTP. Paths are absolute, or empty if not given."""

    port: int
    """Port to listen on; 0: any free one."""
    host: str = ""
    """Address to listen on; empty: the node's address."""
    token_file: str = ""
    """File with tokens for full access, one per line; empty: the job's own token gives it."""
    read_token_file: str = ""
    """File with tokens for read-only access, one per line."""
    cert: str = ""
    """File with the certificate for TLS in PEM format; empty: plain HTTP."""
    key: str = ""
    """File with the certificate's key in PEM format, not encrypted."""
    client_ca: str = ""
    """File with CA certificates; clients must present a certificate signed by one of them. Empty: clients need none."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one server on clients and requests."""

    body_bytes: int = 1024 * 1024
    """Largest request body in bytes."""
    body_s: float = 10.0
    """Seconds that a request body may take to arrive."""
    send_s: float = 10.0
    """Seconds that a client may take to read a response, or a part of a stream."""
    idle_s: float = 15.0
    """Seconds that a request head may take to arrive, from the connection or from the end of the previous request."""
    handshake_s: float = 5.0
    """Seconds that the TLS handshake may take."""
    master_s: float = 10.0
    """Seconds that the Master may take to write a request to the store."""
    asking: int = 64
    """Number of requests that may wait for the store. Further ones are refused at once, so that they do not pile up
    while the store is unavailable."""
    rate: float = 50.0
    """Requests per second that one peer may send."""
    burst: float = 100.0
    """Requests that one peer may send at once."""
    peers: int = 1024
    """Number of peers whose rates are remembered."""
    connections: int = 256
    """Number of open connections in total."""
    connections_each: int = 64
    """Number of open connections per peer."""
    streams: int = 16
    """Number of open event streams."""
    status_streams: int = 64
    """Number of open streams of the status."""
    status_s: float = 1.0
    """Least number of seconds between two statuses of a stream."""
    heartbeat_s: float = 15.0
    """Seconds between two heartbeats of a stream without events."""
    rest_s: float = 10.0
    """Seconds after the start until the HTTP library is imported, unless a client connects earlier."""
    refresh_s: float = 1.0
    """Seconds between two checks whether the files with tokens and certificates have changed."""
    certificates_s: float = 10.0
    """The same without requests: clients refuse an expired certificate, and then there are none."""
