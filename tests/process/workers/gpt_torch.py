"""A small GPT with dropout, on random windows and on a loader: everything in it draws random numbers."""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import edl.torch as edl

VOCABULARY, BLOCK, WIDTH, HEADS, LAYERS, BATCH = 40, 12, 24, 3, 2, 4
TEXT = torch.tensor([(7 * at + at * at // 5) % VOCABULARY for at in range(2000)])


class Windows(torch.utils.data.Dataset[Any]):
    """Noisy windows of the text, for the loader."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        noise = int(torch.randint(3, ())) + random.randrange(3) + int(np.random.randint(3))
        return TEXT[index * 17 + noise : index * 17 + noise + BLOCK + 1]


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)
        self.forward_part = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2)
        )

    def forward(self, x: Any) -> Any:
        """Add attention and feed-forward output to the residual stream."""
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.forward_part(self.norm(x))


class GPT(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Any) -> Any:
        """Logits of the next tokens."""
        return self.head(self.blocks(self.drop(self.tokens(x) + self.places.weight[: x.shape[1]])))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--loader-workers", type=int, default=0)
    return parser.parse_args()


options = read_arguments()
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
seed = 1337 + edl.context().rank
torch.manual_seed(seed)
np.random.seed(seed)
random.seed(seed)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
sampler = edl.EDLDistributedSampler(Windows(), shuffle=True, seed=5)
state = edl.State(model=model, optimizer=optimizer, sampler=sampler, step=0, random=edl.RandomState())


def epochs(loader: Any) -> Iterator[Any]:
    """The loader's batches, epoch after epoch."""
    while True:
        yield from loader


def batch(loaded: Any) -> Any:
    """Windows from the loader and, as in nanoGPT, from anywhere; some tokens are replaced."""
    starts = torch.randint(len(TEXT) - BLOCK - 1, (BATCH,))
    whole = torch.cat([loaded, torch.stack([TEXT[at : at + BLOCK + 1] for at in starts.tolist()])])
    for _ in range(3):
        whole[random.randrange(len(whole)), random.randrange(BLOCK)] = int(np.random.randint(VOCABULARY))
    return whole


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    parallel = edl.parallel(model)
    loaded = epochs(edl.DataLoader(Windows(), BATCH, sampler=sampler, num_workers=options.loader_workers))
    path = options.folder / f"{here.node}.{here.round}.{here.rank}.{os.getpid()}.steps"
    with path.open("a", buffering=1) as log:
        while state.step < options.steps:
            whole = batch(next(loaded))
            logits = parallel(whole[:, :-1])
            loss: Any = functional.cross_entropy(logits.reshape(-1, VOCABULARY), whole[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step += 1
            line = {"t": time.monotonic(), "step": state.step, **fixed, "loss": float(loss.detach())}
            log.write(json.dumps(line) + "\n")
            state.commit()
            time.sleep(options.pause)


train(state)
