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
    """Rows of a table on the parameter servers. ``forward`` maps int64 keys of any shape and value to float32 of shape
    ``(*shape, dim)``.

    A row is created when its key is first seen, with weights that depend on ``initial`` and the key. Several embeddings
    may have the same ``name``, and then share the table. ``combiner``: ``"sum"`` or ``"mean"`` over the last dimension
    of the keys. Gradients are sent to the servers by ``step``; there are no parameters for an optimizer. In eval mode
    no rows are created. Raises ``SettingError``.
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
        # Autograd runs backward only for results that require gradients. It is in a list because a layer would register
        # a tensor as its own.
        self._anchor = [paddle.zeros([], "float32")]
        self._anchor[0].stop_gradient = False

    def forward(self, keys: Any) -> Any:
        """The rows of the keys, or their combination; see the class."""
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
        """The arguments shown by ``print(model)``."""
        return f"{self.table!r}, dim={self.dim}" + (f", combiner={self.combiner!r}" if self.combiner else "")


class _Pulled(paddle.autograd.PyLayer):
    """Pulled rows as a tensor; its backward pass collects their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, rows: Any, place: Any, table: str, keys: Any) -> Any:
        ctx.table, ctx.keys = table, keys
        return _tensor(rows, place)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        part.collect(ctx.table, ctx.keys, _floats(grad))


class Dense:
    """Keeps the parameters of a layer, except embeddings, in a table on the parameter servers, which apply
    ``optimizer``. Their first values are those of the first trainer; ``step`` fetches the newest.

    ``name``: the name of the table; each ``Dense`` of a script needs its own. ``every``: number of steps between
    fetches of new values. Untrained values stay local to each trainer: buffers, such as the statistics of
    ``BatchNorm``, and parameters with ``stop_gradient=True``.
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
        """The trained parameters by name."""
        return {key: _floats(one) for key, one in self._parameters.items()}

    def write(self, values: Mapping[str, Any]) -> None:
        """Set the parameters to these values."""
        for key, one in self._parameters.items():
            if kind(one) == "float32":
                fill(one, values[key])
            else:
                paddle.assign(paddle.to_tensor(values[key]).astype(one.dtype), output=one)

    def take_gradients(self) -> dict[str, Any] | None:
        """Return the gradients by name, of parameters that have one, and clear them; None if there are none."""
        grads = {key: _floats(one.grad) for key, one in self._parameters.items() if one.grad is not None}
        for one in self._parameters.values():
            one.clear_gradient(False)  # frees the memory instead of writing zeros
        return grads or None


def lookup(*wanted: tuple[Embedding, Any]) -> list[Any]:
    """The results of several embeddings for their keys, ``lookup((users, batch["user"]), (words, batch["words"]))``,
    fetched in one request to the servers instead of one each."""
    asked = [(one.table, _numbers(keys, one.table), one.training) for one, keys in wanted]
    found = part.lookup(asked)
    return [
        one._result(keys, numbers, rows)
        for (one, keys), (_, numbers, _), rows in zip(wanted, asked, found, strict=True)
    ]


def prefetch(table: Embedding | str, keys: Any) -> None:
    """Start to fetch the rows of the next batch's keys while the current batch is trained on."""
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
    """The values as a numpy array: over the tensor's memory, which stays alive, if it is on the CPU."""
    if not tensor.place.is_cpu_place() or not tensor.size:
        return np.ascontiguousarray(tensor.numpy())
    return np.from_dlpack(tensor if tensor.is_contiguous() else tensor.contiguous())
