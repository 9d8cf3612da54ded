"""Measures steps of a DeepFM against one pserver process: one request per table, and one request in each direction.

    python -m benchmarks.ps steps

39 keys per example in two tables (dim 8 and 1, Adam) and a network of 64 and 32 units, whose parameters are in a dense
table (Adam). The two ways take turns, on the same batches, in one trainer with one thread.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from edl.job_records import Training
from ps.client.client import PsClient
from ps.client.dense import DenseLayout
from ps.net.caller import FrameCaller
from ps.protocol import messages
from ps.protocol.frames import Frame, FrameOp
from ps.protocol.handshake import MASTER, CallerHello
from ps.spec import BUCKETS, Optimizer, TableSpec, UpdateRule
from ps.store.kernels import chosen
from ps.store.kernels.compiling import compile_all

FIELDS, WIDTH, NUMBERS, DEADLINE_S = 39, 8, 13, 60.0
ADAM = Optimizer(UpdateRule.ADAM, lr=1e-3)
SHAPES = {"a": (FIELDS * WIDTH + NUMBERS, 64), "b": (64, 32), "c": (32, 1)}
BLOCKS = DenseLayout(SHAPES, 256)
TABLES = (TableSpec("factors", WIDTH, ADAM), TableSpec("single", 1, ADAM), BLOCKS.spec("dense", ADAM))
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Place:
    """The address of the pserver."""

    name: str
    host: str
    port: int
    path: str
    machine: str


class Pserver:
    """A process that owns all buckets; this process acts as its launcher and Master. Both have compiled kernels."""

    def __init__(self, tables: tuple[TableSpec, ...] = TABLES) -> None:
        if chosen() == "numba":
            compile_all()  # otherwise the first rounds would measure the slower kernels, and the compiler next to them
        self.tables, self.secret = tables, secrets.token_hex(16)
        command = [sys.executable, "-m", "ps", "server", "--name=a", "--job=steps"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"secret": self.secret}) + "\n")
        self.process.stdin.flush()
        told = json.loads(self.process.stdout.readline())
        self.place = Place("a", "127.0.0.1", told["port"], told["path"], told["machine"])
        server = messages.PserverAddress(1, "a", "127.0.0.1", told["port"], told["path"], told["machine"])
        nobody = messages.pack([0] * BUCKETS)
        self.placement = messages.PlacementMap(1, 1, (server,), messages.pack([1] * BUCKETS), nobody, nobody)
        self._order(nobody)

    def _order(self, nobody: str) -> None:
        hello = CallerHello(MASTER, name="steps", token=1)
        self._line = FrameCaller.connect(self.place, hello, secret=self.secret, deadline_s=DEADLINE_S)
        followed: list[Frame] = []
        self._line.heard = followed.append
        orders = messages.Orders(1, 1, self.placement, 1, (), Training(), self.tables,
                              since=messages.pack([1] * BUCKETS, "i"), giver=nobody)  # fmt: skip
        self._line.send(FrameOp.CONTROL, b"", [messages.encode(orders).encode()], deadline_s=DEADLINE_S)

    def client(self, number: int) -> PsClient:
        """A trainer's client."""
        return PsClient.direct((), tables=self.tables, secret=self.secret, placement=self.placement, number=number)

    def stop(self) -> None:
        """Stop the process by closing its launcher's connection."""
        self._line.close()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def one_by_one(
    client: PsClient, keys: NDArray[np.int64], model: Callable[..., Mapping[str, Any]], at: Floats
) -> Floats:
    """One request for each table, one for the push, one for the dense values."""
    rows = {name: client.pull(name, keys) for name in ("factors", "single")}
    client.push(model(keys, rows, at))
    return client.pull("dense", BLOCKS.keys, insert=False)


def together(client: PsClient, keys: NDArray[np.int64], model: Callable[..., Mapping[str, Any]], at: Floats) -> Floats:
    """One request for all rows, and one for the push, which also returns the dense values."""
    rows = client.pull_many({"factors": keys, "single": keys})
    return client.push_and_pull(model(keys, rows, at), ["dense"])["dense"]


def deepfm(keys: NDArray[np.int64], rows: Mapping[str, Floats], dense: Floats) -> dict[str, tuple[Any, Any]]:
    """Gradients of the mean logistic loss; labels are derived from the keys."""
    import torch

    vectors, single = (torch.from_numpy(rows[name]).requires_grad_() for name in ("factors", "single"))
    layers = {name: torch.from_numpy(value.copy()).requires_grad_() for name, value in BLOCKS.unpack(dense).items()}
    numbers = torch.zeros(len(keys), NUMBERS)
    pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
    hidden = torch.relu(torch.relu(torch.cat([vectors.flatten(1), numbers], 1) @ layers["a"]) @ layers["b"])
    logit = single.sum((1, 2)) + pairs + (hidden @ layers["c"]).squeeze(-1)
    labels = torch.from_numpy((keys[:, 0] % 3 == 0).astype(np.float32))
    torch.nn.functional.binary_cross_entropy_with_logits(logit, labels).backward()  # type: ignore[no-untyped-call]
    found = {name: (keys, _grad(one)) for name, one in (("factors", vectors), ("single", single))}
    grads = {name: _grad(one) for name, one in layers.items()}
    return {**found, "dense": (BLOCKS.keys, BLOCKS.pack(grads))}


def _grad(tensor: Any) -> Floats:
    found: Floats = tensor.grad.numpy()
    return found


def run(
    client: PsClient, server: psutil.Process, batch: int, rounds: int, steps: int
) -> tuple[list[list[float]], list[float]]:
    """Examples per second of each round, and microseconds of CPU time per example (both processes), by method."""
    generator = np.random.default_rng(1)
    at = client.pull("dense", BLOCKS.keys, insert=False)
    rates: list[list[float]] = [[], []]
    cpu = [0.0, 0.0]

    def spent() -> float:
        return time.process_time() + sum(server.cpu_times()[:2])

    for number in range(rounds + 1):
        work = [(generator.zipf(1.2, (batch, FIELDS)) % 1_000_003).astype(np.int64) for _ in range(steps)]
        for turn in (0, 1):
            which = (number + turn) % 2
            start, before = time.perf_counter(), spent()
            for keys in work:
                at = (one_by_one, together)[which](client, keys, deepfm, at)
            if number:  # the first round is a warm-up
                rates[which].append(batch * steps / (time.perf_counter() - start))
                cpu[which] += spent() - before
    return rates, [1e6 * one / (rounds * steps * batch) for one in cpu]


@click.command("steps")
@click.option("--batches", default="64,512,4096", show_default=True, help="Examples in a step.")
@click.option("--rounds", default=9, show_default=True)
def main(batches: str, rounds: int) -> None:
    """Examples per second of a DeepFM, with four round trips per step and with two."""
    import torch

    torch.set_num_threads(1)
    table = Table(title=f"DeepFM, one trainer, one pserver, load {report.load_average():.1f}")
    for heading in ("examples in a step", "4 trips: examples/s", "2 trips: examples/s", "ratio (quartiles)", "CPU us"):
        table.add_column(heading, justify="right")
    pserver = Pserver()
    try:
        client, server = pserver.client(1), psutil.Process(pserver.process.pid)
        for batch in map(int, batches.split(",")):
            (before, after), cpu = run(client, server, batch, rounds, max(3, 8192 // batch))
            low, middle, high = statistics.quantiles([b / a for a, b in zip(before, after, strict=True)], n=4)
            shown = (f"{statistics.median(one):,.0f}" for one in (before, after))
            ratio = f"{middle:.2f} ({low:.2f} - {high:.2f})"
            table.add_row(f"{batch:,}", *shown, ratio, f"{cpu[0]:.1f} / {cpu[1]:.1f}")
            report.progress(f"{batch} examples: {middle:.2f}")
        client.close()
    finally:
        pserver.stop()
    Console(width=120).print(table)
