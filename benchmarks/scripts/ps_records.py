"""The trainer of ``benchmarks.ps records``: every record adds 1 to the row of its own key, and to a row that it shares.

With plain SGD and a learning rate of 1 the tables count the records. In mode sync, where gradients are averaged, the
rule ADD does that. The trainer also counts its pushes.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from data_service.loader import trainers
from data_service.loader.loader import Loader
from data_service.loader.worker_context import IndependentContext, WorkerContext
from ps.client.client import PsClient
from ps.client.frontend import part
from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule

SHARED = 97
PUSHES = TableSpec("pushes", 1, Optimizer(UpdateRule.ADD), Initial(InitMethod.ZEROS))


class Data(Loader):
    """A data set of NumPy arrays."""

    def _make_context(self) -> WorkerContext:
        return IndependentContext()

    def _tensor(self, array: Any) -> Any:
        return array


def last_epoch(folder: Path) -> int:
    """The epoch before which to stop."""
    path = folder / "epochs"
    return int(path.read_text()) if path.exists() else 1 << 30


def declared(rule: Optimizer) -> PsClient:
    """A client of the tables."""
    zeros = Initial(InitMethod.ZEROS)
    for spec in (TableSpec("own", 2, rule, zeros), TableSpec("together", 3, rule, zeros), PUSHES):
        part.declare(spec)
    client: PsClient = part.client  # type: ignore[assignment]
    return client


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--mixed", type=int, default=1)
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--no-wait", action="store_true", help="push in the background")
    parser.add_argument("--step-time", type=float, default=0.0)
    options = parser.parse_args()
    client = declared(Optimizer(UpdateRule.ADD) if options.add else Optimizer(UpdateRule.SGD, lr=1.0))
    (options.folder / f"{os.getpid()}.node").write_text(os.environ.get("EDL_NODE_ID", ""))
    books = np.memmap(options.folder / f"{os.getpid()}.books", np.int64, "w+", shape=(2,))
    times = (options.folder / f"{os.getpid()}.times").open("a", buffering=1)
    data = Data(
        "records", str(options.data / "records.arrow"), batch_size=options.batch, shard_records=500, mode="free",
        shuffle_shards=options.mixed,
    )  # fmt: skip
    while data.epoch < last_epoch(options.folder):
        (options.folder / f"{os.getpid()}.epoch").write_text(str(data.epoch))
        for number, batch in enumerate(data):
            keys = batch["id"]
            part.pull("own", keys, insert=True)
            part.collect("own", keys, np.ones((len(keys), 2), np.float32))
            part.collect("together", keys % SHARED, np.ones((len(keys), 3), np.float32))
            if number % options.accumulate == options.accumulate - 1:
                part.collect("pushes", np.zeros(1, np.int64), np.ones((1, 1), np.float32))
                books[0] += 1
                part.step(wait=not options.no_wait)
                books[1] += 1
            times.write(f"{time.monotonic()}\n")
            time.sleep(options.step_time)
    trainers.settle()
    part.rest()
    (options.folder / f"{os.getpid()}.rests").touch()
    while not (options.folder / "read").exists():
        time.sleep(0.05)
    partial = options.folder / f"{os.getpid()}.partial.npz"
    own, together = client.read("own", np.arange(options.records)), client.read("together", np.arange(SHARED))
    pushes = client.read("pushes", np.zeros(1, np.int64))
    np.savez(partial, own=own, together=together, pushes=pushes, epochs=data.epoch)
    partial.replace(options.folder / f"{os.getpid()}.held.npz")
    part.leave()


main()
