"""Train on files that the workers share out among them: each record once in each epoch, whoever comes and goes."""

import argparse
import time

import torch
from torch import nn

import edl.torch as edl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--step-time", type=float, default=0.0, help="sleep this many seconds a step, to watch it")
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
data = edl.Data("digits", batch_size=32, tail="join")  # the files are given to the launcher: --data digits=…
state = edl.State(model=model, optimizer=optimizer, data=data)


@edl.run
def train(state: edl.State) -> None:
    """Called for each new world; the position in the data is that of the model's commit."""
    here = edl.context()
    parallel = edl.parallel(model)
    while data.epoch < options.epochs:
        for batch, share in data.shares():
            loss = nn.functional.cross_entropy(parallel(batch["image"]), batch["label"])
            optimizer.zero_grad()
            # The mean over all samples of the step, also where workers have different numbers of them.
            (loss * share.weight * here.world_size).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            state.commit()  # the records of this step are consumed with it
            time.sleep(options.step_time)
            now = data.progress()
            if here.rank == 0 and state.commits % 20 == 0:
                print(
                    f"commit {state.commits}: epoch {now.epoch}, {now.records} of {now.of_records} records, "
                    f"world {here.world_size}, loss {loss.item():.4f}",
                    flush=True,
                )


train(state)
if edl.context().rank == 0:
    print(f"{data.epoch} epochs in {state.commits} steps", flush=True)
