"""Train a model of clicks whose tables lie on parameter servers; alone, they are in this process."""

import argparse
import time

import numpy as np
import paddle
from clicks import READING, auc, features, is_raw, read
from models_paddle import MODELS
from paddle import nn

import edl.paddle as edl
import edl.paddle.ps as ps

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", choices=MODELS, default="deepfm")
parser.add_argument("--train", default="runs/clicks/train-*.arrow", help="raw files, or those that prepare.py made")
parser.add_argument("--test", default="runs/clicks/test.arrow", help="to measure on; empty for nothing")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch", type=int, default=384, help="of one trainer")
parser.add_argument("--seed", type=int, default=0, help="of the order of the records")
parser.add_argument("--say-every", type=int, default=100, help="steps")
parser.add_argument("--steps", type=int, default=1 << 60, help="of this trainer, if that is less than the epochs have")
parser.add_argument("--trainers", type=int, default=1, help="begin when there are so many, for comparisons")
parser.add_argument("--step-time", type=float, default=0.0, help="sleep this many seconds a step, to watch it")
options = parser.parse_args()

paddle.seed(7)
ps.init(local=True)  # only if there is no launcher
model = MODELS[options.model]()
ps.Dense(model, optimizer=ps.Adam(2e-3))
raw = is_raw(options.train)
data = edl.Data(
    "clicks",
    options.train,
    batch_size=options.batch,
    seed=options.seed,
    shard_records=4096,  # small ones, so that all trainers have some until the end
    mode="independent",
    format="csv" if raw else None,
    options=READING if raw else None,
    transform=features,
)


def train() -> None:
    ps.begin(options.trainers)
    steps, losses, began = 0, [], time.monotonic()
    while data.epoch < options.epochs:
        for batch in data:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
            loss.backward()
            ps.step()
            steps += 1
            losses.append(float(loss))
            if steps % options.say_every == 0:
                speed = options.say_every * options.batch / (time.monotonic() - began)
                mean, losses, began = np.mean(losses), [], time.monotonic()
                print(f"step {steps}: loss {mean:.4f}, {speed:.0f} records a second here", flush=True)
            if steps == options.steps:
                return
            time.sleep(options.step_time)


def measure() -> None:
    model.eval()  # keys that are new get no rows
    scores, labels = [], []
    with paddle.no_grad():
        for batch in read(options.test, 8192):
            scores.append(model({name: paddle.to_tensor(array) for name, array in batch.items()}).numpy())
            labels.append(batch["label"])
    score, label = np.concatenate(scores), np.concatenate(labels)
    loss = np.logaddexp(0, score).mean() - (score * label).mean()
    print(f"held out: AUC {auc(score, label):.5f}, loss {loss:.4f}, {len(label)} records", flush=True)


train()
data.close()  # records that this trainer still has in hand go to others
if options.test and edl.context().rank == 0:
    ps.rest(wait_for_all=True)  # until all have pushed their last gradients
    ps.refresh()
    measure()
ps.leave()
