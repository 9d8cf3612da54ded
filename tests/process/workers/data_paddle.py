"""A script that trains on an ``edl.paddle.Data``."""

from __future__ import annotations

import time

import paddle
from paddle import nn

import edl.paddle as edl
from tests.process.workers.data_ledger import Book, epochs, read_arguments

options = read_arguments()
paddle.seed(0)
model = nn.Linear(1, 1)
optimizer = paddle.optimizer.SGD(learning_rate=0.001, parameters=model.parameters())
data = edl.Data(
    "train",
    options.files or None,
    batch_size=options.batch,
    shard_records=options.shard_records,
    tail=options.tail,
)
state = edl.State(copy_every=options.copy_every, model=model, optimizer=optimizer, data=data)


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    parallel = edl.parallel(model)
    with Book(options.folder, here, state) as book:
        while data.epoch < epochs(options):
            for batch, share in data.shares():
                book.records(state.commits + 1, data.epoch, batch["id"].tolist() if share.samples else [])
                loss = parallel(batch["x"][:, None]).square().mean() * (share.weight * here.world_size)
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                book.step(state.commits + 1)
                if options.save_every and (state.commits + 1) % options.save_every == 0:
                    state.save()
                else:
                    state.commit()
                time.sleep(options.pause)


train(state)
