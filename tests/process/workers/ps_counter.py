"""A trainer that counts: each push adds one to each of its keys, on the pservers and in a file of its own.

The file is mapped memory, so what is in it survives SIGKILL. ``acked`` holds what was acknowledged, ``begun`` what was
pushed, acknowledged or not: in the end the pservers must hold something between the two, and with no trainer killed
exactly ``acked``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

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
    parser.add_argument("--pause", type=float, default=0.03)
    options = parser.parse_args()
    one = trainer.attach()
    assert one.link is not None
    books = np.memmap(options.folder / f"{os.getpid()}.books", np.int64, "w+", shape=(2, KEYS))
    acked, begun = books[0], books[1]
    rng = np.random.default_rng(os.getpid())
    client = PsClient.join(one.link, one.round, name=one.name, tables=[COUNT, EMBED])
    client.begin()
    with (options.folder / f"{os.getpid()}.steps").open("a", buffering=1) as log:
        while not (options.folder / "last-step").exists():
            keys = rng.zipf(1.3, BATCH) % KEYS
            rows = client.pull("embed", keys)
            pushed = np.bincount(keys, minlength=KEYS)
            begun += pushed
            client.push(
                {"count": (keys, np.ones((BATCH, 4), np.float32)), "embed": (keys, (rows - 1).astype(np.float32))}
            )
            acked += pushed
            client.boundary()
            number, rank, world = one.place()
            line = {
                "t": time.monotonic(), "step": client.step, "rank": rank, "world": world, "round": number,
                "pid": os.getpid(), "node": one.seat.node,
            }  # fmt: skip
            log.write(json.dumps(line) + "\n")
            time.sleep(options.pause)
    client.rest()
    (options.folder / f"{os.getpid()}.rests").touch()
    while not (options.folder / "read").exists():
        time.sleep(0.05)
    counted = client.read("count", np.arange(KEYS))
    np.save(options.folder / f"{os.getpid()}.counted.npy", counted)
    client.leave()


main()
