"""``EDLCallback``: Transformers' ``Trainer`` continues from the memory of the launchers when the world changes."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from edl.integrations.versions import TestedVersions

try:
    import accelerate
    import torch
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from edl.integrations.trainer_bridge import TrainerBridge
    from edl.integrations.trainer_world import take_own_gpu
except ImportError as error:
    raise ImportError(
        f"edl.integrations.transformers cannot be used here ({error}): pip install 'edl[transformers]'"
    ) from error

from edl.errors import StateError
from edl.integrations.placeless import give_up_place, is_worker
from edl.integrations.replacing import replacing
from edl.integrations.step_boundary import check_options
from edl.worker.session import note

TESTED = (
    (TestedVersions("transformers", "5.23", "5.24"), transformers.__version__),
    (TestedVersions("accelerate", "1.15", "1.16"), accelerate.__version__),
)


class EDLCallback(TrainerCallback):  # type: ignore[misc]  # the package is not typed
    """Makes a ``Trainer`` fault-tolerant and elastic: create it at the top of the script, before
    ``TrainingArguments``, and give it to the trainer in ``callbacks``.

    ``global_batch``: samples of each step over all workers, in a world of any size. Without it: the job's
    ``--global-batch``, or else the trainer's own in the first world. ``copy_every``: copy the state only after every
    n-th step. ``save_every``: after every so many steps also write it to ``--checkpoint-dir``; 0: never.

    Without edl's launcher it does nothing, and says so on stderr.
    """

    def __init__(self, *, global_batch: int = 0, copy_every: int = 1, save_every: int = 0) -> None:
        """Raises ``StateError`` for a wrong argument, or when the process is in a world already."""
        self._options = {"global_batch": global_batch, "copy_every": copy_every, "save_every": save_every}
        check_options("EDLCallback", **self._options)
        self._bridge: TrainerBridge | None = None
        self.active = is_worker(os.environ)
        """Whether edl's launcher has started this process."""
        if not self.active:
            note("EDLCallback does nothing, because edl-run has not started this process")
            return
        for tested, installed in TESTED:
            tested.warn(installed)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        give_up_place(os.environ, "EDLCallback", grouped=torch.distributed.is_initialized())
        _intercept(local_rank)

    def train(self, trainer: Any, train: Any, resume_from_checkpoint: Any = None, trial: Any = None,
              ignore_keys_for_eval: Any = None) -> Any:  # fmt: skip
        """Called in place of ``Trainer.train``, with its arguments and itself. Raises ``StateError`` for a second
        training or one of a search."""
        if trial is not None:
            raise StateError("EDLCallback cannot be used in a hyperparameter search, which trains several models")
        if self._bridge is not None:
            raise StateError("trainer.train() was called twice: with EDLCallback a script trains once")
        self._bridge = TrainerBridge(trainer, train, **self._options)
        return self._bridge.run(resume_from_checkpoint, ignore_keys_for_eval)


def _intercept(local_rank: int) -> None:
    """Have ``Trainer.train`` of this process called through the trainer's ``EDLCallback``, and trainers created before
    there is a world: on this worker's GPU, and with ``fsdp``."""
    original, create = Trainer.train, Trainer.__init__
    if getattr(original, "_edl_intercepted", False):
        return

    @functools.wraps(create)
    def created(self: Any, *arguments: Any, **named: Any) -> None:
        call = inspect.signature(create).bind(self, *arguments, **named)
        args = call.arguments.get("args")
        if args is None:
            args = call.arguments["args"] = TrainingArguments(output_dir="tmp_trainer")  # as the trainer does
        if not torch.distributed.is_initialized():
            take_own_gpu(args, local_rank)
        # A trainer with fsdp wants more than one process.
        with replacing(args, {"fsdp": None}):
            create(*call.args, **call.kwargs)

    @functools.wraps(original)
    def train(self: Any, *arguments: Any, **named: Any) -> Any:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EDLCallback):
                return callback.train(self, original, *arguments, **named)
        raise StateError(
            "this Trainer has no EDLCallback, and the script has created one: give it to Trainer(callbacks=[...])"
        )

    train._edl_intercepted = True  # type: ignore[attr-defined]
    Trainer.train, Trainer.__init__ = train, created
