"""Which of a job's data streams a worker reads."""

from __future__ import annotations

from dataclasses import dataclass

from edl.errors import StateError


@dataclass(frozen=True, slots=True)
class StreamSplit:
    """A fixed number of streams, divided among the data-parallel ranks of a world as evenly as possible."""

    count: int
    rank: int
    world: int

    def __post_init__(self) -> None:
        """Raises ``StateError`` if there are fewer streams than ranks."""
        if self.count < self.world:
            raise StateError(
                f"a step has {self.count} batches (global_batch_size / local_batch_size), and this world has "
                f"{self.world} data-parallel workers: set a larger training.global_batch_size, or a smaller maximum of "
                "--nnodes"
            )

    @property
    def own(self) -> range:
        """The numbers of this rank's streams; consecutive."""
        return range(self.rank * self.count // self.world, (self.rank + 1) * self.count // self.world)

    @property
    def turns(self) -> int:
        """Batches that every rank has to make in a step: as many as the rank with the most streams."""
        return -(-self.count // self.world)
