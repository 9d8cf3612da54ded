"""FSDP2 with torch.distributed.checkpoint, as one writes it for torchrun: shards saved at each step, and resumed.

``--kill RANK:STEP`` has that rank kill itself in the first round, once the step is saved. At the end rank 0 compares
with the same training on a model that was never split or interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 6


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(step: int) -> torch.Tensor:
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(step))


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> float:
    loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


class Progress:
    """Model, optimizer and step, as one Stateful that each rank saves its shards of."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def whole(model: nn.Module) -> list[float]:
    """All parameters, gathered from all ranks."""
    parts = [
        parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter for parameter in model.parameters()
    ]
    return torch.cat([part.detach().flatten() for part in parts]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kill", default="", metavar="RANK:STEP")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, _ = build()
    first, *_ = model.children()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    progress = Progress(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    saved = sorted(folder for folder in options.folder.glob("step-*") if (folder / ".metadata").exists())
    if saved:
        load({"progress": progress}, checkpoint_id=saved[-1])
    began_after = progress.step
    while progress.step < STEPS:
        advance(model, progress.optimizer, batch(progress.step)[rank::world])
        progress.step += 1
        save({"progress": progress}, checkpoint_id=options.folder / f"step-{progress.step}")
        if options.kill == f"{rank}:{progress.step}" and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    weights = whole(model)
    lone, optimizer = build()
    for step in range(STEPS):
        advance(lone, optimizer, batch(step))
    torch.testing.assert_close(torch.tensor(weights), torch.tensor(whole(lone)))
    seen = {"rank": rank, "world": world, "attempt": attempt, "began_after": began_after, "weights": weights}
    (options.folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
