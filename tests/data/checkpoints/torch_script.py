"""Trains three steps and saves. All values are small multiples of powers of two, so that every torch has the same."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import edl.torch as edl

STEPS = 3


def model_and_optimizer() -> dict[str, Any]:
    model = nn.Linear(4, 6)
    with torch.no_grad():
        model.weight.copy_(torch.arange(24.0).view(6, 4))
        model.bias.copy_(torch.arange(6.0))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)}


def sharded(mesh: DeviceMesh) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    made = model_and_optimizer()
    model = made["model"]
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)}


def advance(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step; the same on every worker, so averages of gradients change nothing."""
    optimizer.zero_grad()
    model(torch.tensor([[1.0, 2.0, 0.5, -1.0]])).sum().backward()
    optimizer.step()


@edl.run
def train(state: edl.State) -> None:
    while state.step < STEPS:
        advance(state.model, state.optimizer)
        state.step += 1
        state.seen["steps"].append(state.step)
        (state.save if state.step == STEPS else state.commit)()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sharded", action="store_true")
    values: dict[str, Any] = {"step": 0, "seen": {"steps": [], "name": "größe", "limit": None}}
    if parser.parse_args().sharded:
        train(edl.State(build=sharded, **values))
    else:
        train(edl.State(**model_and_optimizer(), **values))
