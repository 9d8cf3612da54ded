"""A trainer that trains in whatever mode the job has, is slower the higher its rank, and counts what it has pushed."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

from edl.job_records import Mode
from edl.worker import trainer
from ps.client.client import PsClient
from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule

KEYS = 2000
BATCH = 256
COUNT = TableSpec("count", 4, Optimizer(UpdateRule.ADD), Initial(InitMethod.ZEROS))
EMBED = TableSpec("embed", 16, Optimizer(UpdateRule.ADAGRAD, lr=0.05))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    one = trainer.attach()
    assert one.link is not None
    pushed = np.zeros(KEYS, np.int64)
    rng = np.random.default_rng(os.getpid())
    client = PsClient.join(one.link, one.round, name=one.name, tables=[COUNT, EMBED])
    client.on_checkpoint(value=lambda: {"step": client.step})
    client.begin()
    keys = rng.zipf(1.3, BATCH) % KEYS
    with (options.folder / f"{os.getpid()}.steps").open("a", buffering=1) as log:
        while not (options.folder / "last-step").exists():
            rows = client.pull("embed", keys)
            coming = rng.zipf(1.3, BATCH) % KEYS
            client.prefetch("embed", coming)
            parts = {"count": (keys, np.ones((BATCH, 4), np.float32)), "embed": (keys, rows - 1)}
            client.push(parts, wait=bool(rng.integers(2)))
            pushed += np.bincount(keys, minlength=KEYS)
            keys = coming
            client.boundary()
            number, rank, world = one.place()
            line = {
                "t": time.monotonic(), "step": client.step, "rank": rank, "world": world, "round": number,
                "pid": os.getpid(), "node": one.seat.node,
            }  # fmt: skip
            log.write(json.dumps(line) + "\n")
            time.sleep(0.01 * rng.random() * (1 + rank))
    client.rest()
    prefetched = client.statistics["prefetched"]
    assert prefetched > BATCH or client.training.mode is Mode.GEO, prefetched
    np.save(options.folder / f"{os.getpid()}.pushed.npy", pushed)
    while not (options.folder / "read").exists():
        time.sleep(0.05)
    np.save(options.folder / f"{os.getpid()}.held.npy", client.read("count", np.arange(KEYS)))
    client.leave()


main()
