"""Measures whole pulls and pushes of 100 000 keys: tables behind edl's transport against the same tables behind gRPC
unary.

    python -m benchmarks.ps e2e [--dims=16,64] [--seconds=3]

Client and server are two processes; the server's tables, kernels and optimizer (Adagrad) are the same for both. Methods
take turns. "pull" reads rows into an array of the client; "push" sends keys and gradients, which are applied before the
answer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import click
import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.ps.rpc import Client, Room, Work, clients, cpu_s, server
from ps.rows import RowOp, TablePush, TrainerPush
from ps.spec import Optimizer, TableSpec, UpdateRule
from ps.store.store import RowStore

KEYS = 100_000
ROUNDS = 6
BATCHES = 8
METHODS = ("ours, TCP", "ours, unix socket", "ours, unix socket, memory lent", "gRPC unary")
BARS = {16: 1.3, 64: 2.0}
BASE = "gRPC unary"


def work(dims: str, rows: str) -> Work:
    """Handle ``pull D``: rows for the keys in the body; or ``push D``: keys, then gradients."""
    store = RowStore()
    store.warm()
    for dim in map(int, dims.split(",")):
        store.define(TableSpec(f"t{dim}", dim, optimizer=Optimizer(UpdateRule.ADAGRAD, lr=0.01)))
        for begin in range(0, int(rows), KEYS):
            keys = np.arange(begin, min(begin + KEYS, int(rows)), dtype=np.int64)
            store.pull(f"t{dim}", keys, np.empty((len(keys), dim), np.float32), step=1)
    seq = iter(range(1, 1 << 62))

    def answer(head: str, body: memoryview, room: Room) -> Sequence[Any]:
        kind, _, dim = head.partition(" ")
        keys = np.frombuffer(body, np.int64, KEYS)
        if kind == "pull":
            out = np.frombuffer(room(KEYS * int(dim) * 4), np.float32).reshape(KEYS, int(dim))
            store.pull(f"t{dim}", keys, out, step=1)
            return [out]
        grads = np.frombuffer(body, np.float32, offset=keys.nbytes).reshape(KEYS, int(dim))
        store.push([TrainerPush(1, next(seq), (TablePush(f"t{dim}", keys, grads, RowOp.GRAD),))], step=1)
        return []

    return answer


class Tally:
    """The results of one method."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.client_cpu = self.server_cpu = 0.0

    def run(self, client: Client, load: Load, pull: bool, seconds: float, process: psutil.Process) -> None:
        cpu, theirs = time.process_time(), cpu_s(process)
        until = time.perf_counter() + seconds
        while (begun := time.perf_counter()) < until:
            keys = load.keys[len(self.times) % BATCHES]
            if pull:
                got = client.call(f"pull {load.dim}", [keys], load.out)
                if np.frombuffer(got, np.float32, 1)[0] != np.frombuffer(got, np.float32, 1)[0]:
                    raise AssertionError("not a number")
            else:
                client.call(f"push {load.dim}", [keys, load.grads], None)
            self.times.append(time.perf_counter() - begun)
        self.client_cpu += time.process_time() - cpu
        self.server_cpu += cpu_s(process) - theirs


class Load:
    """The requests: batches of uniform keys."""

    def __init__(self, dim: int, rows: int) -> None:
        rng = np.random.default_rng(dim)
        self.dim = dim
        self.keys: list[NDArray[np.int64]] = [rng.integers(0, rows, KEYS) for _ in range(BATCHES)]
        self.grads = rng.standard_normal((KEYS, dim)).astype(np.float32)
        self.out = np.zeros((KEYS, dim), np.float32)


def compare(load: Load, pull: bool, seconds: float, chosen: dict[str, Client], process: psutil.Process) -> None:
    tallies = {name: Tally() for name in chosen}
    for turn in range(ROUNDS + 1):
        for name, client in chosen.items():
            if turn == 0:
                Tally().run(client, load, pull, seconds / 10, process)
            else:
                tallies[name].run(client, load, pull, seconds / ROUNDS, process)
    base = statistics.median(tallies[BASE].times) if BASE in tallies else float("nan")
    for name, tally in tallies.items():
        p50, keys = statistics.median(tally.times), KEYS * len(tally.times) / 1e6
        what = f"dim {load.dim:3} {'pull' if pull else 'push'} {name:32}"
        rate = f"{p50 * 1e3:8.2f} ms {KEYS / p50 / 1e6:7.2f} M keys/s"
        cpu = f"{keys / max(tally.server_cpu, 1e-9):8.2f} {keys / max(tally.client_cpu, 1e-9):8.2f}"
        bar = f"  (bar {BARS[load.dim]:g}x)" if load.dim in BARS and name != BASE else ""
        print(f"{what}{rate} {cpu} {base / p50:6.2f}x{bar}")


@click.command("e2e")
@click.option("--dims", default="16,64", show_default=True)
@click.option("--rows", default=1_000_000, show_default=True, help="Of each table.")
@click.option("--seconds", default=3.0, show_default=True, help="For each method, dimension and direction.")
@click.option("--only", default="", help="Only methods whose name has this in it.")
def main(dims: str, rows: int, seconds: float, only: str) -> None:
    """Compare tables behind edl's transport and behind gRPC."""
    with server("benchmarks.ps.e2e", dims, str(rows)) as (ready, process):
        chosen = {name: client for name, client in clients(ready).items() if name in METHODS and only in name}
        print("p50, its rate, M keys per CPU second of server and client, speed against gRPC unary")
        for dim in map(int, dims.split(",")):
            load = Load(dim, rows)
            for pull in (True, False):
                compare(load, pull, seconds, chosen, process)
        for client in chosen.values():
            client.close()


if __name__ == "__main__":
    main()
