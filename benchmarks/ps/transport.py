"""Measures a pull and a push without tables: edl's transport over TCP and unix sockets against gRPC.

    python -m benchmarks.ps transport [--seconds=1]

"pull" sends bytes that exist already, "fill" bytes that are written first, as rows are, and "push" receives them.
Client and server are two processes. Methods take turns, so that other load of the machine affects all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import click
import numpy as np
import psutil

from benchmarks.ps.rpc import Client, Room, Work, clients, cpu_s, server

SIZES = {"64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24}
ROUNDS = 5
SENT, OUT = (np.full(max(SIZES.values()), number, np.uint8) for number in (7, 8))


def work() -> Work:
    """Handle ``pull N``: N bytes in memory; ``fill N``: N bytes that are written first, as rows are gathered; ``push``:
    no bytes."""
    content = np.random.default_rng(0).integers(0, 256, max(SIZES.values()), np.uint8)
    prepared = {size: content[:size].tobytes() for size in SIZES.values()}

    def answer(head: str, body: memoryview, room: Room) -> Sequence[Any]:
        kind, _, size = head.partition(" ")
        if kind == "pull":
            return [prepared[int(size)]]
        if kind == "fill":
            out = np.frombuffer(room(int(size)), np.uint8)
            np.copyto(out, content[: int(size)])
            return [out]
        return []

    return answer


class Tally:
    """The results of one method with one size in one direction."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu = 0.0

    def run(self, client: Client, size: int, way: str, seconds: float, process: psutil.Process) -> None:
        sent, out = SENT[:size], OUT[:size]
        head, pull = f"{way} {size}", way != "push"
        cpu = time.process_time() + cpu_s(process)
        until = time.perf_counter() + seconds
        while (begun := time.perf_counter()) < until:
            client.call(head, [] if pull else [sent], out if pull else None)
            self.times.append(time.perf_counter() - begun)
        self.cpu += time.process_time() + cpu_s(process) - cpu

    def show(self, name: str, label: str, way: str, size: int, base: float) -> float:
        p50 = statistics.median(self.times)
        per_gb = self.cpu / (len(self.times) * size / 1e9)
        ratio = f"{p50 / base:6.2f}" if base else "     1"
        rate = f"{p50 * 1e6:9.0f} us {size / p50 / 1e9:7.2f} GB/s {per_gb:7.2f} CPU s/GB"
        print(f"{label:>6} {way:5}{name:32}{rate} {ratio}")
        return p50


@click.command("transport")
@click.option("--seconds", default=1.0, show_default=True, help="For each method, size and direction.")
@click.option("--only", default="", help="Only methods whose name has this in it.")
def main(seconds: float, only: str) -> None:
    """Compare edl's transport and gRPC without tables."""
    with server("benchmarks.ps.transport") as (ready, process):
        chosen = {name: client for name, client in clients(ready).items() if only in name}
        print("p50 of a call, the rate and CPU of both sides that go with it; last column: p50 against gRPC unary")
        for label, size in SIZES.items():
            for way in ("pull", "fill", "push"):
                tallies = {name: Tally() for name in chosen}
                for turn in range(ROUNDS + 1):
                    for name, client in chosen.items():
                        if turn == 0:
                            Tally().run(client, size, way, seconds / 10, process)
                        else:
                            tallies[name].run(client, size, way, seconds / ROUNDS, process)
                base = statistics.median(tallies["gRPC unary"].times) if "gRPC unary" in tallies else 0.0
                for name, tally in tallies.items():
                    tally.show(name, label, way, size, base)
        for client in chosen.values():
            client.close()


if __name__ == "__main__":
    main()
