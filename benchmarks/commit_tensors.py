"""Measures what a commit of many small tensors costs compared with ``state_dict()``, in CPU time of the worker.

    python -m benchmarks.commit_tensors --framework torch

The copy goes into memory of this process, without an agent. To compare with another checkout, run this file with that
folder in ``PYTHONPATH``, in turn.
"""

from __future__ import annotations

import gc
import mmap
import statistics
import time
from collections.abc import Callable
from typing import Any

import click

from edl.wire.snapshot import Meta

ELEMENTS = 1000


def _torch(tensors: int, with_optimizer: bool) -> tuple[Any, list[Any]]:
    import torch

    from edl.torch.state import State

    model = torch.nn.ParameterDict(
        {f"layer{number}": torch.nn.Parameter(torch.ones(ELEMENTS)) for number in range(tensors)}
    )
    if not with_optimizer:
        return State(model=model), [model]
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return State(model=model, optimizer=optimizer), [model, optimizer]


def _paddle(tensors: int, with_optimizer: bool) -> tuple[Any, list[Any]]:
    import paddle

    from edl.paddle.state import State

    model: Any = paddle.nn.ParameterList([paddle.create_parameter([ELEMENTS], "float32") for _ in range(tensors)])
    if not with_optimizer:
        return State(model=model), [model]
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    loss: Any = sum(parameter.sum() for parameter in model.parameters())
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return State(model=model, optimizer=optimizer), [model, optimizer]


class Room:
    """Memory for one snapshot at a time."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def __call__(self, size: int) -> memoryview:
        if len(self._memory) < size:
            self._memory = mmap.mmap(-1, size)
        return memoryview(self._memory)[:size]


def _ms(work: Callable[[], Any]) -> float:
    begun_s = time.process_time()
    work()
    return (time.process_time() - begun_s) * 1000


def measure(state: Any, objects: list[Any], runs: int) -> tuple[list[float], list[float]]:
    """Milliseconds of ``state_dict()`` alone, and of whole commits, in turn."""
    room = Room()
    alone, commits = [], []
    for number in range(runs + 1):
        gc.collect()
        alone.append(_ms(lambda: [one.state_dict() for one in objects]))
        meta = Meta("benchmark", 1, number, 1, 0, 1, "benchmark")
        commits.append(_ms(lambda meta=meta: state._write("state", meta, room)))  # type: ignore[misc]
    return alone[1:], commits[1:]  # the first makes the layout


@click.command()
@click.option("--framework", type=click.Choice(["torch", "paddle"]), default="torch", show_default=True)
@click.option("--tensors", default="600,2000,20000", show_default=True)
@click.option("--optimizer/--no-optimizer", default=False, help="With AdamW, which adds three tensors for each.")
@click.option("--runs", default=9, show_default=True)
def main(framework: str, tensors: str, optimizer: bool, runs: int) -> None:
    """Print medians and spreads in milliseconds of CPU time."""
    for count in map(int, tensors.split(",")):
        state, objects = {"torch": _torch, "paddle": _paddle}[framework](count, optimizer)
        alone, commits = measure(state, objects, runs)
        shown = [f"{statistics.median(one):.1f} ({min(one):.1f}-{max(one):.1f})" for one in (alone, commits)]
        print(f"{framework} {count} tensors: state_dict() {shown[0]} ms, commit {shown[1]} ms", flush=True)


if __name__ == "__main__":
    main()
