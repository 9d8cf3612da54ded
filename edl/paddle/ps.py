"""Parameter servers for PaddlePaddle scripts: embeddings whose rows, and layers whose parameters, lie in tables there::

    import edl.paddle.ps as ps

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

import numpy as np
import paddle
from paddle import nn

from edl.paddle.arrays import fill, from_memory, kind
from ps.client.auc import Auc
from ps.client.bags import Bags, bags_of, check_weights, trained, unpadded
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
        weights: WeightFormat = WeightFormat.F4,
        combiner: str | None = None,
    ) -> None:
        super().__init__()
        self.combiner = checked_combiner(combiner)
        self.table = sparse(name, dim, optimizer, initial, admission, eviction, damaged, weights)
        self.dim = dim
        self._anchor = _anchor()

    def forward(self, keys: Any) -> Any:
        """The rows of the keys, or their combination; see the class."""
        numbers = _numbers(keys, self.table)
        return self._result(keys, numbers, part.pull(self.table, numbers, insert=self.training))

    def _ask(self, keys: Any) -> tuple[Any, tuple[Any, Any]]:
        numbers = _numbers(keys, self.table)
        return numbers, (keys, numbers)

    def _answer(self, asked: tuple[Any, Any], found: FoundRows) -> Any:
        return self._result(*asked, found.spread())

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


class EmbeddingBag(nn.Layer):
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
        self._anchor = _anchor()

    def forward(self, keys: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        """The pooled rows of each bag.

        ``keys``: of shape ``(n,)`` with ``offsets``, the index of each bag's first key; or ``(bags, length)`` without.
        ``per_sample_weights``: a factor for each key's row, in the shape of the keys, only in mode ``"sum"``; it gets
        gradients. Raises ``SettingError``.
        """
        return lookup((self, keys, offsets, per_sample_weights))[0]

    def _ask(self, keys: Any, offsets: Any = None, per_sample_weights: Any = None) -> tuple[Any, tuple[Any, Bags, Any]]:
        numbers = _numbers(keys, self.table)
        bounds = None if offsets is None else offsets.numpy()
        bags = bags_of(numbers, bounds, self.table, last=self.include_last_offset, padding=self.padding_key)
        weights = per_sample_weights
        if weights is not None:
            check_weights(self.mode, tuple(weights.shape), numbers.shape, self.table)
            weights = weights.reshape([-1]).astype("float32")
            weights = weights if bags.kept is None else paddle.gather(weights, paddle.to_tensor(bags.kept))
        return bags.keys, (keys.place, bags, weights)

    def _answer(self, asked: tuple[Any, Bags, Any], found: FoundRows) -> Any:
        place, bags, weights = asked
        trains = self.training and paddle.is_grad_enabled()
        if not len(bags.keys):  # Paddle's operators need at least one
            zeros = paddle.zeros([len(bags), self.dim])
            return zeros + 0.0 * self._anchor[0] if trains else zeros
        if trains:
            part.expect()
            rows = _Pulled.apply(self._anchor[0], found.rows, place, self.table, found.keys, self.mode)  # type: ignore[no-untyped-call]
        else:
            rows = _tensor(found.rows, place)
        pairs = np.stack([found.index.reshape(-1), bags.owners])
        if self.mode == "max":  # a key that is twice in a bag gets its gradient once
            pairs = np.unique(pairs, axis=1)
        index, owners = (paddle.to_tensor(one, dtype="int64", place=place) for one in pairs)
        geometric: Any = paddle.geometric
        if weights is None:
            return geometric.send_u_recv(rows, index, owners, self.mode, out_size=len(bags))
        return geometric.send_ue_recv(rows, weights.unsqueeze(-1), index, owners, "mul", "sum", out_size=len(bags))

    def extra_repr(self) -> str:
        """The arguments shown by ``print(model)``."""
        padding = "" if self.padding_key is None else f", padding_key={self.padding_key}"
        return f"{self.table!r}, dim={self.dim}, mode={self.mode!r}{padding}"


class EmbeddingCollection(nn.Layer):
    """Embeddings and embedding bags by name, looked up together in one request to each server, however many there are.

    ``forward`` maps a dict of arguments by name to a dict of results; an embedding that is not named is not looked up.
    """

    def __init__(self, layers: Mapping[str, Embedding | EmbeddingBag]) -> None:
        super().__init__()
        self.layers = nn.LayerDict(dict(layers))

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Results by name. An argument is keys, or a tuple of the arguments of the layer's ``forward``, such as
        ``(keys, offsets)``. Raises ``SettingError`` for an unknown name."""
        return lookup_by_name(self.layers, batch)


class _Pulled(paddle.autograd.PyLayer):
    """Pulled rows as a tensor; its backward pass collects their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, rows: Any, place: Any, table: str, keys: Any, mode: str = "") -> Any:
        ctx.table, ctx.keys, ctx.mode = table, keys, mode
        return _tensor(rows, place)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        # The memory may be the script's, which may clear it before the step: that of ``retain_grads``.
        part.collect(ctx.table, *trained(ctx.keys, _floats(grad).copy(), ctx.mode))


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


def prefetch(table: Embedding | EmbeddingBag | str, keys: Any) -> None:
    """Start to fetch the rows of the next batch's keys while the current batch is trained on."""
    padding = table.padding_key if isinstance(table, EmbeddingBag) else None
    numbers = _numbers(keys, table if isinstance(table, str) else table.table)
    _prefetch(table, unpadded(numbers.reshape(-1), padding) if isinstance(table, EmbeddingBag) else numbers)


def _tensor(rows: Any, place: Any) -> Any:
    tensor = from_memory(rows, "float32")
    return tensor if place.is_cpu_place() else tensor.to(place)


def _anchor() -> list[Any]:
    """Autograd runs backward only for results that require gradients. The anchor is in a list because a layer would
    register a tensor as its own."""
    anchor = paddle.zeros([], "float32")
    anchor.stop_gradient = False
    return [anchor]


def _numbers(keys: Any, table: str) -> Any:
    """The keys as int64, in their own memory: they are used until ``step``, and the script may reuse its tensor
    before."""
    return integer_keys(_array(keys.detach()), table).copy()


def _floats(tensor: Any) -> Any:
    tensor = tensor.detach()
    return _array(tensor if kind(tensor) == "float32" else tensor.astype("float32"))


def _array(tensor: Any) -> Any:
    """The values as a numpy array: over the tensor's memory, which stays alive, if it is on the CPU."""
    if not tensor.place.is_cpu_place() or not tensor.size:
        return np.ascontiguousarray(tensor.numpy())
    return np.from_dlpack(tensor if tensor.is_contiguous() else tensor.contiguous())
