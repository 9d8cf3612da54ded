"""What edl adds to Lightning's ``DDPStrategy``. Nothing here imports Lightning: it has two packages of the same
content, and a trainer accepts only the strategies of its own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch

import edl.torch as edl
from edl.errors import StateError
from edl.integrations.lightning_bridge import COMMIT, LightningBridge
from edl.integrations.lightning_refusals import refuse_schedulers
from edl.integrations.placeless import give_up_place, is_worker
from edl.integrations.step_boundary import check_options
from edl.integrations.versions import TestedVersions
from edl.torch import loading
from edl.worker.session import note

_FITTING = "fit"
"""Lightning's name of what ``trainer.fit()`` does."""


class LauncherEnvironment:
    """Where Lightning finds ranks and sizes: in what edl's launcher and ``run`` have put into the environment. A world
    of one until training begins. ``EDLStrategy`` brings it."""

    creates_processes_externally = True

    @property
    def main_address(self) -> str:
        """The address of the group, which edl has formed already."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port of the group, which edl has formed already."""
        return _number("MASTER_PORT", 0)

    @staticmethod
    def detect() -> bool:
        """Whether edl's launcher has started this process."""
        return is_worker(os.environ)

    def world_size(self) -> int:
        """Number of workers in the current world."""
        return _number("WORLD_SIZE", 1)

    def global_rank(self) -> int:
        """This worker's rank in the current world."""
        return _number("RANK", 0)

    def local_rank(self) -> int:
        """This worker's rank on its node."""
        return _number("LOCAL_RANK", 0)

    def node_rank(self) -> int:
        """This node's place in the current world."""
        return _number("GROUP_RANK", 0)

    def set_world_size(self, size: int) -> None:
        """Ignore what was computed from ``num_nodes`` and ``devices``."""

    def set_global_rank(self, rank: int) -> None:
        """Ignore what was computed from ``num_nodes`` and ``devices``."""


class ElasticStrategy:
    """Makes a ``Trainer`` fault-tolerant and elastic: ``Trainer(strategy=EDLStrategy())``.

    ``global_batch``: samples of each step over all workers, in a world of any size. Without it: the job's
    ``--global-batch``, or else the trainer's own in the first world. ``copy_every``: copy the state only after every
    n-th step. ``save_every``: after every so many steps also write it to ``--checkpoint-dir``; 0: never. Other options
    are those of ``DDPStrategy``, which follows among the bases.

    Without edl's launcher it is an ordinary ``DDPStrategy``, and says so on stderr.
    """

    environment: ClassVar[Callable[[], Any]]
    """The cluster environment of the package."""
    versions: ClassVar[str] = ""
    """A warning if another version of the package is installed than those that were tested."""

    def __init__(self, *, global_batch: int = 0, copy_every: int = 1, save_every: int = 0, **options: Any) -> None:
        """``options``: those of ``DDPStrategy``. Raises ``StateError`` for a wrong argument, or when the process is in
        a world already."""
        self._edl_options = {"global_batch": global_batch, "copy_every": copy_every, "save_every": save_every}
        check_options("EDLStrategy", **self._edl_options)
        self._bridge: LightningBridge | None = None
        self.active = is_worker(os.environ)
        """Whether edl's launcher has started this process."""
        if self.active:
            give_up_place(os.environ, "EDLStrategy", grouped=torch.distributed.is_initialized())
            options["cluster_environment"] = type(self).environment()
            if self.versions:
                warnings.warn(self.versions, stacklevel=2)
        else:
            note("EDLStrategy is an ordinary DDPStrategy, because edl-run has not started this process")
        super().__init__(**options)

    def fit(self, trainer: Any, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Called in place of what ``trainer.fit`` and its like do inside. Raises ``StateError`` for a second training,
        and before the first one."""
        if trainer.state.fn == _FITTING:
            if self._bridge is not None:
                raise StateError("trainer.fit() was called twice: with EDLStrategy a script trains once")
            self._bridge = LightningBridge(trainer, trainer.lightning_module, **self._edl_options)
            self._bridge.run(function, arguments, named)
            return None
        if self._bridge is None:
            raise StateError(
                f"trainer.{trainer.state.fn.value}() was called before trainer.fit(): there is no world before training"
            )
        return function(*arguments, **named)

    # --- what Lightning calls ----------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        if self.active:
            self._launcher = WorldLauncher(self)
        else:
            super()._configure_launcher()  # type: ignore[misc]

    @property
    def root_device(self) -> torch.device:
        """This worker's device; with one visible device for each worker, that one."""
        devices: list[torch.device] = self.parallel_devices  # type: ignore[attr-defined]
        rank: int = self.local_rank  # type: ignore[attr-defined]
        return devices[rank if rank < len(devices) else 0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For loaders of evaluations."""
        if not self.active:
            return dict(super().distributed_sampler_kwargs)  # type: ignore[misc]
        return {"num_replicas": self.world_size, "rank": self.global_rank}  # type: ignore[attr-defined]

    def _setup_model(self, model: Any) -> Any:
        if self._bridge is None:
            return super()._setup_model(model)  # type: ignore[misc]
        return edl.parallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)  # type: ignore[attr-defined]

    def setup(self, trainer: Any) -> None:
        """Prepare model and optimizers for the current world."""
        super().setup(trainer)  # type: ignore[misc]
        if self._bridge is not None and trainer.state.fn == _FITTING:
            refuse_schedulers(trainer)
            self._bridge.progress.restore_metrics()

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Read a checkpoint; that of edl is in memory."""
        if self._bridge is not None and checkpoint_path == COMMIT:
            return self._bridge.progress.checkpoint()
        return dict(super().load_checkpoint(checkpoint_path, *arguments, **named))  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore the optimizers, with the types of their states. Lightning converts those to the parameters' types, in
        which NAdam's products or averages in 32 bits are rounded."""
        optimizers: list[Any] = self.optimizers  # type: ignore[attr-defined]
        if self._bridge is None or not all(map(loading.keeps_as_torch, optimizers)):
            super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
            return
        for optimizer, kept in zip(optimizers, checkpoint["optimizer_states"], strict=True):
            loading.give_optimizer(optimizer, kept)

    def backward(self, closure_loss: Any, *arguments: Any, **named: Any) -> Any:
        """Weight the loss of a batch by its part of the step's samples."""
        weight = self._bridge.weight() if self._bridge is not None else 1.0
        loss = closure_loss if weight == 1.0 else closure_loss * weight
        return super().backward(loss, *arguments, **named)  # type: ignore[misc]

    def teardown(self) -> None:
        """Release what belongs to the training."""
        if self.active:
            self.model = self.lightning_module  # type: ignore[attr-defined]  # its wrapper may be of a past world
        super().teardown()  # type: ignore[misc]


class WorldLauncher:
    """What Lightning calls a launcher: it runs the function that does the work, here once in each world."""

    is_interactive_compatible = False

    def __init__(self, strategy: ElasticStrategy) -> None:
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *arguments: Any, trainer: Any = None, **named: Any) -> Any:
        """Run one of the trainer's functions."""
        return self._strategy.fit(trainer, function, arguments, named)

    def kill(self, signum: int) -> None:
        """There are no processes to end."""


def classes(module: str, environment: Any, strategy: Any, tested: TestedVersions, installed: str) -> tuple[Any, Any]:
    """``EDLEnvironment`` and ``EDLStrategy`` for one of the packages, as classes of ``module``: ``environment`` and
    ``strategy`` are its ``ClusterEnvironment`` and ``DDPStrategy``."""

    def derive(name: str, own: type, base: Any, **more: Any) -> Any:
        return type(name, (own, base), {"__module__": module, "__doc__": own.__doc__, **more})

    place = derive("EDLEnvironment", LauncherEnvironment, environment)
    warning = tested.warning(installed)
    return place, derive("EDLStrategy", ElasticStrategy, strategy, environment=place, versions=warning)


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))
