"""What goes over local sockets: launcher, fork server and workers."""

from __future__ import annotations

import os
import typing
from typing import Any

import pytest

from edl.errors import ProtocolError
from edl.wire import fork_server, local
from tests.unit.edl.wire.test_messages import example

TO_AGENT, TO_WORKER = typing.get_args(local.ToAgent), typing.get_args(local.ToWorker)
WITH_FORK_SERVER = typing.get_args(fork_server.Message)


@pytest.mark.parametrize("kind", TO_AGENT, ids=lambda kind: kind.__name__)
def test_a_workers_message_arrives_as_it_was(kind: type) -> None:
    assert local.decode_to_agent(local.encode_to_agent(example(kind))) == example(kind)


@pytest.mark.parametrize("kind", TO_WORKER, ids=lambda kind: kind.__name__)
def test_a_launchers_message_arrives_as_it_was(kind: type) -> None:
    assert local.decode_to_worker(local.encode_to_worker(example(kind))) == example(kind)


@pytest.mark.parametrize("kind", WITH_FORK_SERVER, ids=lambda kind: kind.__name__)
def test_a_fork_servers_message_arrives_as_it_was(kind: type) -> None:
    assert fork_server.decode(fork_server.encode(example(kind))) == example(kind)


def test_another_direction_or_type_is_refused() -> None:
    with pytest.raises(ProtocolError, match="kind=Place is none of its kinds"):
        local.decode_to_agent(local.encode_to_worker(local.Place(3)))
    wrong: Any = "three"
    with pytest.raises(ProtocolError, match=r"says to its launcher \(Parked\): round=three: Expected `int`"):
        local.decode_to_agent(local.encode_to_agent(local.Parked(wrong)))


def test_an_order_with_a_variable_that_is_no_text() -> None:
    order = fork_server.WorkerOrder("script", "a.py", ("--x", "ü"), {"A": "\udcff", "B": "1"}, "/tmp", (0, 1))
    descriptor = fork_server.write_order(order)
    try:
        assert fork_server.read_order(descriptor) == order
    finally:
        os.close(descriptor)
