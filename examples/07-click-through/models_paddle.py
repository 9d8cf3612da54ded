"""Three models of clicks in PaddlePaddle, whose embeddings lie on the parameter servers."""

import paddle
from clicks import FIELDS, NUMBERS
from paddle import nn

import edl.paddle.ps as ps

WIDTH = 8
"""Of a factor vector."""
ADAGRAD = ps.Adagrad(lr=0.05, initial_accumulator=1e-5)
"""Gradients of a mean over a batch are small; the accumulator keeps the first steps of rare keys short."""
FTRL = ps.Ftrl(lr=0.05, l1=1e-6, initial_accumulator=1e-5)

Batch = dict[str, paddle.Tensor]


class Linear(nn.Layer):
    """Logistic regression: a weight for each value. What the others are compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.single = ps.Embedding("single", 1, optimizer=ADAGRAD, initial=ps.Zeros(), combiner="sum")
        self.numbers = nn.Linear(len(NUMBERS), 1)

    def forward(self, batch: Batch) -> paddle.Tensor:
        logit: paddle.Tensor = self.single(batch["keys"]) + self.numbers(batch["numbers"])
        return logit.squeeze(-1)


class WideDeep(nn.Layer):
    """Wide&Deep (Cheng et al. 2016): weights for values and for pairs of them, beside a network over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = ps.Embedding("wide", 1, optimizer=FTRL, initial=ps.Zeros(), combiner="sum")
        self.factors = ps.Embedding("factors", WIDTH, optimizer=ADAGRAD, initial=ps.Normal(0.02))
        self.deep = _network()

    def forward(self, batch: Batch) -> paddle.Tensor:
        wide_keys = paddle.concat([batch["keys"], batch["crossed"]], axis=1)
        wide, vectors = ps.lookup((self.wide, wide_keys), (self.factors, batch["keys"]))
        logit: paddle.Tensor = wide + self.deep(paddle.concat([vectors.flatten(1), batch["numbers"]], axis=1))
        return logit.squeeze(-1)


class DeepFM(nn.Layer):
    """DeepFM (Guo et al. 2017): a factorization machine and a network over the same embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.single = ps.Embedding("single", 1, optimizer=ADAGRAD, initial=ps.Zeros(), combiner="sum")
        self.factors = ps.Embedding("factors", WIDTH, optimizer=ADAGRAD, initial=ps.Normal(0.02))
        self.deep = _network()

    def forward(self, batch: Batch) -> paddle.Tensor:
        single, vectors = ps.lookup((self.single, batch["keys"]), (self.factors, batch["keys"]))  # in one trip
        # The sum over all pairs of fields of the products of their vectors.
        pairs = 0.5 * (vectors.sum(axis=1).square() - vectors.square().sum(axis=1)).sum(axis=1, keepdim=True)
        deep = self.deep(paddle.concat([vectors.flatten(1), batch["numbers"]], axis=1))
        logit: paddle.Tensor = single + pairs + deep
        return logit.squeeze(-1)


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FIELDS * WIDTH + len(NUMBERS), 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
    )


MODELS = {"linear": Linear, "wide-deep": WideDeep, "deepfm": DeepFM}
