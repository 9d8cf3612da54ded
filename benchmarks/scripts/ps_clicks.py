"""The trainer of ``benchmarks.ps chaos``: DeepFM of examples/07-click-through, which counts its pushes.

With the gradients of each step it sends a one for each counter of the step, to a table whose rule is to add. The
numbers of pushed and acknowledged steps are in mapped memory, whose file survives when the process is killed.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from clicks import auc, features, read  # type: ignore[import-not-found] # of the example
from models_torch import DeepFM  # type: ignore[import-not-found]
from torch import nn

import edl.torch as edl
import edl.torch.ps as ps
from ps.client.frontend import part
from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule

COUNTERS = 4096
COUNT = TableSpec("count", 2, Optimizer(UpdateRule.ADD), Initial(InitMethod.ZEROS))
ONES = np.ones((64, 2), np.float32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--step-time", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    ps.init(COUNT)
    model = DeepFM()
    ps.Dense(model, optimizer=ps.Adam(2e-3))
    clicks = edl.Data(
        "clicks", f"{options.data}/train-*.arrow", batch_size=options.batch, seed=1, shard_records=2048, mode="free",
        transform=features,
    )  # fmt: skip
    _train(model, clicks, options)
    ps.rest()
    (options.folder / f"{os.getpid()}.rests").touch()
    while not (options.folder / "measure").exists():
        time.sleep(0.05)
    if (options.folder / "measure").read_text() == str(os.getpid()):
        ps.refresh()
        np.save(options.folder / "held.npy", ps.client().pull("count", np.arange(COUNTERS), insert=False))
        (options.folder / "auc").write_text(f"{_measure(model, options.data / 'test.arrow'):.6f}\n")
    ps.leave()


def _train(model: nn.Module, clicks: edl.Data, options: argparse.Namespace) -> None:
    books = np.memmap(options.folder / f"{os.getpid()}.books", np.int64, "w+", shape=(2, COUNTERS))
    rng = np.random.default_rng(os.getpid())
    with (options.folder / f"{os.getpid()}.times").open("a", buffering=1) as log:
        while clicks.epoch < 1:
            for batch in clicks:
                loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
                loss.backward()  # type: ignore[no-untyped-call]
                keys = rng.integers(0, COUNTERS, len(ONES))
                pushed = np.bincount(keys, minlength=COUNTERS)
                part.collect("count", keys, ONES)
                books[0] += pushed
                ps.step()
                books[1] += pushed
                log.write(f"{time.monotonic()}\n")
                time.sleep(options.step_time)


def _measure(model: nn.Module, test: Path) -> float:
    model.eval()
    scores, labels = [], []
    with torch.no_grad():
        for batch in read(str(test), 8192):
            scores.append(model({name: torch.from_numpy(array) for name, array in batch.items()}).numpy())
            labels.append(batch["label"])
    return float(auc(np.concatenate(scores), np.concatenate(labels)))


main()
