"""Connections between readers and trainers: with TLS if the job has a secret, otherwise plain text.

Both sides hold the readers' *authority*, derived from the job's secret for this purpose only. Each signs its own
certificate with it, and accepts only peers whose certificate it has signed.
"""

from __future__ import annotations

import functools
from typing import Any

from edl.adapters.identity import NAME, Identity, identity_of
from edl.wire.address import address
from edl.wire.secret import Secret


def server_arguments(host: str, port: int, authority: str) -> dict[str, Any]:
    """Arguments of ``FlightServerBase`` for this address, with or without TLS."""
    identity = _identity(authority)
    if identity is None:
        return {"location": f"grpc://{address(host, port)}"}
    return {
        "location": f"grpc+tls://{address(host, port)}",
        "tls_certificates": [(identity.server, identity.key)],
        "verify_client": True,
        "root_certificates": identity.ca,
    }


def client_arguments(host: str, port: int, authority: str) -> dict[str, Any]:
    """Arguments for ``FlightClient``. Raises ``SettingError`` if certificates cannot be created."""
    identity = _identity(authority)
    if identity is None:
        return {"location": f"grpc://{address(host, port)}"}
    return {
        "location": f"grpc+tls://{address(host, port)}",
        "tls_root_certs": identity.ca,
        "cert_chain": identity.client,
        "private_key": identity.key,
        "override_hostname": NAME,
    }


@functools.cache
def _identity(authority: str) -> Identity | None:
    """The certificates of this process; None if the job has no secret."""
    return identity_of(Secret(authority.encode())) if authority else None
