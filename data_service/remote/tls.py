"""Connections between readers and trainers: over TLS where the job has a secret, else in plain text.

Both then hold one text, the readers' *authority*, made from the job's secret for this use alone. Each signs a
certificate for itself with it, and takes no other side's that another authority has signed.
"""

from __future__ import annotations

import functools
from typing import Any

from edl.adapters.identity import NAME, Identity, identity_of
from edl.wire.address import address
from edl.wire.secret import Secret


def server_arguments(host: str, port: int, authority: str) -> dict[str, Any]:
    """Arguments for a ``FlightServerBase``."""
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
    """Arguments for a ``FlightClient``. Raises ``SettingError`` where certificates cannot be made."""
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
    """Certificates of this process; None: the job has no secret."""
    return identity_of(Secret(authority.encode())) if authority else None
