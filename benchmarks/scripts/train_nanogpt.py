"""A small GPT in plain torch under DistributedDataParallel, in the manner of nanoGPT: tokens of a file in memory,
learning rate by step, and a checkpoint in ``--out_dir`` that rank 0 writes and each rank reads."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scripts.trainer_parts import Log

WIDTH, HEADS, LAYERS, BLOCK, BATCH = 32, 2, 2, 32, 8


class Block(nn.Module):
    """Attention to what is before, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Returns the loss of the next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.tokens(x) + self.places.weight))
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def arguments() -> argparse.Namespace:
    """The script's own command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="the tokens: bytes")
    parser.add_argument("--out_dir", type=Path, default=Path("out"))
    parser.add_argument("--init_from", choices=("scratch", "resume"), default="scratch")
    parser.add_argument("--eval_interval", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--workdir", type=Path, required=True, help="step logs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=10.0, help="sleep per step")
    return parser.parse_args()


def batch(data: np.memmap, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pieces of the file, and the same one token later."""
    begins = torch.randint(len(data) - BLOCK, (BATCH,), generator=generator).tolist()
    rows = torch.stack([torch.from_numpy(data[begin : begin + BLOCK + 1].astype(np.int64)) for begin in begins])
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    args = arguments()
    log = Log(args)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        args.out_dir.mkdir(exist_ok=True)
    torch.manual_seed(1337 + rank)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    step, kept = 0, args.out_dir / "ckpt.pt"
    if args.init_from == "resume" and kept.exists():
        saved = torch.load(kept, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["iter_num"]
    parallel = DistributedDataParallel(model)
    log.world(rank, world)
    data = np.memmap(args.data, dtype=np.uint8, mode="r")
    generator = torch.Generator().manual_seed(step * world + rank)
    while step < args.steps:
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps)))
        loss = parallel(*batch(data, generator))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        log.step(step)
        if rank == 0 and step % args.eval_interval == 0:
            draft = kept.with_suffix(f".{os.getpid()}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step}, draft)
            draft.replace(kept)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
