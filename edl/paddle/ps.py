"""Parameter servers for PaddlePaddle scripts: embeddings whose rows, and layers whose parameters, lie in tables there.

```python
import edl.paddle.ps as ps

users = ps.Embedding("users", dim=16, optimizer=ps.Adagrad(0.05))
model = Model(users)
ps.Dense(model, optimizer=ps.Adam(1e-3))
for batch in data:
    loss_of(model(batch)).backward()
    ps.step()
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from paddle import nn

from edl.paddle.arrays import fill, from_memory, kind
from ps.client.frontend import (
    begin,
    checked_combiner,
    checked_every,
    client,
    init,
    integer_keys,
    leave,
    no_insert,
    on_save,
    part,
    refresh,
    rest,
    restored,
    save,
    set_lr,
    sparse,
    step,
)
from ps.client.frontend import prefetch as _prefetch
from ps.optimizers import SGD, Adagrad, Adam, Constant, Ftrl, Momentum, Normal, RowAdagrad, Uniform, Zeros
from ps.spec import Admission, Damaged, Eviction, Initial, Optimizer

__all__ = [
    "SGD", "Adagrad", "Adam", "Admission", "Constant", "Damaged", "Dense", "Embedding", "Eviction", "Ftrl", "Initial",
    "Momentum", "Normal", "Optimizer", "RowAdagrad", "Uniform", "Zeros", "begin", "client", "init", "leave",
    "lookup", "no_insert", "on_save", "prefetch", "refresh", "rest", "restored", "save", "set_lr", "step",
]  # fmt: skip


class Embedding(nn.Layer):
    """Rows of a table on the parameter servers. ``forward``: keys int64 of any shape, any value, to float32 of
    ``(*shape, dim)``.

    Rows come into being when a key is seen for the first time, with weights that follow from ``initial`` and the key.
    Several embeddings may have one ``name``, and then share the table. ``combiner``: ``"sum"`` or ``"mean"`` over the
    last dimension of the keys. Gradients go to the servers with ``step``; there are no parameters for an optimizer.
    In eval mode keys without a row get none. Raises ``SettingError``.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        optimizer: Optimizer | None = None,
        initial: Initial | None = None,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        damaged: Damaged = Damaged.REFUSE,
        combiner: str | None = None,
    ) -> None:
        super().__init__()
        self.combiner = checked_combiner(combiner)
        self.table = sparse(name, dim, optimizer, initial, admission, eviction, damaged)
        self.dim = dim
        # Autograd calls back only for what depends on something. In a list, since a layer keeps tensors as its own.
        self._anchor = [paddle.zeros([], "float32")]
        self._anchor[0].stop_gradient = False

    def forward(self, keys: Any) -> Any:
        """See the class."""
        numbers = _numbers(keys, self.table)
        return self._result(keys, numbers, part.pull(self.table, numbers, insert=self.training))

    def _result(self, keys: Any, numbers: Any, found: Any) -> Any:
        if self.training and paddle.is_grad_enabled():
            part.expect()
            rows = _Pulled.apply(self._anchor[0], found, keys.place, self.table, numbers)  # type: ignore[no-untyped-call]
        else:
            rows = _tensor(found, keys.place)
        if self.combiner == "sum":
            return rows.sum(axis=-2)
        return rows.mean(axis=-2) if self.combiner == "mean" else rows

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"{self.table!r}, dim={self.dim}" + (f", combiner={self.combiner!r}" if self.combiner else "")


class _Pulled(paddle.autograd.PyLayer):
    """Rows as a tensor; the way back takes their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, rows: Any, place: Any, table: str, keys: Any) -> Any:
        ctx.table, ctx.keys = table, keys
        return _tensor(rows, place)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        part.collect(ctx.table, ctx.keys, _floats(grad))


class Dense:
    """The parameters of a layer, embeddings left aside, lie in a table on the parameter servers, which apply
    ``optimizer``. Their first values are those of the trainer that comes first; ``step`` brings the newest.

    ``name``: of the table; each ``Dense`` of a script needs its own. ``every``: new values are fetched every so many
    steps. What is not trained stays as it is in each trainer: buffers, such as the statistics of ``BatchNorm``, and
    parameters with ``stop_gradient=True``.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Optimizer | None = None,
        *,
        name: str = "dense",
        every: int = 1,
        damaged: Damaged = Damaged.REFUSE,
    ) -> None:
        self.name = self.table = name
        self.every = checked_every(every)
        self._parameters = {key: one for key, one in module.named_parameters() if not one.stop_gradient}
        part.declare_dense(self, optimizer if optimizer is not None else Optimizer(), damaged)

    def read(self) -> dict[str, Any]:
        """The parameters by name."""
        return {key: _floats(one) for key, one in self._parameters.items()}

    def write(self, values: Mapping[str, Any]) -> None:
        """Give the parameters these values."""
        for key, one in self._parameters.items():
            if kind(one) == "float32":
                fill(one, values[key])
            else:
                paddle.assign(paddle.to_tensor(values[key]).astype(one.dtype), output=one)

    def take_gradients(self) -> dict[str, Any] | None:
        """Gradients by name, of parameters that have one, and clear them; None if there are none."""
        grads = {key: _floats(one.grad) for key, one in self._parameters.items() if one.grad is not None}
        for one in self._parameters.values():
            one.clear_gradient(False)  # lets go of the memory, and does not write zeros into it
        return grads or None


def lookup(*wanted: tuple[Embedding, Any]) -> list[Any]:
    """What several embeddings give for their keys, ``lookup((users, batch["user"]), (words, batch["words"]))``, fetched
    in one trip to the servers; one after another they take a trip each."""
    asked = [(one.table, _numbers(keys, one.table), one.training) for one, keys in wanted]
    found = part.lookup(asked)
    return [
        one._result(keys, numbers, rows)
        for (one, keys), (_, numbers, _), rows in zip(wanted, asked, found, strict=True)
    ]


def prefetch(table: Embedding | str, keys: Any) -> None:
    """Rows of the next batch's keys are fetched while this one is trained on."""
    _prefetch(table, _numbers(keys, table if isinstance(table, str) else table.table))


def _tensor(rows: Any, place: Any) -> Any:
    tensor = from_memory(rows, "float32")
    return tensor if place.is_cpu_place() else tensor.to(place)


def _numbers(keys: Any, table: str) -> Any:
    return integer_keys(_array(keys.detach()), table)


def _floats(tensor: Any) -> Any:
    tensor = tensor.detach()
    return _array(tensor if kind(tensor) == "float32" else tensor.astype("float32"))


def _array(tensor: Any) -> Any:
    """A numpy array of its values: its own memory, which stays alive, if it is on the CPU."""
    if not tensor.place.is_cpu_place() or not tensor.size:
        return np.ascontiguousarray(tensor.numpy())
    return np.from_dlpack(tensor if tensor.is_contiguous() else tensor.contiguous())
