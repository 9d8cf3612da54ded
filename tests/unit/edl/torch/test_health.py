"""Exchanges between devices, with gloo in place of NCCL."""

from __future__ import annotations

import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest

from edl.types import NodeId
from edl.wire.health import CheckHealth, HealthChecked, HealthPeer, LinkFinding
from edl.wire.health_records import ProbeOrder
from edl.worker.probe.device_exchanges import ExchangeTimes, between_devices
from edl.worker.probe.exchange import NotBegun

pytestmark = pytest.mark.torch
LIMIT_S = 60.0


def node(name: str, others: str, pipe: Connection, broken: str) -> None:
    """A node with two devices that exchanges data with all others."""
    import torch

    from edl.torch import health

    health.ELEMENTS = 1000
    links = health.TorchLinks([torch.device("cpu")] * 2, "gloo")
    if name == broken:
        real = health._pattern
        calls = iter(range(100))

        def flipped(sender: int, device: Any) -> Any:
            numbers = real(sender, device)
            if next(calls) == 0:  # what it sends first
                numbers[7] += 1
            return numbers

        health._pattern = flipped
    pipe.send(links.store_port)
    stores: dict[str, int] = pipe.recv()
    peers = tuple(HealthPeer(NodeId(other), "127.0.0.1", 1) for other in others)
    ordered = ProbeOrder(CheckHealth(1, 1, 1, peers, 64, 60.0, "test"), NodeId(name), 2, "s")
    checked = HealthChecked(1, 1, links=tuple(LinkFinding(peer.node) for peer in peers))
    times = ExchangeTimes.between(time.monotonic(), time.monotonic() + LIMIT_S)
    *_, found = between_devices(ordered, checked, stores, links, times, time.monotonic)
    pipe.send({link.node: link.error for link in found.links})
    pipe.recv()


def exchanged(names: str, broken: str = "") -> dict[str, dict[str, str]]:
    """What each node has found about the others."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in names:
        ours, theirs = context.Pipe()
        others = "".join(other for other in names if other != name)
        process = context.Process(target=node, args=(name, others, theirs, broken), daemon=True)
        process.start()
        theirs.close()
        pipes[name] = ours
        processes.append(process)
    ports = {name: pipe.recv() for name, pipe in pipes.items()}
    for pipe in pipes.values():
        pipe.send(ports)
    found = {name: pipe.recv() for name, pipe in pipes.items()}
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()
    for pipe in pipes.values():
        pipe.close()
    return found


@pytest.mark.slow
def test_three_nodes_exchange_in_one_order() -> None:
    assert exchanged("abc") == {"a": {"b": "", "c": ""}, "b": {"a": "", "c": ""}, "c": {"a": "", "b": ""}}


@pytest.mark.slow
def test_a_number_that_changes_is_found() -> None:
    found = exchanged("ab", broken="a")
    assert "device 0: other numbers arrived than were sent" in found["b"]["a"]


def test_a_side_that_waits_in_vain_withdraws() -> None:
    """The other one, if it comes later, does not wait for it in the exchange itself."""
    import torch

    from edl.torch import health

    waiting, late = (health.TorchLinks([torch.device("cpu")], "gloo") for _ in range(2))
    for begins, store in ((waiting, waiting), (late, waiting)):
        with pytest.raises(NotBegun):
            begins.exchange("1/1/a/b", 0 if begins is store else 1, "127.0.0.1", store.store_port, 0.1)


def test_a_peer_whose_probe_has_ended_has_not_begun() -> None:
    import torch

    from edl.torch import health

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NotBegun):
        health.TorchLinks([torch.device("cpu")], "gloo").exchange("1/1/a/b", 1, "127.0.0.1", port, 0.1)
