"""``accumulate``: steps made of micro-batches on any number of workers, with gradients weighted exactly.

After the last ``step.backward`` of a step, every worker's gradients are Σ weight · gradient of the micro-batch's mean
loss, over all micro-batches of all workers: the gradient of the mean loss over all samples of the step. Data-parallel
wrappers divide by the number of workers, so each loss is multiplied by weight times that number.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from edl.arithmetic.adascale import AdaScale
from edl.errors import StateError
from edl.worker import hyper, logical, lr
from edl.worker.logical import Branches, Part, Streams
from edl.worker.steps import Share, StepLoader


class DataParallelModel(Protocol):
    """A model and its data-parallel wrapper, as a framework implements them."""

    workers: int
    """Number of workers that the wrapper averages over; 1 for a plain model."""

    def check_workers(self) -> None:
        """Raise ``StateError`` for a plain model among several workers, which averages nothing."""
        ...

    def apart(self) -> contextlib.AbstractContextManager[Any]:
        """Context for passes that only accumulate gradients on this worker."""
        ...

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """Context for the last passes of a step, which average over the workers."""
        ...

    def must_average(self) -> bool:
        """Whether the next pass has to average over the workers, even if others of the step follow."""
        ...

    def backward(self, loss: Any, factor: float) -> None:
        """Add ``factor`` times the gradient of the loss."""
        ...

    def backward_of_nothing(self, loss: Any) -> None:
        """Add a gradient of exactly 0, whatever the loss, and take part in the other workers' collectives, in those
        of modules, too."""
        ...

    def conclude(self) -> None:
        """Average over the workers after the last backward pass, unless that pass has already done it."""
        ...

    def value(self, loss: Any, factor: float) -> Any:
        """``factor`` times the loss, without its graph and the loss scale."""
        ...

    def loss_scale(self) -> float:
        """What the script's gradient scaler multiplies losses by now; 1 without one."""
        ...

    def listen(self) -> None:
        """Record the squared gradient norm of each further backward pass. Idempotent."""
        ...

    def heard(self) -> float:
        """The squared norm of what the last backward pass added."""
        ...

    def square(self) -> float:
        """The squared norm of the current gradients."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """The data of every worker, by rank. A collective."""
        ...

    def copy_buffers(self) -> Any:
        """A copy of the model's buffers (its non-parameter state)."""
        ...

    def set_buffers(self, saved: Any) -> None:
        """Restore what ``copy_buffers`` returned."""
        ...

    def close(self) -> None:
        """Restore the model to its original condition."""
        ...


class LogicalRankModel(Protocol):
    """The additional operations for logical ranks."""

    workers: int
    """World size."""

    def send_buffers(self, saved: Any, root: int) -> None:
        """Set all workers' buffers to those saved on the root. A collective."""
        ...

    def random(self) -> Any:
        """The state of all random number generators."""
        ...

    def set_random(self, saved: Any) -> None:
        """Restore what ``random`` returned."""
        ...

    def reseed(self, key: bytes) -> None:
        """Seed all generators from 64 bytes."""
        ...

    def begin_step(self) -> None:
        """Remove all gradients, and note which parameters are trained in this step."""
        ...

    def take(self) -> tuple[bytes, list[Any]]:
        """Remove the gradients from the parameters: flags for those that have one, and the values as a few flat
        arrays."""
        ...

    def give(self, used: bytes, arrays: list[Any]) -> None:
        """Put back what ``take`` returned."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """The data of every worker, by rank. A collective."""
        ...

    def sizes(self) -> list[int]:
        """Number of elements of each flat array."""
        ...

    def blank(self, array: int, rows: int, columns: int) -> Any:
        """An uninitialised matrix of the same kind as one flat array."""
        ...

    def gather(self, sent: Any) -> Any:
        """The equally sized arrays of all workers, by rank. A collective."""
        ...

    def squared(self, arrays: list[Any]) -> float:
        """The squared norm of these arrays."""
        ...


class GradientMethod(Protocol):
    """A method that turns the micro-batches of steps into gradients."""

    def begin(self, share: Share) -> None:
        """Prepare for a micro-batch that is about to be delivered."""
        ...

    def backward(self, share: Share, loss: Any) -> None:
        """Process the loss of the current micro-batch."""
        ...

    def mean_loss(self) -> float:
        """The mean loss over the last complete step's samples, the same on all workers."""
        ...

    def close(self) -> None:
        """Clean up after the last micro-batch, even after an error."""
        ...


class Step:
    """One step: iterate over it to get this worker's micro-batches, and call ``backward`` once for each."""

    def __init__(
        self,
        first: tuple[Any, Share],
        rest: Iterator[tuple[Any, Share]],
        method: GradientMethod,
        model: DataParallelModel,
    ) -> None:
        self.samples = first[1].total
        """Number of samples in the whole step, over all workers."""
        self.micros = first[1].micros
        """Number of micro-batches per worker."""
        self.loss: Any = 0.0
        """This worker's part of the mean loss over the step's samples, without a graph; the parts of all workers add up
        to it."""
        self.finished = False
        """Whether the gradients are complete on all workers."""
        self._next: tuple[Any, Share] | None = first
        self._rest, self._method, self._model = rest, method, model
        self._share: Share | None = None
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        if self._next is None:
            raise StateError("a step can be iterated over only once")
        while self._next is not None:
            batch, share = self._next
            if share.micro != self._done or share.micros != self.micros:
                raise StateError(
                    f"the loader gave micro-batch {share.micro} of {share.micros} where {self._done} of {self.micros} "
                    "was due: a step has to be taken whole, from its first micro-batch"
                )
            self._next = None
            self._share = share
            self._method.begin(share)
            yield batch
            self.check_backward()
            if not share.last:
                self._next = next(self._rest, None)
                if self._next is None:
                    raise StateError(f"the loader ended after {self._done} of a step's {self.micros} micro-batches")

    def backward(self, loss: Any) -> None:
        """Call this instead of ``loss.backward()``. ``loss``: the mean over the micro-batch. Raises ``StateError`` if
        it is called more than once per micro-batch."""
        share = self._share
        if share is None:
            raise StateError(
                "step.backward() must be called once for each micro-batch of the step: add several losses up first"
            )
        if share.samples:
            self.loss = self.loss + self._model.value(loss, share.weight)
        self._method.backward(share, loss)
        self._share = None
        self._done += 1
        self.finished = share.last

    def mean_loss(self) -> float:
        """The mean loss over all samples of the step, the same on all workers. A small collective: all workers call it,
        after the last ``backward``."""
        if not self.finished:
            raise StateError("step.mean_loss() is called after the last micro-batch's step.backward()")
        return self._method.mean_loss()

    def check_backward(self) -> None:
        """Raise ``StateError`` when ``backward`` was not called for the current micro-batch."""
        if self._share is not None:
            raise StateError(
                f"no step.backward() for micro-batch {self._share.micro} of {self.micros}: every micro-batch needs "
                "one, even if its loss is irrelevant; the other workers wait for it"
            )

    def check_finished(self) -> None:
        """Raise ``StateError`` when the step was left before its end."""
        self.check_backward()
        if not self.finished:
            raise StateError(
                f"a step was left after {self._done} of its {self.micros} micro-batches: its gradients are incomplete. "
                "Let the inner loop run to its end; to stop early, leave the outer loop after optimizer.step()"
            )


_current: Step | None = None


def check_finished() -> None:
    """Raise ``StateError`` when the gradients of the current step are incomplete. Called before gradients are used."""
    if _current is not None:
        _current.check_finished()


def begin(
    loader: StepLoader,
    model: DataParallelModel,
    logical_model: Callable[[], LogicalRankModel],
    noise: AdaScale | None,
    seed: int,
    first_step: int,
) -> Iterator[Step]:
    """The iterator that a framework's ``accumulate`` returns: by logical ranks if the settings prescribe them, else
    averaged."""
    measured, ranks = lr.chosen_noise(noise), hyper.current().logical_ranks
    if ranks:
        all_workers = logical_model()
        if all_workers.workers > ranks:
            raise StateError(f"--logical-ranks={ranks} does not fit {all_workers.workers} workers: each needs one")
        if model.must_average():
            raise StateError(
                f"--logical-ranks={ranks}: the model was wrapped with static_graph=True, which has to average over the "
                "workers in its first pass; leave that out"
            )
        streams = Streams(seed, first_step)
        return run_steps(loader, model, Logical(model, all_workers, measured, streams))
    model.check_workers()
    return run_steps(loader, model, Averaged(model, measured))


def run_steps(loader: StepLoader, model: DataParallelModel, method: GradientMethod) -> Iterator[Step]:
    """The rest of the loader's epoch, step by step."""
    global _current
    rest = iter(loader.shares())
    step: Step | None = None
    try:
        for first in rest:
            _current = step = Step(first, rest, method, model)
            yield step
            step.check_finished()
    finally:
        if _current is step:  # else another loop has begun before this one was freed
            _current = None
        method.close()
        model.close()
        close = getattr(rest, "close", None)
        if close is not None:
            close()


def measure(noise: AdaScale, share: Share, parts: int, mean_of_squares: float, square: float, scale: float) -> None:
    """Give a step's gradients to AdaScale: the sum of the parts' squared norms by weight, and that of their mean.
    ``scale``: the loss scale, by which all of these gradients are multiplied."""
    if scale != 1.0 and not math.isfinite(square):
        return  # the gradient scaler skips the step
    noise.measured(parts, share.total, mean_of_squares / scale**2, square / scale**2)
    noise.advance(share.total, lr.scale(share.total, share.full))


def found_scaler(given: Any, kind: type[Any], enabled: Callable[[Any], bool]) -> Any:
    """The gradient scaler whose losses ``backward`` gets: the given one, else the one in the script's ``State``; None
    if there is none. Raises ``StateError`` if the state has several that are enabled."""
    if given is not None:
        return given
    found = {name: one for name, one in lr.in_state(kind).items() if enabled(one)}
    if len(found) > 1:
        raise StateError(
            f"the State has several gradient scalers ({', '.join(sorted(found))}): give the one that scales the losses "
            "of this loop, accumulate(…, scaler=…)"
        )
    return next(iter(found.values()), None)


class Averaged:
    """Gradients are averaged over the workers by the wrapper."""

    def __init__(self, model: DataParallelModel, noise: AdaScale | None) -> None:
        self._model = model
        self._noise = noise
        self._inside = contextlib.ExitStack()
        self._buffers: Any = None
        self._squares = self._loss = 0.0
        self._parts = 0
        self._losses: list[Any] = []

    def begin(self, share: Share) -> None:
        """Keep all passes but the last of a step local to this worker, as far as the wrapper can."""
        if share.micro == 0:
            self._squares, self._parts, self._losses = 0.0, 0, []
            if self._noise is not None:
                self._model.listen()
        # An average stays what it is when it is averaged again with what later passes have added.
        together = share.last or self._model.must_average()
        self._inside.enter_context(self._model.together() if together else self._model.apart())
        self._buffers = None if share.samples else self._model.copy_buffers()

    def backward(self, share: Share, loss: Any) -> None:
        """Accumulate a micro-batch. The loss of padding may be anything, even NaN, which no factor would cancel."""
        model = self._model
        if share.samples:
            factor = share.weight * model.workers
            model.backward(loss, factor)
            self._losses.append(model.value(loss, share.weight))
            if self._noise is not None:
                self._parts += 1
                self._squares += model.heard() / (factor * model.workers)
        else:
            model.backward_of_nothing(loss)
        if share.last:
            model.conclude()
        self.close()
        if share.last and self._noise is not None:
            self._measure(self._noise, share)

    def mean_loss(self) -> float:
        """The mean loss over the step, by a small collective."""
        mine = float(sum(self._losses)) if self._losses else 0.0
        return sum(float(json.loads(data)) for data in self._model.exchange(json.dumps(mine).encode()))

    def close(self) -> None:
        """Leave the wrapper's context, and undo the effect of padding on the buffers."""
        self._inside.close()
        if self._buffers is not None:
            self._model.set_buffers(self._buffers)
            self._buffers = None

    def _measure(self, noise: AdaScale, share: Share) -> None:
        mine = [self._parts, self._squares, self._model.square()]
        all_of_them = [json.loads(data) for data in self._model.exchange(json.dumps(mine).encode())]
        parts, squares = sum(one[0] for one in all_of_them), sum(one[1] for one in all_of_them)
        # Use the first worker's value, so that all have the same bits even on different machines.
        measure(noise, share, parts, squares, all_of_them[0][2], self._model.loss_scale())


class Logical:
    """Each logical rank computes its own gradient, from the same buffers and with its own random numbers."""

    def __init__(
        self, model: DataParallelModel, logical_model: LogicalRankModel, noise: AdaScale | None, streams: Streams
    ) -> None:
        self._model, self._logical_model = model, logical_model
        self._noise = noise
        self._streams = streams
        self._inside = contextlib.ExitStack()
        self._random: Any = None
        self._parts: list[Part] = []
        self._forget()

    def _forget(self) -> None:
        self._branches, self._part = Branches(), Part()
        self._buffers: Any = None
        self._undo: Any = None
        self._own_buffers: dict[int, Any] = {}
        self._rank, self._micro = -1, 0
        self._samples, self._loss = 0, 0.0

    def begin(self, share: Share) -> None:
        """Keep all passes local to this worker."""
        if share.micro == 0:
            self._forget()
            self._streams.begin()
            self._buffers = self._model.copy_buffers()
            self._logical_model.begin_step()
        if share.logical != self._rank:
            self._finish_rank()
            self._rank = share.logical
        if self._micro == 0:
            self._model.set_buffers(self._buffers)
        self._undo = None if share.samples else self._model.copy_buffers()
        self._inside.enter_context(self._model.apart())
        self._random = self._logical_model.random()
        self._logical_model.reseed(self._streams.key(share.logical, self._micro))
        self._micro += 1

    def backward(self, share: Share, loss: Any) -> None:
        """Accumulate a micro-batch; after the last one, the sum of all gradients is computed."""
        if share.samples:
            self._model.backward(loss, share.weight)
            self._samples += share.samples
            self._loss += float(self._model.value(loss, 1.0)) * share.samples
        self.close()
        if share.last:
            self._finish_rank()
            self._finish_step(share)

    def mean_loss(self) -> float:
        """The mean loss over the step. All losses are known already; they are added in the order of the logical
        ranks."""
        losses = {rank: loss for part in self._parts for rank, loss in part.losses.items()}
        samples = sum(count for count, _ in losses.values())
        return sum(count / samples * loss for _, (count, loss) in sorted(losses.items()))

    def close(self) -> None:
        """Restore the script's random numbers, and undo the effect of padding on the buffers."""
        self._inside.close()
        if self._undo is not None:
            self._model.set_buffers(self._undo)
            self._undo = None
        if self._random is not None:
            self._logical_model.set_random(self._random)
            self._random = None

    def _finish_rank(self) -> None:
        if self._samples:
            used, arrays = self._logical_model.take()
            rank, part = self._rank, self._part
            if rank < 0 or rank in part.losses:
                raise StateError(f"the loader gave unexpected micro-batches of logical rank {rank}")
            part.losses[rank] = (self._samples, self._loss / self._samples)
            part.used = bytes(map(max, part.used, used)) if part.used else used
            if self._noise is not None:
                part.squares[rank] = self._logical_model.squared(arrays)
            if not self._own_buffers:
                self._own_buffers[rank] = self._model.copy_buffers()
            self._branches.add(rank, arrays)
        self._micro, self._samples, self._loss = 0, 0, 0.0

    def _finish_step(self, share: Share) -> None:
        logical_model, part = self._logical_model, self._part
        part.nodes = sorted(self._branches.nodes)
        self._parts = parts = [Part.decode(data) for data in logical_model.exchange(part.encode())]
        logical.check_blocks(parts)
        held = [one.nodes for one in parts]
        arrays = logical.sum_over_workers(
            self._branches, held, logical_model.sizes(), logical_model.blank, logical_model.gather
        )
        logical_model.give(logical.used_by_any(parts), arrays)
        root, _ = min(((worker, rank) for worker, one in enumerate(parts) for rank in one.losses), key=lambda at: at[1])
        logical_model.send_buffers(next(iter(self._own_buffers.values()), self._buffers), root)
        if self._noise is not None:
            self._measure(self._noise, share, logical_model.squared(arrays))
        self._branches = Branches()
        self._streams.step()

    def _measure(self, noise: AdaScale, share: Share, square: float) -> None:
        losses = {rank: loss for part in self._parts for rank, loss in part.losses.items()}
        squares = {rank: square for part in self._parts for rank, square in part.squares.items()}
        # Each is of a gradient times its weight, and is weighted by it.
        weighed = sum(squares[rank] * share.total / losses[rank][0] for rank in sorted(squares))
        measure(noise, share, len(squares), weighed, square, self._model.loss_scale())
