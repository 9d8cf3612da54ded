"""Parameter servers for PyTorch scripts: embeddings whose rows, and modules whose parameters, lie in tables there::

    import edl.torch.ps as ps

    users = ps.Embedding("users", dim=16, optimizer=ps.Adagrad(0.05))
    model = Model(users)
    ps.Dense(model, optimizer=ps.Adam(1e-3))
    for batch in data:
        loss_of(model(batch)).backward()
        ps.step()

The names and their errors are the same in both frameworks. See ``docs/parameter-servers.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ps.client.auc import Auc
from ps.client.bags import Bags, bags_of, check_weights, trained, unpadded, unpooled
from ps.client.counters import Counters
from ps.client.frontend import (
    begin,
    client,
    init,
    leave,
    lookup,
    lookup_by_name,
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
from ps.client.layer_arguments import checked_combiner, checked_every, checked_mode, checked_padding, integer_keys
from ps.client.lookups import FoundRows
from ps.client.warm_start import warm_start
from ps.optimizers import SGD, Adagrad, Adam, Constant, Ftrl, Momentum, Normal, RowAdagrad, Uniform, Zeros
from ps.spec import Admission, Damaged, Eviction, Initial, Optimizer, WeightFormat

__all__ = [
    "SGD", "Adagrad", "Adam", "Admission", "Auc", "Constant", "Counters", "Damaged", "Dense", "Embedding",
    "EmbeddingBag", "EmbeddingCollection", "Eviction", "Ftrl", "Initial", "Momentum", "Normal", "Optimizer",
    "RowAdagrad", "Uniform", "WeightFormat", "Zeros", "begin", "client", "init", "leave", "lookup", "no_insert",
    "on_save", "prefetch", "refresh", "rest", "restored", "save", "set_lr", "step", "warm_start",
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
        weights: WeightFormat = WeightFormat.F4,
        combiner: str | None = None,
    ) -> None:
        super().__init__()
        self.combiner = checked_combiner(combiner)
        self.table = sparse(name, dim, optimizer, initial, admission, eviction, damaged, weights)
        self.dim = dim
        self._anchor = torch.zeros((), requires_grad=True)  # backward runs only for what requires gradients

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """The rows of the keys, or their combination; see the class."""
        numbers = _numbers(keys, self.table)
        return self._result(keys, numbers, part.pull(self.table, numbers, insert=self.training))

    def _ask(self, keys: torch.Tensor) -> tuple[Any, tuple[torch.Tensor, Any]]:
        numbers = _numbers(keys, self.table)
        return numbers, (keys, numbers)

    def _answer(self, asked: tuple[torch.Tensor, Any], found: FoundRows) -> torch.Tensor:
        return self._result(*asked, found.spread())

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


class EmbeddingBag(nn.Module):
    """Rows of a table, pooled: ``forward`` maps bags of int64 keys to float32 of shape ``(bags, dim)``, as
    ``torch.nn.EmbeddingBag`` does.

    ``mode``: ``"sum"``, ``"mean"`` or ``"max"`` of a bag's rows; an empty bag gives zeros. Keys equal to
    ``padding_key`` are left out: they have no row, get no gradient, and a mean does not count them.
    ``include_last_offset``: offsets contain the number of keys as one more entry. Only distinct keys are fetched, and
    pooling takes place here. Everything else as in ``Embedding``.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        mode: str = "mean",
        padding_key: int | None = None,
        include_last_offset: bool = False,
        optimizer: Optimizer | None = None,
        initial: Initial | None = None,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        damaged: Damaged = Damaged.REFUSE,
        weights: WeightFormat = WeightFormat.F4,
    ) -> None:
        super().__init__()
        self.mode, self.padding_key = checked_mode(mode), checked_padding(padding_key)
        self.include_last_offset = include_last_offset
        self.table = sparse(name, dim, optimizer, initial, admission, eviction, damaged, weights)
        self.dim = dim
        self._anchor = torch.zeros((), requires_grad=True)  # backward runs only for what requires gradients

    def forward(
        self, keys: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The pooled rows of each bag.

        ``keys``: of shape ``(n,)`` with ``offsets``, the index of each bag's first key; or ``(bags, length)`` without.
        ``per_sample_weights``: a factor for each key's row, in the shape of the keys, only in mode ``"sum"``; it gets
        gradients. Raises ``SettingError``.
        """
        pooled: torch.Tensor = lookup((self, keys, offsets, per_sample_weights))[0]
        return pooled

    def _ask(
        self, keys: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> tuple[Any, tuple[torch.device, Bags, torch.Tensor | None]]:
        numbers = _numbers(keys, self.table)
        bounds = None if offsets is None else offsets.detach().cpu().numpy()
        bags = bags_of(numbers, bounds, self.table, last=self.include_last_offset, padding=self.padding_key)
        weights = per_sample_weights
        if weights is not None:
            check_weights(self.mode, tuple(weights.shape), numbers.shape, self.table)
            weights = weights.reshape(-1).to(keys.device, torch.float32)
            weights = weights if bags.kept is None else weights[torch.from_numpy(bags.kept).to(keys.device)]
        return bags.keys, (keys.device, bags, weights)

    def _answer(self, asked: tuple[torch.device, Bags, torch.Tensor | None], found: FoundRows) -> torch.Tensor:
        device, bags, weights = asked
        if self.training and torch.is_grad_enabled():
            part.expect()
            if device.type == "cpu" and weights is None and self.mode != "max":
                pooled: torch.Tensor = _Pooled.apply(self._anchor, found, bags, self.table, self.mode)  # type: ignore[no-untyped-call]
                return pooled
            rows = _Pulled.apply(self._anchor, found.rows, device, self.table, found.keys, self.mode)  # type: ignore[no-untyped-call]
        else:
            rows = torch.from_numpy(found.rows).to(device)
        return _pool(rows, found, bags, self.mode, weights)

    def extra_repr(self) -> str:
        """The arguments shown by ``print(model)``."""
        padding = "" if self.padding_key is None else f", padding_key={self.padding_key}"
        return f"{self.table!r}, dim={self.dim}, mode={self.mode!r}{padding}"


class EmbeddingCollection(nn.Module):
    """Embeddings and embedding bags by name, looked up together in one request to each server, however many there are.

    ``forward`` maps a dict of arguments by name to a dict of results; an embedding that is not named is not looked up.
    """

    def __init__(self, layers: Mapping[str, Embedding | EmbeddingBag]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(dict(layers))

    def forward(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Results by name. An argument is keys, or a tuple of the arguments of the layer's ``forward``, such as
        ``(keys, offsets)``. Raises ``SettingError`` for an unknown name."""
        return lookup_by_name(self.layers, batch)


class _Pulled(torch.autograd.Function):
    """Pulled rows as a tensor; its backward pass collects their gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, rows: Any, device: torch.device, table: str, keys: Any, mode: str = ""
    ) -> torch.Tensor:
        ctx.table, ctx.keys, ctx.mode = table, keys, mode
        return torch.from_numpy(rows).to(device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The memory may be the script's, which may reuse it before the step: that given to ``backward``.
        part.collect(ctx.table, *trained(ctx.keys, _floats(grads[0]).copy(), ctx.mode))
        return (None,) * 6


class _Pooled(torch.autograd.Function):
    """Pulled rows, pooled on the CPU in mode sum or mean; its backward pass collects the rows' gradients. It adds them
    in one pass, where that of ``embedding_bag`` sorts the keys of each table."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, found: FoundRows, bags: Bags, table: str, mode: str) -> torch.Tensor:
        ctx.table, ctx.keys, ctx.index, ctx.bags, ctx.mode = table, found.keys, found.index, bags, mode
        return _pool(torch.from_numpy(found.rows), found, bags, mode)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        part.collect(ctx.table, ctx.keys, unpooled(_floats(grads[0]), ctx.bags, ctx.index, len(ctx.keys), ctx.mode))
        return (None,) * 5


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


def prefetch(table: Embedding | EmbeddingBag | str, keys: torch.Tensor) -> None:
    """Start to fetch the rows of the next batch's keys while the current batch is trained on."""
    padding = table.padding_key if isinstance(table, EmbeddingBag) else None
    numbers = _numbers(keys, table if isinstance(table, str) else table.table)
    _prefetch(table, unpadded(numbers.reshape(-1), padding) if isinstance(table, EmbeddingBag) else numbers)


def _pool(
    rows: torch.Tensor, found: FoundRows, bags: Bags, mode: str, weights: torch.Tensor | None = None
) -> torch.Tensor:
    index, bounds = torch.from_numpy(found.index.astype("int64")), torch.from_numpy(bags.bounds)
    return nn.functional.embedding_bag(
        index.to(rows.device), rows, bounds.to(rows.device), mode=mode, per_sample_weights=weights,
        include_last_offset=True,
    )  # fmt: skip


def _numbers(keys: torch.Tensor, table: str) -> Any:
    """The keys as int64, in their own memory: they are used until ``step``, and the script may reuse its tensor
    before."""
    return integer_keys(keys.detach().cpu().contiguous().numpy(), table).copy()


def _floats(tensor: torch.Tensor) -> Any:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.to("cpu", torch.float32).contiguous().numpy()
