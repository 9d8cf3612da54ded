"""A trainer whose every loss is determined: the same rows, the same batches, one thread.

What it does in each step is one line of ``FOLDER/PID.losses``: the step, the loss as its exact bits, and which records
of the data set it was given. The batches follow from the step's number; the records show where the data set goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import edl.torch as edl
import edl.torch.ps as ps

BATCH = 64


class Model(nn.Module):
    """Embeddings with three optimizers, and a network over them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.single = ps.Embedding("single", 1, optimizer=ps.Adam(1e-2), initial=ps.Zeros(), combiner="sum")
        self.wide = ps.Embedding("wide", 1, optimizer=ps.Ftrl(lr=0.05), initial=ps.Zeros(), combiner="sum")
        self.factors = ps.Embedding("factors", dim, optimizer=ps.Adagrad(lr=0.05), initial=ps.Normal(0.1))
        self.deep = nn.Sequential(nn.Linear(6 * dim, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        logit: torch.Tensor = self.single(keys) + self.wide(keys) + self.deep(self.factors(keys).flatten(1))
        return logit.squeeze(-1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(step)
    keys = rng.zipf(1.2, (BATCH, 6)) % 5000 + 5000 * np.arange(6)
    return torch.from_numpy(keys), torch.from_numpy((keys.sum(axis=1) % 3 == 0).astype(np.float32))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--files", required=True)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--save-at", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the whole job")
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = Model(options.dim)
    ps.Dense(model, optimizer=ps.Adam(1e-2))
    data = iter(edl.Data("records", options.files, batch_size=4, seed=3, shard_records=40, mode="free"))
    step = int(ps.restored().get("step", 0))
    ps.on_save(lambda: {"next": step})
    with (options.folder / f"{os.getpid()}.losses").open("a", buffering=1) as log:
        while step < options.steps:
            records = [int(one) for one in next(data)["id"]]
            keys, labels = batch(step)
            loss = nn.functional.binary_cross_entropy_with_logits(model(keys), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            step += 1
            ps.step()
            told = {
                "step": step - 1,
                "loss": float(loss.item()).hex(),
                "records": records,
                "from": ps.restored().get("run", ""),
            }
            log.write(json.dumps(told) + "\n")
            if step in options.save_at:
                (options.folder / f"saved-{step}").write_text(ps.save())
            time.sleep(options.pause)
    ps.leave()


main()
