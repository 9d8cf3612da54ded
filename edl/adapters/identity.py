"""TLS certificates by which a process proves that it holds the job's secret.

The secret determines the key of a certificate authority, which is therefore the same for all holders of the secret, and
the authority signs a certificate for each process. So no certificate has to be distributed, and a process without the
secret can neither connect nor be connected to. Validity dates play no role: they include every date that a clock may
show.
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
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edl.anonymous_file import anonymous_file, path_of
from edl.errors import SettingError
from edl.wire.secret import Secret

if TYPE_CHECKING:
    import grpc
    from cryptography.hazmat.primitives.asymmetric import ec

NAME = "member.edl.invalid"
"""Host name in every server certificate: a server proves that it holds the secret, not its address."""
FIRST_DAY = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)
LAST_DAY = datetime.datetime(2099, 12, 31, tzinfo=datetime.timezone.utc)
ISSUER = "edl secret "
"""Prefix of the authority's name; the secret's fingerprint follows, so that a process with another secret can report
it."""
LOOK_S = 1.0
MOST_HEARD = 65536
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the group of P-256 (SEC 2)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Certificates and private key in PEM format."""

    fingerprint: str
    ca: bytes = field(repr=False)
    key: bytes = field(repr=False)
    server: bytes = field(repr=False)
    client: bytes = field(repr=False)
    """Without host names: etcd would compare them with the client's address."""

    def of_client(self) -> grpc.ChannelCredentials:
        """Credentials of a channel, which also needs ``channel_options``."""
        import grpc  # only now: workers make certificates, too, and have no use for it

        return grpc.ssl_channel_credentials(self.ca, self.key, self.client)

    def of_server(self) -> grpc.ServerCredentials:
        """Credentials of a server: clients without a certificate of this authority are refused in the handshake."""
        import grpc

        return grpc.ssl_server_credentials([(self.key, self.server)], self.ca, require_client_auth=True)

    @property
    def channel_options(self) -> list[tuple[str, str]]:
        """Channel options needed besides the credentials."""
        return [("grpc.ssl_target_name_override", NAME)]

    def context(self) -> ssl.SSLContext:
        """TLS context of clients that do not use gRPC."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cadata=self.ca.decode())
        with anonymous_file(self.client + self.key) as file:  # ssl only takes a path; no disk gets the key
            context.load_cert_chain(path_of(file))
        return context

    @property
    def _files(self) -> dict[str, bytes]:
        """The files that etcd reads, by name."""
        return {"ca.pem": self.ca, "key.pem": self.key, "cert.pem": self.server}

    def restore_in(self, folder: Path) -> None:
        """Write the files again if one of them is gone. Raises ``OSError``."""
        if not all((folder / name).exists() for name in self._files):
            self.write_to(folder)

    def write_to(self, folder: Path) -> None:
        """Write the files that etcd reads, readable only for this user."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in self._files.items():
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(data)


def identity_of(secret: Secret, hosts: Iterable[str] = ()) -> Identity:
    """Create new certificates for this process. ``hosts``: names and addresses at which other etcd members reach this
    one.

    Raises ``SettingError`` when the package ``cryptography`` is missing.
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
    """A signed certificate. ``names``: its host names; None for the authority's own certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    def common_name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    made = (
        x509.CertificateBuilder()
        .subject_name(common_name(subject))
        .issuer_name(common_name(issuer))
        .public_key(public)
        # Every process creates its own copy of the authority's certificate, and all copies must be equal.
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
    """The fingerprint of the secret of the server at this address; None without a secret or without an answer."""
    data = await asyncio.to_thread(_hello_of, host, port)
    found = re.search(ISSUER.encode() + b"([0-9a-f]{8})", data)
    return found[1].decode() if found else None


def _hello_of(host: str, port: int) -> bytes:
    """The bytes that a server sends in a handshake up to TLS 1.2, which contain its certificate in the clear.

    The handshake itself fails, because a client without a certificate is refused, so the certificate cannot be queried.
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
    except OSError:  # TLS errors are also OSErrors
        pass
    return heard
