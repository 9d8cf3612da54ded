"""Measures what two workers send over the network: averaged gradients against local steps, for the same inner steps.

    python -m benchmarks.local_steps --steps 96 --million 1

Two workers of one node, with gloo on the loopback interface. Bytes are those that the kernel counts on the sockets of a
worker while it trains, headers excluded.
"""

from __future__ import annotations

import os
import socket
import statistics
from typing import Any

import click

from edl.launch.api import LaunchConfig, elastic_launch

_BYTES_ACKED = slice(120, 128)
"""Where ``struct tcp_info`` of Linux has them, since 4.1."""
WAYS = {"DDP": (0, ""), "H=8": (8, ""), "H=32": (32, ""), "H=32, bfloat16": (32, "bfloat16")}
"""Inner steps of an outer step, 0 for averaged gradients, and the type on the wire."""


def sent_bytes() -> int:
    """Bytes that peers have received through the TCP connections of this process."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += int.from_bytes(info[_BYTES_ACKED], "little")
        except OSError:  # no socket, or not connected
            continue
    return total


def train(every: int, wire: str, steps: int, parameters: int) -> int:
    """In each worker: train, and return the bytes that it sent meanwhile."""
    import torch

    import edl.torch as edl

    torch.manual_seed(0)
    width = max(8, round(parameters**0.5))
    model = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = edl.State(model=model, step=0)
    if every:
        state = edl.State(model=model, step=0, outer=edl.DiLoCo(model, every=every, wire=wire))

    @edl.run
    def loop(state: Any) -> int:
        parallel = model if every else edl.parallel(model)
        generator = torch.Generator().manual_seed(edl.context().rank)
        before = sent_bytes()
        for _ in range(steps):
            optimizer.zero_grad()
            parallel(torch.randn(8, width, generator=generator)).pow(2).mean().backward()
            optimizer.step()
            if not every or state.outer.step():
                state.step += 1
                state.commit()
        return sent_bytes() - before

    found: int = loop(state)
    return found


@click.command()
@click.option("--steps", default=96, show_default=True, help="Inner steps; a multiple of 32.")
@click.option("--million", default=1.0, show_default=True, help="Parameters of the model, in millions.")
def main(steps: int, million: float) -> None:
    """Print the bytes per worker and the ratio to DDP."""
    if steps % 32:
        raise click.BadParameter(f"{steps} is no multiple of 32", param_hint="--steps")
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2)
    base = 0.0
    click.echo(f"{'':<16}{'MB sent per worker':>20}{'of DDP':>12}")
    for name, (every, wire) in WAYS.items():
        sent = elastic_launch(config, train)(every, wire, steps, int(million * 1e6))
        mean = statistics.fmean(sent.values())
        base = base or mean
        click.echo(f"{name:<16}{mean / 1e6:>20.2f}{'1 / ' + format(base / mean, '.1f'):>12}")


if __name__ == "__main__":
    main()
