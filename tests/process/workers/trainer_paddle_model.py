"""``EDLModel.fit``. Writes a line for each step, the samples of each step, and the trained numbers at the end."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.callbacks import Callback

import edl.paddle as edl
from edl.integrations.paddle_model import EDLModel
from tests.process.workers import trainer_script
from tests.support.paddle_distance import Distance

options = trainer_script.parser().parse_args()
"""``--steps`` is rounded down to whole epochs."""


class Rows(trainer_script.Rows, paddle.io.Dataset[Any]):
    """Rows and their sums."""

    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(index)
        return row, row.sum(keepdims=True)


class Log(Callback):
    """A line for each step."""

    def __init__(self, rows: Rows, per_epoch: int) -> None:
        super().__init__()
        self.rows, self.per_epoch, self.epoch, self.steps = rows, per_epoch, 0, 0

    def on_epoch_begin(self, epoch: Any = None, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, step: Any, logs: Any = None) -> None:
        if (step + 1) % options.accumulate:
            return
        place = edl.context()
        self.steps = self.epoch * self.per_epoch + step // options.accumulate + 1
        trainer_script.log(options, self.steps, place.rank, place.world_size, self.rows.read)
        self.rows.read = []


def main() -> None:
    trainer_script.wait_until_free(options.folder)
    paddle.seed(0)
    rows = Rows(options.samples)
    net = paddle.nn.Sequential(
        paddle.nn.Linear(8, 8), paddle.nn.Tanh(), paddle.nn.Dropout(options.dropout), paddle.nn.Linear(8, 1)
    )
    rate = paddle.optimizer.lr.ExponentialDecay(1e-2, 0.999)
    model = EDLModel(net, global_batch=options.global_batch)
    model.prepare(paddle.optimizer.AdamW(rate, parameters=net.parameters()), paddle.nn.MSELoss(),
                  Distance())  # fmt: skip
    per_epoch = -(-options.samples // options.global_batch)
    log, judged = Log(rows, per_epoch), paddle.callbacks.EarlyStopping("distance", "min", patience=1000, verbose=0)
    model.fit(
        rows, Rows(10), batch_size=(options.batch, 4), epochs=options.steps // per_epoch, verbose=0,
        accumulate_grad_batches=options.accumulate, callbacks=[log, judged],
    )  # fmt: skip
    best = float(judged.best_value)
    trainer_script.write_result(
        options.folder, edl.context().rank, log.steps, net.state_dict(), rate=[rate.get_lr()], best=best
    )


if __name__ == "__main__":
    main()
