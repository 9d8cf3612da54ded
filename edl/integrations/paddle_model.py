"""``EDLModel``: ``paddle.Model`` continues from the memory of the launchers when the world changes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from edl.integrations.versions import TestedVersions

try:
    import paddle
    from paddle.io import DataLoader, Dataset
except ImportError as error:
    raise ImportError(
        f"edl.integrations.paddle_model cannot be used here ({error}): pip install 'edl[paddle]'"
    ) from error

from edl.errors import StateError
from edl.integrations.fit_batches import from_dataset, from_loader
from edl.integrations.fit_loop import FitLoop, FitOptions
from edl.integrations.fit_parts import DividedEvaluation
from edl.integrations.placeless import give_up_place, is_worker
from edl.integrations.replacing import replacing
from edl.integrations.step_boundary import check_options
from edl.worker.session import note

TESTED = (TestedVersions("paddlepaddle", "3.3", "3.4"), paddle.__version__)
_Model: Any = paddle.Model


class EDLModel(_Model):  # type: ignore[misc]  # Paddle's class has no useful types
    """``paddle.Model`` whose ``fit`` is fault-tolerant and elastic. Create it in place of ``paddle.Model``, at the top
    of the script; everything else stays as it is.

    ``global_batch``: samples of each step over all workers, in a world of any size. Without it: the job's
    ``--global-batch``, or else ``batch_size`` times ``accumulate_grad_batches`` times the size of the first world.
    ``copy_every``: copy the state only after every n-th step. ``save_every``: after every so many steps also write it
    to ``--checkpoint-dir``; 0: never.

    Without edl's launcher it is an ordinary ``paddle.Model``, and says so on stderr.
    """

    def __init__(self, network: Any, inputs: Any = None, labels: Any = None, *, global_batch: int = 0,
                 copy_every: int = 1, save_every: int = 0) -> None:  # fmt: skip
        """Raises ``StateError`` for a wrong argument, in static graph mode, or when the process is in a world
        already."""
        self._elastic = {"global_batch": global_batch, "copy_every": copy_every, "save_every": save_every}
        check_options("EDLModel", **self._elastic)
        self.active = is_worker(os.environ)
        """Whether edl's launcher has started this process."""
        self.divided: DividedEvaluation | None = None
        """The evaluation that is going on, if workers divide it."""
        if self.active:
            if not paddle.in_dynamic_mode():
                raise StateError("EDLModel trains in dynamic graph mode only: do not call paddle.enable_static()")
            tested, installed = TESTED
            tested.warn(installed)
            give_up_place(os.environ, "EDLModel", grouped=paddle.distributed.is_initialized())
        else:
            note("EDLModel is an ordinary paddle.Model, because edl-run has not started this process")
        super().__init__(network, inputs, labels)
        self._trained = False

    def fit(self, train_data: Any = None, eval_data: Any = None, batch_size: int | Sequence[int] = 1, epochs: int = 1,
            eval_freq: int = 1, log_freq: int = 10, save_dir: str | None = None, save_freq: int = 1, verbose: int = 2,
            drop_last: bool = False, shuffle: bool = True, num_workers: int = 0, callbacks: Any = None,
            accumulate_grad_batches: int = 1, num_iters: int | None = None) -> None:  # fmt: skip
        """As ``paddle.Model.fit``. Raises ``StateError`` for data that cannot be divided, or for a second training."""
        reporting = {"log_freq": log_freq, "save_dir": save_dir, "save_freq": save_freq, "verbose": verbose}
        if not self.active:
            super().fit(
                train_data, eval_data, batch_size, epochs, eval_freq, drop_last=drop_last, shuffle=shuffle,
                num_workers=num_workers, callbacks=callbacks, accumulate_grad_batches=accumulate_grad_batches,
                num_iters=num_iters, **reporting,
            )  # fmt: skip
            return
        if self._optimizer is None or self._loss is None:
            raise StateError("EDLModel.fit() was called before prepare(optimizer, loss)")
        if self._trained:
            raise StateError("EDLModel.fit() was called twice: a script trains once")
        sizes = [batch_size] * 2 if isinstance(batch_size, int) else list(batch_size)
        check_numbers(
            batch_size=min(sizes), epochs=epochs, eval_freq=eval_freq, accumulate_grad_batches=accumulate_grad_batches,
            num_iters=1 if num_iters is None else num_iters,
        )  # fmt: skip
        if isinstance(train_data, Dataset):
            data = from_dataset(train_data, batch_size=sizes[0], shuffle=shuffle, drop_last=drop_last,
                                num_workers=num_workers, places=self._place)  # fmt: skip
        else:
            data = from_loader(train_data)
        options = FitOptions(epochs, eval_data, sizes[1], eval_freq, num_workers, accumulate_grad_batches, num_iters,
                             callbacks, reporting)  # fmt: skip
        self._trained = True
        FitLoop(self, data, options, **self._elastic).run()

    def eval_batch(self, inputs: Any, labels: Any = None) -> Any:
        """As ``paddle.Model.eval_batch``; in ``fit`` with the parts of all workers."""
        divided = self.divided
        if divided is None:
            return super().eval_batch(inputs, labels)
        with paddle.no_grad(), replacing(self, {"network": divided}):
            gathered = divided.gather_labels(labels or [])
            found = super().eval_batch(inputs, gathered)
        self._adapter._merge_count["eval_batch"] = divided.batch
        divided.end_batch()
        return found

    def evaluate(self, eval_data: Any, batch_size: int = 1, log_freq: int = 10, verbose: int = 2, num_workers: int = 0,
                 callbacks: Any = None, num_iters: int | None = None) -> Any:  # fmt: skip
        """As ``paddle.Model.evaluate``; each worker evaluates all of the data."""
        return super().evaluate(
            self._whole(eval_data, batch_size, num_workers), batch_size, log_freq, verbose, num_workers, callbacks,
            num_iters,
        )  # fmt: skip

    def predict(self, test_data: Any, batch_size: int = 1, num_workers: int = 0, stack_outputs: bool = False,
                verbose: int = 1, callbacks: Any = None) -> Any:  # fmt: skip
        """As ``paddle.Model.predict``; each worker predicts all of the data."""
        return super().predict(
            self._whole(test_data, batch_size, num_workers), batch_size, num_workers, stack_outputs, verbose, callbacks
        )

    def _whole(self, data: Any, batch_size: int, num_workers: int) -> Any:
        """A loader of all of the data, since Paddle would take a part of it by this worker's rank."""
        if not self.active or not isinstance(data, Dataset):
            return data
        return DataLoader(data, batch_size=batch_size, num_workers=num_workers, places=self._place, return_list=True)


def check_numbers(**values: int) -> None:
    """Raise ``StateError`` for a number of ``fit`` below 1."""
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise StateError(f"EDLModel.fit({name}={value!r}): it must be an integer of at least 1")
