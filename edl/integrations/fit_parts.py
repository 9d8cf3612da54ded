"""What takes the place of a ``paddle.Model``'s loss and network while ``EDLModel.fit`` trains or evaluates."""

from __future__ import annotations

from typing import Any

import paddle

import edl.paddle as edl


class WeightedLoss:
    """The loss of a model, times the weight of the current batch."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self.weight = 1.0
        self.seen: list[float] = []
        """The losses of the last call, without the weight."""

    def __call__(self, *arguments: Any) -> Any:
        """A list of the weighted losses, also if there is only one."""
        found = self._loss(*arguments)
        losses = list(found) if isinstance(found, (list, tuple)) else [found]
        self.seen = [float(one) for one in losses]
        return losses if self.weight == 1.0 else [one * self.weight for one in losses]


class DividedEvaluation:
    """An evaluation in which each worker computes a part of each batch, and all get the outputs of the whole batch: all
    of them compute the same loss and the same metrics.

    The parts are those of ``paddle.io.DistributedBatchSampler``, which fills up the last batch.
    """

    def __init__(self, network: Any, samples: int) -> None:
        """``samples``: number of samples in the data set."""
        self._network = network
        self._left = samples
        self.batch = 0
        """Number of samples in the current batch, over all workers."""

    def gather_labels(self, labels: list[Any]) -> list[Any]:
        """The labels of the next batch, of all workers."""
        found = [_concat(one if paddle.is_tensor(one) else paddle.to_tensor(one)) for one in labels]
        if found:
            self._begin(found[0].shape[0])
        return [one[: self.batch] for one in found]

    def __call__(self, *inputs: Any) -> Any:
        """The outputs of all workers for their inputs."""
        outputs = self._network(*inputs)
        several = isinstance(outputs, (list, tuple))
        found = [_concat(one) for one in (outputs if several else [outputs])]
        if not self.batch:  # a model without labels
            self._begin(found[0].shape[0])
        found = [one[: self.batch] for one in found]
        return found if several else found[0]

    def eval(self) -> None:
        """Set the network's evaluation mode."""
        self._network.eval()

    def end_batch(self) -> None:
        """The batch is evaluated."""
        self._left -= self.batch
        self.batch = 0

    def _begin(self, gathered: int) -> None:
        self.batch = min(gathered, self._left)


def _concat(part: Any) -> Any:
    return paddle.concat(edl.all_gather(part), axis=0)
