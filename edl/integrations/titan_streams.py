"""torchtitan's data through worlds of any size: a fixed number of streams, which are divided among the workers.

A stream is the loader of one data-parallel rank, as torchtitan builds it for a job with as many ranks as there are
streams. Each step takes one batch of every stream. So a step has the same samples in every world, and each stream
continues at its own position on the worker that has it now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX

from edl.errors import StateError
from edl.integrations.long_lists import pack, unpack
from edl.integrations.stream_split import StreamSplit

_COUNT = "world_size"
"""torchtitan's name for the number of streams, beside which each loader has an entry of its own."""


class DataStreams(BaseDataLoader):  # type: ignore[misc]  # the package is not typed
    """The loader of one worker in one world: a batch of each of its streams in turn, then those of the next step."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """``loader``: the job's own. ``count``: number of streams."""

        loader: Any
        count: int

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, snapshot_every_n_steps: Any = None,
                 **named: Any) -> None:  # fmt: skip
        """Called by torchtitan, as for any loader. Raises ``StateError`` if a worker would have no stream."""
        del snapshot_every_n_steps  # positions are kept at every step
        self._count: int = config.count
        split = StreamSplit(config.count, dp_rank, dp_world_size)
        self._turns = split.turns
        self._loaders: dict[int, Any] = {
            number: config.loader.build(dp_world_size=config.count, dp_rank=number, snapshot_every_n_steps=1, **named)
            for number in split.own
        }
        self._tokens = dict.fromkeys(split.own, 0)
        self._steps_before: dict[int, int] = {}

    def count_steps_before(self, steps: int) -> None:
        """Count the tokens of so many steps that a checkpoint of torchtitan continues from; it has the number of one
        worker only, of a world of any size. Batches are taken to be as large as the next one."""
        self._steps_before = dict.fromkeys(self._loaders, steps)

    @property
    def tokens(self) -> int:
        """Labels that this worker's streams have given, on whatever worker they were."""
        return sum(self._tokens.values())

    def __iter__(self) -> Iterator[Any]:
        iterators = {number: iter(loader) for number, loader in self._loaders.items()}
        while True:
            batch: Any = None
            for number, iterator in iterators.items():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                self._tokens[number] += batch[1].numel() * (1 + self._steps_before.pop(number, 0))
                yield batch
            for _ in range(self._turns - len(iterators)):
                yield _empty(batch)

    # --- for torchtitan's checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As of the loaders of a job with as many ranks as there are streams."""
        found: dict[str, Any] = {_COUNT: self._count}
        for loader in self._loaders.values():
            found.update(loader.state_dict())
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of torchtitan."""
        for loader in self._loaders.values():
            loader.load_state_dict(state_dict)

    # --- for edl -----------------------------------------------------------------------------------------------------

    def positions(self) -> dict[str, Any]:
        """The positions of this worker's streams, as values that a ``State`` keeps."""
        return {
            str(number): {"position": pack(_position(loader)), "tokens": self._tokens[number]}
            for number, loader in self._loaders.items()
        }

    def continue_at(self, positions: dict[str, Any]) -> None:
        """Continue each own stream where any worker left it. Raises ``StateError`` if it is not there."""
        for number, loader in self._loaders.items():
            kept = positions.get(str(number))
            if kept is None:
                raise StateError(f"no position of data stream {number} was kept, only of: {', '.join(positions)}")
            _continue_at(loader, unpack(kept["position"]))
            self._tokens[number] = kept["tokens"]


class Positions:
    """The positions of the streams in a ``State``: every worker keeps those of its own, and is given all."""

    edl_union = True

    def __init__(self, streams: DataStreams) -> None:
        self._streams = streams

    def state_dict(self) -> dict[str, Any]:
        """Those of this worker's streams."""
        return {"count": self._streams._count, "streams": self._streams.positions()}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        """Raises ``StateError`` for positions in another number of streams."""
        if kept["count"] != self._streams._count:
            raise StateError(
                f"the state has positions in {kept['count']} streams of data, and global_batch_size / local_batch_size "
                f"is now {self._streams._count}: continue with the sizes that the job began with"
            )
        self._streams.continue_at(kept["streams"])


def _empty(batch: Any) -> Any:
    """A batch of the same shape that counts nothing: no label is valid, so its loss and gradients are 0. FSDP needs
    equally many batches from all workers. Raises ``StateError`` where labels have no such value."""
    inputs, labels = batch
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        raise StateError(
            "this world cannot divide the batches of a step evenly, and labels that are not tokens cannot be left out: "
            "use --node-unit, so that global_batch_size / local_batch_size is a multiple of the number of workers"
        )
    return dict(inputs), torch.full_like(labels, IGNORE_INDEX)


def _position(loader: Any) -> Any:
    """Without torchtitan's pickle around it."""
    return StatefulDataLoader.state_dict(loader) if _only_pickles(loader) else loader.state_dict()


def _continue_at(loader: Any, position: Any) -> None:
    if _only_pickles(loader):
        StatefulDataLoader.load_state_dict(loader, position)
    else:
        loader.load_state_dict(position)


def _only_pickles(loader: Any) -> bool:
    return getattr(type(loader), "state_dict", None) is ParallelAwareDataloader.state_dict
