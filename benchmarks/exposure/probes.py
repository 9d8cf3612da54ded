"""Requests that a stranger can send to a socket, and their results. Each probe returns a few words."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - before this process is somebody who may not read it
import encodings.idna  # noqa: F401
import socket
import ssl
from typing import Any

import grpc

from edl.adapters.identity import secret_at

WAIT_S = 3.0
KINDS = {"datagram": socket.SOCK_DGRAM, "packet": socket.SOCK_SEQPACKET}
SERVICE = "/edl.v1.Master/"
NO_GRPC = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN")
"""gRPC statuses of servers that speak another protocol."""


def connection(family: str, address: Any) -> socket.socket:
    """Connect to a socket. Raises ``OSError``."""
    address = tuple(address) if isinstance(address, list) else address
    if family == "tcp":
        return socket.create_connection(address, WAIT_S)
    one = socket.socket(socket.AF_UNIX, KINDS.get(family.partition("-")[2], socket.SOCK_STREAM))
    one.settimeout(WAIT_S)
    try:
        one.connect(address)
    except OSError:
        one.close()
        raise
    return one


def connects(family: str, address: Any) -> str:
    try:
        connection(family, address).close()
        return "yes"
    except OSError as error:
        return error.strerror or type(error).__name__


def http(family: str, address: Any, request: str = "GET /version") -> str:
    """The first line of the answer to an HTTP request."""
    body = '{"key":"L2VkbC8=","range_end":"L2VkbDA="}' if request.startswith("POST") else ""
    head = f"{request} HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    try:
        with connection(family, address) as one:
            one.sendall((head + body).encode())
            heard = one.recv(4096)
    except OSError as error:
        return "closed" if isinstance(error, ConnectionError) else (error.strerror or "silence")
    if not heard:
        return "closed"
    if not heard.startswith(b"HTTP/"):
        return "no HTTP" if b"HTTP request" not in heard else "asks for TLS"
    status = heard.split(b"\r\n")[0].decode(errors="replace").partition(" ")[2]
    return status + (" + CORS" if b"Access-Control-Allow-Origin" in heard else "")


def tls(family: str, address: Any) -> str:
    """A TLS handshake without a certificate and without verification, and the data after it. A job's certificates
    contain the fingerprint of the secret that they were made with."""
    shown = asyncio.run(secret_at(*address)) if family == "tcp" else None
    return _handshake(family, address) + (f", shows {shown}" if shown else "")


def _handshake(family: str, address: Any) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with connection(family, address) as plain, context.wrap_socket(plain) as one:
            one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            return "OPEN" if one.recv(1) else "refused"
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        return "refused" if "CERTIFICATE" in reason else "no TLS"
    except TimeoutError:
        return "no TLS"
    except OSError:
        return "refused"


def call(
    target: str, method: str, request: bytes, metadata: tuple[tuple[str, str], ...] = (), limit_s: float = WAIT_S
) -> tuple[str, bytes]:
    """A unary call: the name of its status, or the details where they say more, and the answer."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1), ("grpc.default_authority", "x")]
    with grpc.insecure_channel(target, options=options) as channel:
        ask = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        try:
            return "OK", ask(request, metadata=metadata, timeout=limit_s)
        except grpc.RpcError as error:
            code = error.code().name
            return ("no gRPC" if code in NO_GRPC else code), b""


def status(target: str, token: str = "") -> str:
    said, answer = call(target, f"{SERVICE}Status", b"", (("authorization", f"Bearer {token}"),) if token else ())
    return f"ANSWERED {len(answer)} B" if said == "OK" else said


def kv_range(target: str, prefix: str) -> tuple[str, bytes]:
    """etcd's keys from ``prefix`` on."""
    last = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    return call(target, "/etcdserverpb.KV/Range", _field(1, prefix.encode()) + _field(2, last.encode()))


def read(target: str, prefix: str) -> str:
    said, answer = kv_range(target, prefix)
    if said != "OK":
        return said
    token = " with the TOKEN" if prefix.encode() + b"token" in answer else ""
    return f"READ {answer.count(prefix.encode())} keys{token}"


def put(target: str, key: str, value: bytes) -> str:
    """Write a key into etcd."""
    return call(target, "/etcdserverpb.KV/Put", _field(1, key.encode()) + _field(2, value), limit_s=30)[0]


def delete(target: str, prefix: str) -> str:
    """Delete etcd's keys from ``prefix`` on."""
    last = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    return call(target, "/etcdserverpb.KV/DeleteRange", _field(1, prefix.encode()) + _field(2, last.encode()))[0]


def _field(number: int, data: bytes) -> bytes:
    """A bytes field in a protobuf message."""
    size, length = len(data), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def everything(family: str, address: Any, target: str, prefix: str) -> dict[str, str]:
    """All probes; none if the connection was refused."""
    found = {"connect": connects(family, address)}
    if found["connect"] == "yes" and "-" in family:
        return found | {"GET": http(family, address)}
    if found["connect"] == "yes":
        found |= {
            "GET": http(family, address),
            "etcd's JSON": http(family, address, "POST /v3/kv/range"),
            "range": read(target, prefix),
            "Status": status(target),
            "wrong token": status(target, "0" * 32),
            "TLS": tls(family, address),
        }
    return found
