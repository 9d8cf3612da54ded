"""Trains on an ``edl.torch.Data``, and writes down which records each commit contains.

Lines are written before the collective of their step, so a commit that any worker has made has the lines of all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import edl.torch as edl
from benchmarks.scripts.soak_parts import StepLog
from edl.worker import session


def arguments() -> argparse.Namespace:
    """The script's own command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="logs, and the file epochs")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds to sleep after each step")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    return parser.parse_args()


args = arguments()
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
data = edl.Data("train", batch_size=8, shard_records=40, tail="join")
state = edl.State(model=model, optimizer=optimizer, data=data)


def epochs() -> int:
    """The number of epochs, once it is known."""
    file = args.folder / "epochs"
    return int(file.read_text()) if file.exists() else sys.maxsize


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    seat = session.current().seat
    assert seat is not None
    log = StepLog(args.folder, here.rank, here.world_size, here.node, here.round)
    path = args.folder / f"{here.node}.{here.round}.{here.rank}.{os.getpid()}.records"
    parallel = edl.parallel(model)
    with path.open("a", buffering=1) as records:
        began = {"era": seat.era, "from_era": seat.restore_era, "from_commit": seat.restore_commit}
        records.write(json.dumps(began) + "\n")
        while data.epoch < epochs():
            for batch, share in data.shares():
                mine = batch["id"].tolist() if share.samples else []
                line = {"era": seat.era, "commit": state.commits + 1, "epoch": data.epoch, "records": mine}
                records.write(json.dumps(line) + "\n")
                optimizer.zero_grad()
                loss = parallel(batch["x"][:, None]).square().mean() * (share.weight * here.world_size)
                loss.backward()
                optimizer.step()
                log.step(state.commits + 1)
                if (state.commits + 1) % args.save_every == 0:
                    state.save()
                else:
                    state.commit()
                time.sleep(args.pause)
    log.close()


train(state)
