"""A trainer that counts records: for each that it reads it adds one to the row of the record's number.

When all epochs are over every row must hold their number, whatever was killed and restored meanwhile.
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
from edl.worker import trainer
from ps.client.client import PsClient
from ps.client.frontend import part
from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule

COUNT = TableSpec("count", 2, Optimizer(UpdateRule.ADD), Initial(InitMethod.ZEROS))


class Data(Loader):
    """A ``Data`` class that returns numpy arrays."""

    def _make_context(self) -> WorkerContext:
        return IndependentContext()

    def _tensor(self, array: Any) -> Any:
        return array


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.01)
    options = parser.parse_args()
    part.declare(COUNT)
    client: PsClient = part.client  # type: ignore[assignment]
    log = (options.folder / f"{os.getpid()}.log").open("a", buffering=1)
    log.write(f"begins at step {client.step}, from {part.restored.get('run', 'nothing')}\n")
    data = Data("records", options.data, batch_size=16, shard_records=100, mode="free")
    while data.epoch < options.epochs:
        for batch in data:
            part.collect("count", batch["id"], np.ones((len(batch["id"]), 2), np.float32))
            part.step()
            time.sleep(options.pause)
    trainers.settle()
    part.rest()
    (options.folder / f"{trainer.attach().name.replace('/', '-')}.rests").touch()
    while not (options.folder / "read").exists():
        time.sleep(0.05)
    found = client.read("count", np.arange(options.records))
    np.save(options.folder / f"{os.getpid()}.partial.npy", found)
    os.replace(options.folder / f"{os.getpid()}.partial.npy", options.folder / f"{os.getpid()}.counted.npy")
    part.leave()


main()
