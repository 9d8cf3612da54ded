"""``paddle.Model.fit``, elastically: a small network learns to add up its input. Nothing is downloaded."""

from typing import Any

import paddle

from edl.integrations.paddle_model import EDLModel

paddle.seed(0)


class Sums(paddle.io.Dataset[Any]):
    """Rows of numbers and their sums."""

    def __init__(self, samples: int) -> None:
        self.rows = paddle.randn([samples, 16])

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.rows[index].sum(keepdim=True)

    def __len__(self) -> int:
        return len(self.rows)


network = paddle.nn.Sequential(paddle.nn.Linear(16, 64), paddle.nn.Tanh(), paddle.nn.Linear(64, 1))
model = EDLModel(network, global_batch=32)
model.prepare(paddle.optimizer.AdamW(1e-3, parameters=network.parameters()), paddle.nn.MSELoss())
model.fit(Sums(4096), Sums(256), batch_size=(8, 32), epochs=10, log_freq=32)
