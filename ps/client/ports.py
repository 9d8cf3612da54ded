"""What ``ps/client/frontend.py`` needs of a client and of a framework's module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edl.job_records import Training
from ps.client.dedup import DistinctKeys
from ps.client.member_count import MemberCount
from ps.client.push_intents import Records
from ps.rows import Rows as TableRows
from ps.spec import TableSpec

Array = NDArray[Any]
Keys = NDArray[np.int64]
Rows = NDArray[np.float32]


class ClientProtocol(Protocol):
    """The interface used here of ``ps.client.client.PsClient`` and ``ps.client.local.LocalClient``."""

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """The defined tables by name."""
        ...

    @property
    def statistics(self) -> dict[str, int]:
        """Counters since the start, by name."""
        ...

    @property
    def step(self) -> int:
        """Index of the current step, which the next push ends."""
        ...

    @property
    def training(self) -> Training:
        """How the job trains."""
        ...

    @property
    def restored(self) -> str:
        """The checkpoint that the parameters were restored from and its trainers' state, as JSON; empty if there is
        none."""
        ...

    def on_checkpoint(self, *, value: Any = None, name_data: Any = None, settle: Any = None) -> None:
        """Set the hooks for checkpoints."""
        ...

    def boundary(self) -> None:
        """Mark a step boundary; blocks here for a checkpoint."""
        ...

    def define(self, spec: TableSpec) -> None:
        """Add a table to the job. Raises ``PsError`` if a table of this name exists and differs."""
        ...

    @property
    def members(self) -> Sequence[object]:
        """The trainers of the membership epoch."""
        ...

    def watch_members(self) -> MemberCount:
        """Count members from now on, or from the next ``begin`` or ``rest`` on; until the next call."""
        ...

    def begin(self) -> None:
        """Become a member: take part in the steps from now on."""
        ...

    def rest(self) -> None:
        """Stop being a member until ``begin``; other trainers no longer wait for this one."""
        ...

    def pull(self, table: str, keys: Array, out: Array | None = None, *, insert: bool = True) -> Rows:
        """Pull rows for keys of any shape."""
        ...

    def read(self, table: str, keys: Array) -> Rows:
        """Read rows without side effects."""
        ...

    def scan(self, table: str) -> Iterator[TableRows]:
        """Iterate over all rows with their state."""
        ...

    def prefetch(self, table: str, keys: Array) -> None:
        """Fetch the rows of the next batch's keys in the background."""
        ...

    def push(
        self, grads: Mapping[str, tuple[Array, Array]], *, op: str = "grad", records: Records | None = None
    ) -> None:
        """Push gradients and end the step."""
        ...

    @property
    def number(self) -> int:
        """This trainer's number in the job; 0 without a job."""
        ...

    def fence(self, trainer: int) -> tuple[int, str]:
        """Stop a lost trainer from pushing anything new; return the number and records of its last push."""
        ...

    def pull_distinct(
        self, wanted: Mapping[str, Array], *, insert: bool = True
    ) -> dict[str, tuple[DistinctKeys, Rows]]:
        """Pull the rows of the distinct keys of several tables in one request to each pserver."""
        ...

    def push_and_pull(
        self, values: Mapping[str, tuple[Array, Array]], tables: Sequence[str], *, records: Records | None = None
    ) -> dict[str, Rows]:
        """Push, end the step, and return the updated rows of these tables, in one request to each pserver."""
        ...

    def begin_push(
        self, values: Mapping[str, tuple[Array, Array]], tables: Sequence[str], *, records: Records | None = None
    ) -> Callable[[], dict[str, Rows]]:
        """``push_and_pull`` in the background, where the mode allows it; the result waits for it."""
        ...

    def first(self, table: str, keys: Array, values: Array) -> None:
        """Set the weights of keys that have no row yet."""
        ...

    def set_lr(self, factor: float, table: str = "", step: int = 0) -> None:
        """Scale the LR of a table, or of all, relative to its optimizer's."""
        ...

    def save(self) -> str:
        """Write a checkpoint; return its folder."""
        ...

    def leave(self) -> None:
        """Finish pending work and leave the job. The client cannot be used afterwards."""
        ...


class Values(Protocol):
    """A module's parameters, in an order that is the same in all trainers."""

    name: str
    every: int

    def read(self) -> dict[str, Array]:
        """The parameters by name, as float32 arrays that may share the parameters' memory."""
        ...

    def write(self, values: Mapping[str, Array]) -> None:
        """Set the parameters' values in place."""
        ...

    def take_gradients(self) -> dict[str, Array] | None:
        """Take and clear the gradients, as float32 arrays by parameter name; None if no parameter has one."""
        ...
