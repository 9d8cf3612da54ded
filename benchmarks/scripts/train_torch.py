"""An ordinary DistributedDataParallel script: a small MLP on gloo, or on NCCL if there is a card, with checkpoints and
resume. Uses no launcher's library.

The only additions are the step log and a broadcast that gives each world an id for it.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scripts.ballast import hold
from benchmarks.scripts.card import device
from benchmarks.scripts.sized_model import sized_model
from benchmarks.scripts.step_writer import StepWriter

CHECKPOINT_EVERY = 5


def arguments(parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """The script's own command line, and what ``parser`` knows besides."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--workdir", type=Path, required=True, help="step logs and the checkpoint")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=10.0, help="sleep per step")
    parser.add_argument("--megabytes", type=int, default=0, help="of parameters; 0: a tiny model")
    parser.add_argument("--ballast-gigabytes", type=float, default=0.0, help="memory to hold besides")
    return parser.parse_args()


def load(path: Path, model: nn.Module) -> int:
    """Restore the model; returns the number of steps that it has been trained for, 0 without a checkpoint."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    return int(saved["step"])


def save(path: Path, model: nn.Module, step: int) -> None:
    """Replace the checkpoint atomically, so that a kill never leaves half a file."""
    draft = path.with_suffix(f".{os.getpid()}")
    torch.save({"model": model.state_dict(), "step": step}, draft)
    os.replace(draft, path)


def main() -> None:
    args = arguments()
    log = StepWriter(args.workdir)
    torch.set_num_threads(1)
    ballast = hold(args.ballast_gigabytes)
    where = device()
    dist.init_process_group("gloo" if where.type == "cpu" else "cpu:gloo,cuda:nccl")
    train(args, log, where)
    del ballast
    dist.destroy_process_group()


def train(args: argparse.Namespace, log: StepWriter, where: torch.device) -> None:
    """Go on from the checkpoint in the process group that exists, to the end."""
    rank, world = dist.get_rank(), dist.get_world_size()

    model = sized_model(args.megabytes).to(where)
    checkpoint = args.workdir / "checkpoint.pt"
    begin = load(checkpoint, model) if rank == 0 else 0
    common = torch.tensor([time.monotonic_ns(), begin])
    dist.broadcast(common, src=0)
    formed, begin = (int(value) for value in common)
    log.group(rank, world, formed)

    parallel = DistributedDataParallel(model)  # broadcasts rank 0's weights
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for step in range(begin + 1, args.steps + 1):
        inputs = torch.randn(16, 32, generator=generator).to(where)
        loss = parallel(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.step(step)
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            save(checkpoint, model, step)
        time.sleep(args.pause_ms / 1000)


if __name__ == "__main__":
    main()
