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
        self._anchor = torch.zeros((), requires_grad=True)  # autograd calls back only for what depends on something

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """See the class."""
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
        """For ``print(model)``."""
        return f"{self.table!r}, dim={self.dim}" + (f", combiner={self.combiner!r}" if self.combiner else "")


class _Pulled(torch.autograd.Function):
    """Rows as a tensor; the way back takes their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, rows: Any, device: torch.device, table: str, keys: Any) -> torch.Tensor:
        ctx.table, ctx.keys = table, keys
        return torch.from_numpy(rows).to(device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        part.collect(ctx.table, ctx.keys, _floats(grads[0]))
        return None, None, None, None, None


class Dense:
    """The parameters of a module, embeddings left aside, lie in a table on the parameter servers, which apply
    ``optimizer``. Their first values are those of the trainer that comes first; ``step`` brings the newest.

    ``name``: of the table; each ``Dense`` of a script needs its own. ``every``: new values are fetched every so many
    steps. What is not trained stays as it is in each trainer: buffers, such as the statistics of ``BatchNorm``, and
    parameters with ``requires_grad=False``.
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
        """The parameters by name."""
        return {key: _floats(one) for key, one in self._parameters.items()}

    def write(self, values: Mapping[str, Any]) -> None:
        """Give the parameters these values."""
        with torch.no_grad():
            for key, one in self._parameters.items():
                one.copy_(torch.from_numpy(values[key]))

    def take_gradients(self) -> dict[str, Any] | None:
        """Gradients by name, of parameters that have one, and clear them; None if there are none."""
        grads = {key: _floats(one.grad) for key, one in self._parameters.items() if one.grad is not None}
        for one in self._parameters.values():
            one.grad = None
        return grads or None


def lookup(*wanted: tuple[Embedding, torch.Tensor]) -> list[torch.Tensor]:
    """What several embeddings give for their keys, ``lookup((users, batch["user"]), (words, batch["words"]))``, fetched
    in one trip to the servers; one after another they take a trip each."""
    asked = [(one.table, _numbers(keys, one.table), one.training) for one, keys in wanted]
    found = part.lookup(asked)
    return [
        one._result(keys, numbers, rows)
        for (one, keys), (_, numbers, _), rows in zip(wanted, asked, found, strict=True)
    ]


def prefetch(table: Embedding | str, keys: torch.Tensor) -> None:
    """Rows of the next batch's keys are fetched while this one is trained on."""
    _prefetch(table, _numbers(keys, table if isinstance(table, str) else table.table))


def _numbers(keys: torch.Tensor, table: str) -> Any:
    return integer_keys(keys.detach().cpu().contiguous().numpy(), table)


def _floats(tensor: torch.Tensor) -> Any:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.to("cpu", torch.float32).contiguous().numpy()
