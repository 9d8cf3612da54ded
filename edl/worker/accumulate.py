"""``accumulate``: steps that are made of micro-batches on any number of workers, with gradients weighed exactly.

After the last ``step.backward`` of a step every worker's gradients are Σ weight · gradient of the micro-batch's mean
loss, over all micro-batches of all workers: the gradient of the mean loss over all samples of the step. Wrappers for
data parallelism divide by the number of workers, so each loss is multiplied by weight times that number.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from edl.arithmetic.adascale import AdaScale
from edl.errors import StateError
from edl.worker import hyper, logical, lr
from edl.worker.logical import Branches, Part, Streams
from edl.worker.steps import Share, StepLoader


class Trainee(Protocol):
    """A model and its wrapper for data parallelism, as a framework sees them."""

    workers: int
    """Workers that the wrapper averages over; 1 for a plain model."""

    def check_workers(self) -> None:
        """Raises ``StateError`` for a plain model among several workers: it averages nothing."""
        ...

    def apart(self) -> contextlib.AbstractContextManager[Any]:
        """Forward and backward passes in here only add up gradients on this worker."""
        ...

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """For the last passes of a step."""
        ...

    def backward(self, loss: Any, factor: float) -> None:
        """Add ``factor`` times the gradient."""
        ...

    def backward_of_nothing(self, loss: Any) -> None:
        """Add a gradient of exactly 0, whatever the loss is, and take part in what the others do."""
        ...

    def conclude(self) -> None:
        """After the last backward pass: average over the workers, unless that has happened in it."""
        ...

    def value(self, loss: Any, factor: float) -> Any:
        """``factor`` times the loss, without its graph."""
        ...

    def listen(self) -> None:
        """From now on remember the square of each backward pass's gradient. Twice is the same as once."""
        ...

    def heard(self) -> float:
        """The square of the norm of what the last backward pass has added."""
        ...

    def square(self) -> float:
        """The square of the norm of the gradients as they are now."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """What every worker hands over, by rank."""
        ...

    def copy_buffers(self) -> Any:
        """What the model keeps beside its parameters."""
        ...

    def set_buffers(self, saved: Any) -> None:
        """The inverse."""
        ...

    def close(self) -> None:
        """Leave the model as it was found."""
        ...


class LogicalTrainee(Protocol):
    """What logical ranks need beyond that."""

    workers: int
    """All of the world."""

    def send_buffers(self, saved: Any, root: int) -> None:
        """Every worker's buffers become those that the root has saved."""
        ...

    def random(self) -> Any:
        """Where all generators of random numbers stand."""
        ...

    def set_random(self, saved: Any) -> None:
        """The inverse."""
        ...

    def reseed(self, key: bytes) -> None:
        """Begin all of them anew from 64 bytes."""
        ...

    def take(self) -> tuple[bytes, list[Any]]:
        """Take the gradients off the parameters: which ones have one, and all of them as a few flat arrays."""
        ...

    def give(self, used: bytes, arrays: list[Any]) -> None:
        """The inverse."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """As above."""
        ...

    def sizes(self) -> list[int]:
        """Elements of each flat array."""
        ...

    def blank(self, array: int, rows: int, columns: int) -> Any:
        """A matrix of the kind of one flat array."""
        ...

    def gather(self, sent: Any) -> Any:
        """The equally large arrays of all workers, by rank."""
        ...

    def squared(self, arrays: list[Any]) -> float:
        """The square of the norm."""
        ...


class Way(Protocol):
    """How the micro-batches of steps become gradients."""

    def begin(self, share: Share) -> None:
        """A micro-batch is about to be handed out."""
        ...

    def backward(self, share: Share, loss: Any) -> None:
        """Its loss is there."""
        ...

    def mean_loss(self) -> float:
        """The mean over the last complete step's samples, the same on all workers."""
        ...

    def close(self) -> None:
        """No micro-batch is under way any more, for whatever reason."""
        ...


class Step:
    """One step: iterate over it for this worker's micro-batches, and call ``backward`` once for each."""

    def __init__(self, first: tuple[Any, Share], rest: Iterator[tuple[Any, Share]], way: Way, trainee: Trainee) -> None:
        self.samples = first[1].total
        """Of the whole step, over all workers."""
        self.micros = first[1].micros
        """Micro-batches of each worker."""
        self.loss: Any = 0.0
        """This worker's part of the mean loss over the step's samples, without a graph: the parts of all workers add up
        to it."""
        self.finished = False
        """The gradients are complete, on all workers."""
        self._next: tuple[Any, Share] | None = first
        self._rest, self._way, self._trainee = rest, way, trainee
        self._share: Share | None = None
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        if self._next is None:
            raise StateError("a step is iterated over a second time")
        while self._next is not None:
            batch, share = self._next
            if share.micro != self._done or share.micros != self.micros:
                raise StateError(
                    f"the loader gave micro-batch {share.micro} of {share.micros} where {self._done} of {self.micros} "
                    "was due: a step has to be taken whole, from its first micro-batch"
                )
            self._next = None
            self._share = share
            self._way.begin(share)
            yield batch
            self.check_backward()
            if not share.last:
                self._next = next(self._rest, None)
                if self._next is None:
                    raise StateError(f"the loader ended after {self._done} of a step's {self.micros} micro-batches")

    def backward(self, loss: Any) -> None:
        """Instead of ``loss.backward()``. ``loss``: the mean over the micro-batch."""
        share = self._share
        if share is None:
            raise StateError(
                "step.backward() is called once for each micro-batch that the step has handed out: "
                "where there are several losses, add them up"
            )
        if share.samples:
            self.loss = self.loss + self._trainee.value(loss, share.weight)
        self._way.backward(share, loss)
        self._share = None
        self._done += 1
        self.finished = share.last

    def mean_loss(self) -> float:
        """The mean loss over all samples of the step, the same on all workers. All of them call it, after the last
        ``backward``: they exchange a number."""
        if not self.finished:
            raise StateError("step.mean_loss() is called after the last micro-batch's step.backward()")
        return self._way.mean_loss()

    def check_backward(self) -> None:
        """Raises ``StateError`` when a micro-batch was handed out and its ``backward`` not called."""
        if self._share is not None:
            raise StateError(
                f"no step.backward() for micro-batch {self._share.micro} of {self.micros}: every micro-batch needs "
                "one, also when its loss is of no interest; the other workers wait for it"
            )

    def check_finished(self) -> None:
        """Raises ``StateError`` when the step was left before its end."""
        self.check_backward()
        if not self.finished:
            raise StateError(
                f"a step was left after {self._done} of its {self.micros} micro-batches: its gradients are incomplete. "
                "Let the inner loop run to its end; to stop early, leave the outer loop after optimizer.step()"
            )


_current: Step | None = None


def check_finished() -> None:
    """For what uses gradients. Raises ``StateError`` when those of the current step are incomplete."""
    if _current is not None:
        _current.check_finished()


def begin(
    loader: StepLoader,
    trainee: Trainee,
    logical_trainee: Callable[[], LogicalTrainee],
    noise: AdaScale | None,
    seed: int,
    first_step: int,
) -> Iterator[Step]:
    """What ``accumulate`` of a framework returns: by logical ranks if the settings prescribe them, else averaged."""
    measured, ranks = lr.chosen_noise(noise), hyper.current().logical_ranks
    if ranks:
        all_workers = logical_trainee()
        if all_workers.workers > ranks:
            raise StateError(f"--logical-ranks={ranks} cannot live on {all_workers.workers} workers: each needs one")
        streams = Streams(seed, first_step)
        return run_steps(loader, trainee, Logical(trainee, all_workers, measured, streams))
    trainee.check_workers()
    return run_steps(loader, trainee, Averaged(trainee, measured))


def run_steps(loader: StepLoader, trainee: Trainee, way: Way) -> Iterator[Step]:
    """The rest of the loader's epoch, step by step."""
    global _current
    rest = iter(loader.shares())
    step: Step | None = None
    try:
        for first in rest:
            _current = step = Step(first, rest, way, trainee)
            yield step
            step.check_finished()
    finally:
        if _current is step:  # else another loop has begun before this one was freed
            _current = None
        way.close()
        trainee.close()
        close = getattr(rest, "close", None)
        if close is not None:
            close()


class Averaged:
    """Gradients are averaged over the workers by the wrapper."""

    def __init__(self, trainee: Trainee, noise: AdaScale | None) -> None:
        self._trainee = trainee
        self._noise = noise
        self._inside = contextlib.ExitStack()
        self._buffers: Any = None
        self._squares = self._loss = 0.0
        self._parts = 0
        self._losses: list[Any] = []

    def begin(self, share: Share) -> None:
        """Only the last passes of a step are seen by the others."""
        if share.micro == 0:
            self._squares, self._parts, self._losses = 0.0, 0, []
            if self._noise is not None:
                self._trainee.listen()
        self._inside.enter_context(self._trainee.together() if share.last else self._trainee.apart())
        self._buffers = None if share.samples else self._trainee.copy_buffers()

    def backward(self, share: Share, loss: Any) -> None:
        """A stand-in's loss may be anything, also NaN, which no factor would undo."""
        trainee = self._trainee
        if share.samples:
            factor = share.weight * trainee.workers
            trainee.backward(loss, factor)
            self._losses.append(trainee.value(loss, share.weight))
            if self._noise is not None:
                self._parts += 1
                self._squares += trainee.heard() / (factor * trainee.workers)
        elif share.last:
            trainee.backward_of_nothing(loss)
        if share.last:
            trainee.conclude()
        self.close()
        if share.last and self._noise is not None:
            self._measure(self._noise, share.total)

    def mean_loss(self) -> float:
        """A small collective."""
        mine = float(sum(self._losses)) if self._losses else 0.0
        return sum(float(json.loads(data)) for data in self._trainee.exchange(json.dumps(mine).encode()))

    def close(self) -> None:
        """Let the wrapper exchange again, and take back what a stand-in has done to the buffers."""
        self._inside.close()
        if self._buffers is not None:
            self._trainee.set_buffers(self._buffers)
            self._buffers = None

    def _measure(self, noise: AdaScale, samples: int) -> None:
        mine = [self._parts, self._squares, self._trainee.square()]
        all_of_them = [json.loads(data) for data in self._trainee.exchange(json.dumps(mine).encode())]
        parts, squares = sum(one[0] for one in all_of_them), sum(one[1] for one in all_of_them)
        # Of the first worker, so that all have the same bits even if their machines differ.
        noise.measured(parts, samples, squares, all_of_them[0][2])
        noise.advance(samples, lr.scale())


class Logical:
    """Each logical rank makes a gradient of its own, from the same buffers and with random numbers of its own."""

    def __init__(self, trainee: Trainee, model: LogicalTrainee, noise: AdaScale | None, streams: Streams) -> None:
        self._trainee, self._model = trainee, model
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
        """The others see nothing of any pass."""
        if share.micro == 0:
            self._forget()
            self._streams.begin()
            self._buffers = self._trainee.copy_buffers()
            self._model.take()
        if share.logical != self._rank:
            self._finish_rank()
            self._rank = share.logical
        if self._micro == 0:
            self._trainee.set_buffers(self._buffers)
        self._undo = None if share.samples else self._trainee.copy_buffers()
        self._inside.enter_context(self._trainee.apart())
        self._random = self._model.random()
        self._model.reseed(self._streams.key(share.logical, self._micro))
        self._micro += 1

    def backward(self, share: Share, loss: Any) -> None:
        """After the last one the sum of all gradients is there."""
        if share.samples:
            self._trainee.backward(loss, share.weight)
            self._samples += share.samples
            self._loss += float(self._trainee.value(loss, 1.0)) * share.samples
        self.close()
        if share.last:
            self._finish_rank()
            self._finish_step(share.total)

    def mean_loss(self) -> float:
        """All losses are here already; they are added up in the order of the logical ranks."""
        losses = {rank: loss for part in self._parts for rank, loss in part.losses.items()}
        samples = sum(count for count, _ in losses.values())
        return sum(count / samples * loss for _, (count, loss) in sorted(losses.items()))

    def close(self) -> None:
        """The script's own random numbers go on where they were, and a stand-in has done nothing."""
        self._inside.close()
        if self._undo is not None:
            self._trainee.set_buffers(self._undo)
            self._undo = None
        if self._random is not None:
            self._model.set_random(self._random)
            self._random = None

    def _finish_rank(self) -> None:
        if self._samples:
            used, arrays = self._model.take()
            rank, part = self._rank, self._part
            if rank < 0 or rank in part.losses:
                raise StateError(f"the loader gave micro-batches of logical rank {rank} where it should not have")
            part.losses[rank] = (self._samples, self._loss / self._samples)
            part.used = bytes(map(max, part.used, used)) if part.used else used
            if self._noise is not None:
                part.squares[rank] = self._model.squared(arrays)
            if not self._own_buffers:
                self._own_buffers[rank] = self._trainee.copy_buffers()
            self._branches.add(rank, arrays)
        self._micro, self._samples, self._loss = 0, 0, 0.0

    def _finish_step(self, total: int) -> None:
        model, part = self._model, self._part
        part.nodes = sorted(self._branches.nodes)
        self._parts = parts = [Part.decode(data) for data in model.exchange(part.encode())]
        logical.check_blocks(parts)
        held = [one.nodes for one in parts]
        arrays = logical.sum_over_workers(self._branches, held, model.sizes(), model.blank, model.gather)
        model.give(logical.used_by_any(parts), arrays)
        root, _ = min(((worker, rank) for worker, one in enumerate(parts) for rank in one.losses), key=lambda at: at[1])
        model.send_buffers(next(iter(self._own_buffers.values()), self._buffers), root)
        if self._noise is not None:
            self._measure(self._noise, total, model.squared(arrays))
        self._branches = Branches()
        self._streams.step()

    def _measure(self, noise: AdaScale, total: int, square: float) -> None:
        losses = {rank: loss for part in self._parts for rank, loss in part.losses.items()}
        squares = {rank: square for part in self._parts for rank, square in part.squares.items()}
        # Each is of a gradient times its weight, and counts by its weight.
        weighed = sum(squares[rank] * total / losses[rank][0] for rank in sorted(squares))
        noise.measured(len(squares), total, weighed, square)
        noise.advance(total, lr.scale())
