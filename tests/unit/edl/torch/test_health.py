"""Exchanges between devices, with gloo in place of NCCL."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from edl.types import NodeId
from edl.wire.health import CheckHealth, HealthPeer, LinkFinding
from edl.wire.health_records import ProbeOrder
from edl.worker.probe.main import between_devices, with_unknown_devices

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
    found = between_devices(
        ordered, [LinkFinding(peer.node) for peer in peers], stores, links, time.monotonic() + LIMIT_S
    )
    pipe.send({link.node: link.error for link in found})
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


class Links:
    """Device links that fail with some nodes."""

    store_port = 5

    def __init__(self, fails: Callable[[str], bool]) -> None:
        self._fails = fails
        self.calls: list[tuple[str, int]] = []

    def exchange(self, name: str, rank: int, host: str, port: int, limit_s: float) -> None:
        self.calls.append((name, rank))
        if self._fails(host):
            raise RuntimeError("NCCL error")


def test_only_peers_with_devices_whose_bytes_have_arrived_take_part() -> None:
    peers = tuple(HealthPeer(NodeId(name), name, 1) for name in "acde")
    ordered = ProbeOrder(CheckHealth(1, 2, 1, peers, 64, 60.0, "test"), NodeId("b"), 2, "s")
    found = [LinkFinding(NodeId(name), "timed out" if name == "c" else "") for name in "edca"]
    links = Links(lambda host: host == "d")
    stores = {"a": 7, "c": 8, "d": 9, "e": 0}
    after = {one.node: one.error for one in between_devices(ordered, found, stores, links, 0.0)}
    assert links.calls == [("1/2/a/b", 1), ("1/2/b/d", 0)]
    assert after == {"a": "", "c": "timed out", "d": "between the devices: RuntimeError: NCCL error", "e": ""}
    assert [one.error for one in with_unknown_devices(found, stores)] == [
        "", "the exchange between the devices did not end", "timed out", "the exchange between the devices did not end",
    ]  # fmt: skip
    assert dataclasses.replace(found[0], error="") == found[0]
