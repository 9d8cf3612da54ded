"""What a rank holds of a layer that is sharded: rows of its trained parameters, which the optimizer updates.

The optimizer's own list has these rows in place of the parameters, as tensors of the same names, so all its state has
their size. A world of one rank cuts nothing: there the rows are the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase

from edl.checkpoint.reading.assembly import LOCAL, OFFSET, SHAPE, Box
from edl.errors import StateError
from edl.paddle import clipping, group, rows
from edl.paddle.arrays import from_memory, kind, memory
from edl.paddle.clipping import RowClip
from edl.paddle.ddp import ALONE_BYTES, BUCKET_BYTES, SHARDS, all_or_nobody
from edl.paddle.optimizer_state import forget_all
from edl.worker.ring import Ring, narrow, widen

LEVELS = ("os", "os_g", "p_g_os")
"""What is kept in rows: the optimizer's state, the gradients too, the parameters too."""


class ParameterRows:
    """One trained parameter, and this rank's rows of it."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self.shape = tuple(whole.shape)
        self._kind: Any = kind(whole)
        self.cut(0, 1)

    def cut(self, rank: int, size: int) -> None:
        """Make the rows of this rank. Their values are undefined."""
        self.box: Box | None = rows.cut(self.shape, rank, size)
        self.counts = rows.counts(self.shape, size)
        begin = sum(self.counts[:rank])
        self._span = slice(begin, begin + self.counts[rank])
        self.row: Any = None
        """The rows; None without any, the parameter itself in a world of one rank."""
        if size == 1:
            self.row = self.whole
        elif self.box is not None:
            self.row = EagerParamBase(paddle.empty(list(self.box.shape), dtype=self._kind), name=self.whole.name)
            vars(self.row).update(vars(self.whole))  # rates, regularizers and the like are looked up at each step

    def own(self, whole: Any) -> Any:
        """This rank's elements of a flat array of the whole parameter."""
        return whole[self._span]

    def flat(self) -> Any:
        """The whole parameter's memory, which is allocated if it was released."""
        if not self.whole._is_initialized():
            paddle.empty(list(self.shape), dtype=self._kind)._share_buffer_to(self.whole)
        return memory(self.whole).reshape(-1)

    def release(self) -> None:
        """Free the whole parameter's memory."""
        if self.row is not self.whole and self.whole._is_initialized():
            self.whole._clear_data()

    def take(self) -> None:
        """Set the rows to those of the whole parameter."""
        if self.row is not None and self.row is not self.whole:
            np.copyto(memory(self.row).reshape(-1), self.own(self.flat()))

    def give(self) -> None:
        """Set the whole parameter's rows to this rank's."""
        if self.row is not None and self.row is not self.whole:
            np.copyto(self.own(self.flat()), memory(self.row).reshape(-1))

    def put(self, values: Any) -> None:
        """Set the rows to restored values."""
        if self.row is self.whole:
            self.flat()
        self.row.set_value(values)

    def kept(self, *, of_whole: bool) -> dict[str, Any]:
        """The rows and their place, as they are saved. ``of_whole``: as they are in the whole parameter."""
        assert self.box is not None, "it has rows"  # noqa: S101
        row = self.row.detach()
        if of_whole and self.row is not self.whole:
            row = self.whole.detach()
            row = row[self.box.offset[0] : self.box.offset[0] + self.box.shape[0]] if self.shape else row
        return self.placed(row)

    def placed(self, values: Any) -> dict[str, Any]:
        """Values of the shape of the rows, with their place, as they are saved."""
        assert self.box is not None, "it has rows"  # noqa: S101
        return {LOCAL: values, SHAPE: list(self.shape), OFFSET: list(self.box.offset)}

    def add_gradient(self, values: Any, name: Any) -> None:
        """Add to the gradient of the rows; ``values`` is kept."""
        if self.row is None:
            return
        values = values.reshape(self.row.shape)
        if self.row.grad is None:
            self.row.grad = from_memory(values, name)
            return
        held = memory(self.row.grad)
        if name == "bfloat16":  # which Paddle cannot add on CPUs
            held[...] = narrow(widen(held) + widen(values))
        else:
            held += values


class Shards:
    """The rows of all trained parameters of a layer, for one optimizer."""

    def __init__(self, layer: Any, optimizer: Any, level: str, groups: Sequence[Sequence[Any]]) -> None:
        """``groups``: the optimizer's parameters, by its groups."""
        self.layer, self.optimizer, self.level = layer, optimizer, level
        self.model: Any = None
        """The wrapper that the script calls."""
        self.groups = [[ParameterRows(one) for one in each] for each in groups]
        self.parts = [part for each in self.groups for part in each]
        self.clips: list[RowClip | None] = [None for _ in groups]
        self.fresh = True
        """No step has been made: the whole parameters are those that count, on each rank."""
        self.stale = False
        """The whole parameters lack the other ranks' rows, or their memory is released."""
        self._by_id = {id(part.whole): part for part in self.parts}
        self._place = (0, 1)

    def __reduce__(self) -> Any:
        if self.stale:
            names = [name for name, one in self.layer.named_parameters() if self.part(one) is not None]
            raise StateError(
                f"this {type(self.layer).__name__} cannot be copied, since each rank has only its rows of "
                f"{', '.join(names[:5])}{' …' if len(names) > 5 else ''}: first call get_all_parameters() of the "
                "sharded model on all ranks"
            )
        return _nothing, ()  # a copy of the layer is a plain layer

    def part(self, parameter: Any) -> ParameterRows | None:
        """The part of a parameter; None if the optimizer does not train it."""
        return self._by_id.get(id(parameter))

    @property
    def size(self) -> int:
        """Number of ranks that it is cut for."""
        return self._place[1]

    def enter(self) -> None:
        """Cut for the current world. In another one than before, rows and the optimizer's state are undefined, until
        they are restored."""
        ring = group.current()
        place = (0, 1) if ring is None else (ring.rank, ring.world_size)
        if place == self._place:
            return
        self._place = place
        forget_all(self.optimizer)
        for part in self.parts:
            part.cut(*place)
        held = [[part.row for part in each if part.row is not None] for each in self.groups]
        optimizer = self.optimizer
        if optimizer._param_groups and isinstance(optimizer._param_groups[0], dict):
            for each, own in zip(optimizer._param_groups, held, strict=True):
                each["params"] = own
        else:
            optimizer._param_groups = held[0]
        optimizer._parameter_list = optimizer._param_groups

    # --- parameters --------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Make the whole parameters, if they are not; a collective."""
        ring = group.current()
        if not self.stale or self.size == 1 or ring is None:
            return
        with all_or_nobody(ring):
            for part in self.parts:
                part.give()
            for bucket in _buckets((part, part.flat(), kind(part.whole)) for part in self.parts):
                bucket.gather(ring)
        self.stale = False

    def release(self) -> None:
        """Keep the rows of the parameters only."""
        for part in self.parts:
            part.release()

    def restored(self, *, fresh: bool) -> None:
        """Values have been put into the rows, or, if it is ``fresh``, into the whole parameters."""
        self.fresh = fresh
        self.stale = not fresh and self.size > 1
        if self.stale and self.level == "p_g_os":
            self.release()
        self.clear_gradients(set_to_zero=False)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def reduce(self, ring: Ring, found: Iterable[tuple[ParameterRows, Any, str]]) -> None:
        """Average gradients, each rank its rows, and free the whole ones. ``found``: parts with their gradients, None
        for 0, and the gradients' type."""
        arrays = ((part, _flat(part, gradient, name), name) for part, gradient, name in found)
        for bucket in _buckets(arrays):
            for part, values in bucket.reduce(ring):
                part.add_gradient(values, bucket.name)
                part.whole.clear_gradient(False)

    def clear_gradients(self, set_to_zero: bool = True) -> None:
        """As ``clear_grad`` of an optimizer."""
        for part in self.parts:
            for one in {id(part.whole): part.whole, id(part.row): part.row}.values():
                if one is not None and not part.whole.stop_gradient:
                    one.clear_gradient(set_to_zero)

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, update: Callable[[], object]) -> None:
        """One step of the optimizer, which ``update`` makes for the rows; a collective."""
        self.enter()
        ring = group.current()
        if ring is None or self.size == 1:
            for clip in self._all_clips():
                clip.factors = None
            update()
            self.fresh = False
            return
        with all_or_nobody(ring):
            if self.fresh or self.level != "p_g_os":
                for part in self.parts:
                    part.take()
            for part in self.parts:
                self._take_gradient(part)
            clipping.measure(ring, [*zip(self.clips, map(_to_clip, self.groups), strict=True)])
            if any(part.row is not None for part in self.parts):
                update()
            if self.level == "os":
                for part in self.parts:
                    if part.row is not None:
                        part.row.clear_gradient(False)
        self.fresh, self.stale = False, True
        self.release() if self.level == "p_g_os" else self.gather()

    def _all_clips(self) -> Iterator[RowClip]:
        return (clip for clip in self.clips if clip is not None)

    def _take_gradient(self, part: ParameterRows) -> None:
        """Give the rows their part of a gradient that is whole."""
        gradient = part.whole.grad
        if part.row is not None:
            part.row.stop_gradient = part.whole.stop_gradient  # the script may have frozen it
        if gradient is None or part.whole.stop_gradient:
            return
        if gradient.is_selected_rows():
            raise sparse(part.whole)
        part.add_gradient(part.own(_flat(part, gradient, kind(gradient))).copy(), kind(gradient))
        if self.level != "os":
            part.whole.clear_gradient(False)


def of(obj: Any) -> Shards | None:
    """The shards of a layer or an optimizer; None if it is not sharded."""
    found: Shards | None = getattr(obj, SHARDS, None)
    return found


def sparse(parameter: Any) -> StateError:
    """The error for an embedding's sparse gradient."""
    return StateError(f"the gradient of {parameter.name} is sparse, and cannot be sharded: sparse=False for embeddings")


class _RowBucket:
    """Flat arrays of one type, for one collective."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: list[ParameterRows] = []
        self.arrays: list[Any] = []
        self.size = 0

    def gather(self, ring: Ring) -> None:
        if len(self.parts) == 1:
            ring.gather_parts(self.arrays[0], self.parts[0].counts)
            return
        joined, flat = self._joined()
        for run in joined.runs():
            if run.rank == ring.rank:
                flat[run.here] = self.arrays[run.number][run.there]
        ring.gather_parts(flat, joined.parts)
        for run in joined.runs():
            if run.rank != ring.rank:
                self.arrays[run.number][run.there] = flat[run.here]

    def reduce(self, ring: Ring) -> Iterator[tuple[ParameterRows, Any]]:
        """Each part, and the mean of this rank's elements; overwrites the arrays."""
        bfloat16 = self.name == "bfloat16"
        if len(self.parts) == 1:
            part = self.parts[0]
            ring.reduce_scatter(self.arrays[0], part.counts, "mean", bfloat16)
            yield part, part.own(self.arrays[0]).copy()
            return
        joined, flat = self._joined()
        for run in joined.runs():
            flat[run.here] = self.arrays[run.number][run.there]
        ring.reduce_scatter(flat, joined.parts, "mean", bfloat16)
        own = {run.number: run.here for run in joined.runs() if run.rank == ring.rank}
        for number, part in enumerate(self.parts):
            yield part, flat[own.get(number, slice(0, 0))].copy()

    def _joined(self) -> tuple[rows.RowLayout, Any]:
        joined = rows.RowLayout(tuple(part.counts for part in self.parts))
        return joined, np.empty(sum(joined.parts), self.arrays[0].dtype)


def _buckets(found: Iterable[tuple[ParameterRows, Any, str]]) -> Iterator[_RowBucket]:
    """Large arrays alone, smaller ones together, by type."""
    open_ones: dict[str, _RowBucket] = {}
    for part, array, name in found:
        alone = array.nbytes >= ALONE_BYTES
        bucket = _RowBucket(name) if alone else open_ones.setdefault(name, _RowBucket(name))
        bucket.parts.append(part)
        bucket.arrays.append(array)
        bucket.size += array.nbytes
        if alone or bucket.size >= BUCKET_BYTES:
            yield bucket
            if not alone:
                del open_ones[name]
    yield from open_ones.values()


def _flat(part: ParameterRows, gradient: Any, name: str) -> Any:
    if gradient is None:
        return np.zeros(sum(part.counts), "uint16" if name == "bfloat16" else name)
    found = memory(gradient)
    return gradient.numpy().reshape(-1) if found is None else found.reshape(-1)


def _to_clip(parts: Sequence[ParameterRows]) -> list[tuple[str, Any]]:
    clipped = (part.row is not None and not part.row.stop_gradient and part.row.need_clip for part in parts)
    return [(part.whole.name, part.row.grad if yes else None) for part, yes in zip(parts, clipped, strict=True)]


def _nothing() -> None:
    return None
