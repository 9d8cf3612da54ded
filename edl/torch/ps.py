"""Parameter servers for PyTorch scripts: embeddings whose rows, and modules whose parameters, lie in tables there.

```python
import edl.torch.ps as ps

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

import torch
from torch import nn

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


class Embedding(nn.Module):
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
        self._anchor = torch.zeros((), requires_grad=True)  # backward runs only for what requires gradients

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """The rows of the keys, or their combination; see the class."""
        numbers = _numbers(keys, self.table)
        return self._result(keys, numbers, part.pull(self.table, numbers, insert=self.training))

    def _result(self, keys: torch.Tensor, numbers: Any, found: Any) -> torch.Tensor:
        rows: torch.Tensor
        if self.training and torch.is_grad_enabled():
            part.expect()
            rows = _Pulled.apply(self._anchor, found, keys.device, self.table, numbers)  # type: ignore[no-untyped-call]
        else:
            rows = torch.from_numpy(found).to(keys.device)
        if self.combiner == "sum":
            return rows.sum(dim=-2)
        return rows.mean(dim=-2) if self.combiner == "mean" else rows

    def extra_repr(self) -> str:
        """The arguments shown by ``print(model)``."""
        return f"{self.table!r}, dim={self.dim}" + (f", combiner={self.combiner!r}" if self.combiner else "")


class _Pulled(torch.autograd.Function):
    """Pulled rows as a tensor; its backward pass collects their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, rows: Any, device: torch.device, table: str, keys: Any) -> torch.Tensor:
        ctx.table, ctx.keys = table, keys
        return torch.from_numpy(rows).to(device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        part.collect(ctx.table, ctx.keys, _floats(grads[0]))
        return None, None, None, None, None


class Dense:
    """Keeps the parameters of a module, except embeddings, in a table on the parameter servers, which apply
    ``optimizer``. Their first values are those of the first trainer; ``step`` fetches the newest.

    ``name``: the name of the table; each ``Dense`` of a script needs its own. ``every``: number of steps between
    fetches of new values. Untrained values stay local to each trainer: buffers, such as the statistics of
    ``BatchNorm``, and parameters with ``requires_grad=False``.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        name: str = "dense",
        every: int = 1,
        damaged: Damaged = Damaged.REFUSE,
    ) -> None:
        self.name = self.table = name
        self.every = checked_every(every)
        self._parameters = {key: one for key, one in module.named_parameters() if one.requires_grad}
        part.declare_dense(self, optimizer if optimizer is not None else Optimizer(), damaged)

    def read(self) -> dict[str, Any]:
        """The trained parameters by name."""
        return {key: _floats(one) for key, one in self._parameters.items()}

    def write(self, values: Mapping[str, Any]) -> None:
        """Set the parameters to these values."""
        with torch.no_grad():
            for key, one in self._parameters.items():
                one.copy_(torch.from_numpy(values[key]))

    def take_gradients(self) -> dict[str, Any] | None:
        """Return the gradients by name, of parameters that have one, and clear them; None if there are none."""
        grads = {key: _floats(one.grad) for key, one in self._parameters.items() if one.grad is not None}
        for one in self._parameters.values():
            one.grad = None
        return grads or None


def lookup(*wanted: tuple[Embedding, torch.Tensor]) -> list[torch.Tensor]:
    """The results of several embeddings for their keys, ``lookup((users, batch["user"]), (words, batch["words"]))``,
    fetched in one request to the servers instead of one each."""
    asked = [(one.table, _numbers(keys, one.table), one.training) for one, keys in wanted]
    found = part.lookup(asked)
    return [
        one._result(keys, numbers, rows)
        for (one, keys), (_, numbers, _), rows in zip(wanted, asked, found, strict=True)
    ]


def prefetch(table: Embedding | str, keys: torch.Tensor) -> None:
    """Start to fetch the rows of the next batch's keys while the current batch is trained on."""
    _prefetch(table, _numbers(keys, table if isinstance(table, str) else table.table))


def _numbers(keys: torch.Tensor, table: str) -> Any:
    return integer_keys(keys.detach().cpu().contiguous().numpy(), table)


def _floats(tensor: torch.Tensor) -> Any:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.to("cpu", torch.float32).contiguous().numpy()
