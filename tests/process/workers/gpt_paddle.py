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
import paddle
from paddle import nn
from paddle.nn import functional

import edl.paddle as edl

VOCABULARY, BLOCK, WIDTH, HEADS, LAYERS, BATCH = 40, 12, 24, 3, 2, 4
TEXT = np.array([(7 * at + at * at // 5) % VOCABULARY for at in range(2000)], np.int64)


class Windows(paddle.io.Dataset[Any]):
    """Noisy windows of the text, for the loader."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        noise = random.randrange(4) + int(np.random.randint(4))
        return TEXT[index * 17 + noise : index * 17 + noise + BLOCK + 1]


class Block(nn.Layer):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiHeadAttention(WIDTH, HEADS, dropout=0.1)
        self.forward_part = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2)
        )

    def forward(self, x: Any) -> Any:
        """Add attention and feed-forward output to the residual stream."""
        mask = paddle.triu(paddle.full((x.shape[1], x.shape[1]), float("-inf")), 1)
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask)
        return x + self.forward_part(self.norm(x))


class GPT(nn.Layer):
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
seed = 1337 + edl.context().rank
paddle.seed(seed)
np.random.seed(seed)
random.seed(seed)
model = GPT()
optimizer = paddle.optimizer.AdamW(learning_rate=3e-3, parameters=model.parameters())
sampler = edl.EDLDistributedSampler(Windows(), shuffle=True, seed=5)
state = edl.State(model=model, optimizer=optimizer, sampler=sampler, step=0, random=edl.RandomState())


def epochs(loader: Any) -> Iterator[Any]:
    """The loader's batches, epoch after epoch."""
    while True:
        yield from loader


def batch(loaded: Any) -> Any:
    """Windows from the loader and, as in nanoGPT, from anywhere; some tokens are replaced."""
    starts = paddle.randint(0, len(TEXT) - BLOCK - 1, [BATCH]).numpy()
    whole = np.concatenate([loaded.numpy(), np.stack([TEXT[at : at + BLOCK + 1] for at in starts])])
    for _ in range(3):
        whole[random.randrange(len(whole)), random.randrange(BLOCK)] = np.random.randint(VOCABULARY)
    return paddle.to_tensor(whole)


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    parallel = edl.parallel(model)
    batches = edl.EDLBatchSampler(batch_size=BATCH, sampler=sampler)
    loader = edl.DataLoader(Windows(), batch_sampler=batches, num_workers=options.loader_workers)
    loaded = epochs(loader)
    path = options.folder / f"{here.node}.{here.round}.{here.rank}.{os.getpid()}.steps"
    with path.open("a", buffering=1) as log:
        while state.step < options.steps:
            whole = batch(next(loaded))
            logits = parallel(whole[:, :-1])
            loss = functional.cross_entropy(logits.reshape([-1, VOCABULARY]), whole[:, 1:].reshape([-1]))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            state.step += 1
            line = {"t": time.monotonic(), "step": state.step, **fixed, "loss": float(loss)}
            log.write(json.dumps(line) + "\n")
            state.commit()
            time.sleep(options.pause)


train(state)
