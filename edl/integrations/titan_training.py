"""One job of torchtitan through all worlds: its ``Trainer`` is built in each, and continues with the state that edl has
restored."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import edl.torch as edl
from edl.integrations.replacing import replacing
from edl.integrations.step_boundary import StepBoundary
from edl.integrations.titan_config import of_world
from edl.integrations.titan_rules import refuse
from edl.integrations.titan_streams import Positions


class TitanTraining:
    """Trains one job: a trainer in each world, one after another, with the same state."""

    def __init__(self, config: Any, *, copy_every: int, save_every: int) -> None:
        """Raises ``StateError`` for a configuration that cannot be continued."""
        refuse(config)
        self._config = config
        self._trainer: Any = None
        # Tensor parallelism is the innermost dimension of torchtitan's meshes: its ranks are consecutive.
        numbers = edl.RandomState(model_parallel=config.parallelism.tensor_parallel_degree)
        self._boundary = StepBoundary(numbers, save_every)
        self._state = edl.State(build=self._build, copy_every=copy_every, random=numbers)

    def run(self) -> Any:
        """Train to the end, through all worlds. Returns the trainer of the last one, closed."""
        # torchtitan does so before it forms a group of its own: it uses meshes in the backward pass.
        torch.autograd.set_multithreading_enabled(False)

        @edl.run
        def in_world(_: edl.State) -> Any:
            return self._in_world()

        return in_world(self._state)

    def _build(self, _: DeviceMesh) -> dict[str, Any]:
        trainer = self._trainer = of_world(self._config, edl.context().world_size).build()
        (model,) = trainer.model_parts
        optimizers = {f"optimizer{number}": one for number, one in enumerate(trainer.optimizers)}
        return {
            "model": model, **optimizers, "schedulers": trainer.lr_schedulers, "trainer": trainer,
            "data": Positions(trainer.dataloader),
        }  # fmt: skip

    def _in_world(self) -> Any:
        trainer, self._trainer = self._trainer, None  # it must be freed before the next one is built
        restored = trainer.step > 0
        if restored:
            _count_tokens(trainer)
        self._boundary.enter(trainer.step)
        goes_on = trainer.should_continue_training
        more = True

        def before_step() -> bool:
            """torchtitan asks whether to continue when all work of a step is done: validation, its checkpoint."""
            nonlocal more
            more = bool(goes_on())
            self._before_step(trainer, more)
            return more

        try:
            with (
                replacing(trainer, {"should_continue_training": before_step}),
                replacing(trainer.checkpointer, {"load": _nothing} if restored else {}),
            ):
                trainer.train()
            if more:
                self._out_of_data(trainer)
        finally:
            trainer.close()
        return trainer

    def _before_step(self, trainer: Any, more: bool) -> None:
        if self._boundary.first():
            if trainer.step > self._boundary.committed:  # it has loaded a checkpoint of its own
                trainer.dataloader.count_steps_before(trainer.step)
                self._boundary.committed = trainer.step
        elif self._boundary.due(trainer.step):
            _count_tokens(trainer)
            if more:
                self._boundary.commit(self._state, trainer.step)
            else:
                self._boundary.finish(self._state)

    def _out_of_data(self, trainer: Any) -> None:
        """The data ended before the steps did: torchtitan has counted the step that it then canceled."""
        trainer.step = self._boundary.committed
        self._boundary.finish(self._state)


def _count_tokens(trainer: Any) -> None:
    """Without what filled up the batches of a step, and with what the streams gave to other workers."""
    trainer.ntokens_seen = trainer.dataloader.tokens // trainer.parallel_dims.cp


def _nothing(*_: Any, **__: Any) -> bool:
    """Stand in for loading a checkpoint: everything is restored already."""
    return False
