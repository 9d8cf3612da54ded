"""By what a process proves over TLS that it holds the job's secret.

The secret makes the key of a certificate authority, the same wherever it is known, and that one signs a certificate of
this process's own. So nothing has to be handed out, and whoever does not hold the secret can neither connect nor be
connected to. Dates mean nothing here: the certificates hold for so long that no clock and no job is outside.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib.util
import ipaddress
import os
import re
import socket
import ssl
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edl.errors import SettingError
from edl.wire.secret import Secret

if TYPE_CHECKING:
    import grpc
    from cryptography.hazmat.primitives.asymmetric import ec

NAME = "member.edl.invalid"
"""What every server is called: that it holds the secret counts, not at which address it was reached."""
FIRST_DAY = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)
LAST_DAY = datetime.datetime(2099, 12, 31, tzinfo=datetime.timezone.utc)
ISSUER = "edl secret "
"""Begins the authority's name; the secret's fingerprint follows. So somebody with another one can say which it is."""
LOOK_S = 1.0
MOST_HEARD = 65536
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of the group of P-256 (SEC 2)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Certificates as PEM."""

    fingerprint: str
    ca: bytes = field(repr=False)
    key: bytes = field(repr=False)
    server: bytes = field(repr=False)
    client: bytes = field(repr=False)
    """Without names: etcd would compare them with the address that a client comes from."""

    def of_client(self) -> grpc.ChannelCredentials:
        """For a channel; it needs ``channel_options`` as well."""
        import grpc  # only now: workers make certificates, too, and have no use for it

        return grpc.ssl_channel_credentials(self.ca, self.key, self.client)

    def of_server(self) -> grpc.ServerCredentials:
        """For a port: clients without a certificate of this authority are refused in the handshake."""
        import grpc

        return grpc.ssl_server_credentials([(self.key, self.server)], self.ca, require_client_auth=True)

    @property
    def channel_options(self) -> list[tuple[str, str]]:
        """What a channel has to know beside its credentials."""
        return [("grpc.ssl_target_name_override", NAME)]

    def context(self) -> ssl.SSLContext:
        """For a client that is no gRPC."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cadata=self.ca.decode())
        with tempfile.NamedTemporaryFile() as file:  # the module takes a path alone; 0600, and gone in a moment
            file.write(self.client + self.key)
            file.flush()
            context.load_cert_chain(file.name)
        return context

    def leave_in(self, folder: Path) -> None:
        """Write the files that etcd reads. Only this user may read them."""
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, data in (("ca.pem", self.ca), ("key.pem", self.key), ("cert.pem", self.server)):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(data)


def identity_of(secret: Secret, hosts: Iterable[str] = ()) -> Identity:
    """New certificates of this process. ``hosts``: under which etcd's members reach the one that runs here.

    Raises ``SettingError`` where the package that makes certificates is missing.
    """
    if importlib.util.find_spec("cryptography") is None:
        advice = "Run: pip install cryptography"
        raise SettingError("--secret-file", "''", "a job with a secret needs the package cryptography", advice)
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    scalar = int.from_bytes(secret.derive("certificate authority", 48), "big") % (_ORDER - 1) + 1
    authority, own = ec.derive_private_key(scalar, ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer, pem = f"{ISSUER}{secret.fingerprint}", serialization.Encoding.PEM
    return Identity(
        secret.fingerprint,
        ca=_signed(authority, authority.public_key(), issuer, issuer, None).public_bytes(pem),
        key=own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        server=_signed(authority, own.public_key(), issuer, NAME, (NAME, "localhost", *hosts)).public_bytes(pem),
        client=_signed(authority, own.public_key(), issuer, NAME, ()).public_bytes(pem),
    )


def _signed(
    by: ec.EllipticCurvePrivateKey,
    public: ec.EllipticCurvePublicKey,
    issuer: str,
    subject: str,
    names: tuple[str, ...] | None,
) -> Any:
    """A certificate. ``names``: under which it is reached; None: it is the authority's own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    def called(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    made = (
        x509.CertificateBuilder()
        .subject_name(called(subject))
        .issuer_name(called(issuer))
        .public_key(public)
        # The authority's is made anew by every process, and has to be the same.
        .serial_number(1 if names is None else x509.random_serial_number())
        .not_valid_before(FIRST_DAY)
        .not_valid_after(LAST_DAY)
        .add_extension(x509.BasicConstraints(ca=names is None, path_length=0 if names is None else None), critical=True)
    )
    if names:
        made = made.add_extension(x509.SubjectAlternativeName([_name(one) for one in dict.fromkeys(names)]), False)
    if names is not None:
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        made = made.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return made.sign(by, hashes.SHA256())


def _name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return x509.DNSName(host)


async def secret_at(host: str, port: int) -> str | None:
    """The fingerprint of the secret that whoever listens there holds; None: of none, or nobody answers."""
    data = await asyncio.to_thread(_hello_of, host, port)
    found = re.search(ISSUER.encode() + b"([0-9a-f]{8})", data)
    return found[1].decode() if found else None


def _hello_of(host: str, port: int) -> bytes:
    """What a server says in a handshake, up to TLS 1.2: its certificate is in it, readable.

    The handshake itself fails, because a client without a certificate is refused, so nothing can be asked of it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only a look; nothing is sent
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    arrived, leaving, heard = ssl.MemoryBIO(), ssl.MemoryBIO(), b""
    client = context.wrap_bio(arrived, leaving)
    try:
        with socket.create_connection((host, port), LOOK_S) as plain:
            while len(heard) < MOST_HEARD:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    plain.sendall(leaving.read())
                more = plain.recv(4096)
                if not more:
                    break
                heard += more
                arrived.write(more)
    except OSError:  # an error of TLS is one, too
        pass
    return heard
