"""The kernels, loops over keys and rows: compiled by numba (``fast``), or in numpy (``plain``) without numba.

Both give the same results: initial weights agree bit by bit, updates except for the order of summation.
``EDL_PS_KERNELS`` selects one.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Protocol

from edl.config import environment
from edl.errors import PsError, SettingError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ps.store.rules import TableLayout
    from ps.store.shard_table import ShardTables, Split

SETTING = "EDL_PS_KERNELS"
NAMES = {"numba": "fast", "numpy": "plain"}


class Kernels(Protocol):
    """Interface of a kernel module. The caller holds the locks of the shards that it passes."""

    NAME: str

    def warm(self) -> None:
        """Compile or load all kernels now, so that no request has to wait for it."""
        ...

    def shard_tables(self, layout: TableLayout) -> ShardTables:
        """New, empty shard tables."""
        ...

    def adopt(self, shard_tables: ShardTables) -> ShardTables:
        """Take over rows, keeping their slots, from other kernels' shard tables, which become invalid."""
        ...

    def split(self, keys: NDArray[np.int64], parts: int = 64) -> Split:
        """Group keys into ``parts`` ranges of shards, a power of two up to 64."""
        ...

    def find(self, shard_tables: ShardTables, split: Split, first: int, last: int) -> int:
        """Fill ``split.slots`` for the shards ``first .. last-1``, one per range. Returns the number of keys without a
        row (slot -1)."""
        ...

    def pull(
        self, shard_tables: ShardTables, split: Split, part: int, out: NDArray[np.float32], step: int,
        times: NDArray[np.uint32] | None,
    ) -> int:  # fmt: skip
        """Find one range's keys and copy rows, or initial weights, to the keys' original places. Returns the number of
        keys without a row.

        Unless ``step`` is negative, sets the last-seen step of each row found and adds ``times`` to its frequency (in
        the original order of keys; None: 1 each).
        """
        ...

    def apply(
        self, shard_tables: ShardTables, split: Split, first: int, last: int, values: NDArray[np.float32], rule: int,
        numbers: NDArray[np.float64], nesterov: bool, step: int, mark: int,
    ) -> tuple[list[NDArray[np.int64]], int]:  # fmt: skip
        """Sum the values of each row and apply the rule; slots of -1 are skipped.

        Returns the slots of changed rows by shard, and the number of damaged rows or values.
        """
        ...

    def first(self, layout: TableLayout, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Initial weights of keys."""
        ...


def chosen(name: str = "") -> str:
    """``numba`` or ``numpy``: by ``name``, else by ``EDL_PS_KERNELS``, else numba if installed. Raises ``SettingError``
    and ``PsError``."""
    wanted = name or environment().get(SETTING, "")
    if wanted and wanted not in NAMES:
        raise SettingError(SETTING, wanted, f"must be one of {', '.join(NAMES)}")
    there = importlib.util.find_spec("numba") is not None
    if wanted == "numba" and not there:
        raise PsError(f"{SETTING}=numba, but numba is not installed. Install edl[ps], or set {SETTING}=numpy")
    return wanted or ("numba" if there else "numpy")


def at_once(name: str = "") -> str:
    """Like ``chosen``, but ``numpy`` while numba's kernels would have to be compiled first."""
    from ps.store.kernels.ready import ready

    wanted = chosen(name)
    return wanted if wanted != "numba" or ready() else "numpy"


def kernels(name: str = "") -> Kernels:
    """The kernel module selected by ``chosen``."""
    return importlib.import_module(f"ps.store.kernels.{NAMES[chosen(name)]}")
