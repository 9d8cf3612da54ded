"""Cutting the sockets of a group from outside, at any moment of their lives."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("torch")
from edl.torch.sockets import deafen, hang_up, sockets


def test_a_connection_reads_its_end_and_is_then_hung_up() -> None:
    before = sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as here, server.accept()[0] as there:
            deaf = deafen(sockets() - before)
            assert here.recv(1) == there.recv(1) == b""
            here.sendall(b"written all the same")
            hang_up(deaf)
            with pytest.raises(BrokenPipeError):
                there.sendall(b"x")
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            pass  # who listens still does


def test_a_socket_that_becomes_a_listener_meanwhile_goes_on_listening() -> None:
    """gloo binds, then listens; its thread ends the process when accept() fails."""
    before = sockets()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        deaf = deafen(sockets() - before)
        server.listen()
        hang_up(deaf)
        server.settimeout(10)
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            pass
