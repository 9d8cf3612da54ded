"""The loops over keys and rows: compiled by numba (``fast``), or in numpy (``plain``) where numba is missing.

Both do the same: first weights agree bit by bit, updates up to the order of a sum. ``EDL_PS_KERNELS`` chooses.
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

    from ps.store.rules import Layout
    from ps.store.shard_table import ShardTables, Split

SETTING = "EDL_PS_KERNELS"
NAMES = {"numba": "fast", "numpy": "plain"}


class Kernels(Protocol):
    """A module of kernels. Ranges of shards are held under their locks by the caller."""

    NAME: str

    def warm(self) -> None:
        """Compile or load all of them now, so that no request waits for it."""
        ...

    def shard_tables(self, layout: Layout) -> ShardTables:
        """Empty ones."""
        ...

    def adopt(self, shard_tables: ShardTables) -> ShardTables:
        """The same rows, in the same slots, for these kernels. Those of others are of no more use."""
        ...

    def split(self, keys: NDArray[np.int64], parts: int = 64) -> Split:
        """Keys by ranges of shards: so many, a power of two up to 64."""
        ...

    def find(self, shard_tables: ShardTables, split: Split, first: int, last: int) -> int:
        """Fill ``split.slots`` for the shards ``first .. last-1`` (one a range); how many keys have no row (-1)."""
        ...

    def pull(
        self, shard_tables: ShardTables, split: Split, part: int, out: NDArray[np.float32], step: int,
        times: NDArray[np.uint32] | None,
    ) -> int:  # fmt: skip
        """Find the keys of one range of shards, and copy rows to where each key was; first weights without a row.

        Unless ``step`` is negative, it becomes the last-seen step of each row found, and its frequency goes up by
        ``times`` (in the order in which the keys came; ``None``: 1 each).
        """
        ...

    def apply(
        self, shard_tables: ShardTables, split: Split, first: int, last: int, values: NDArray[np.float32], rule: int,
        numbers: NDArray[np.float64], nesterov: bool, step: int, mark: int,
    ) -> tuple[list[NDArray[np.int64]], int]:  # fmt: skip
        """Sum the values of each row and let the rule take them; slots of -1 are left out.

        Gives the slots of rows changed, shard by shard, and how many rows or values were damaged.
        """
        ...

    def first(self, layout: Layout, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """First weights of keys."""
        ...


def chosen(name: str = "") -> str:
    """``numba`` or ``numpy``: as asked for by name or by ``EDL_PS_KERNELS``, else numba where it is installed."""
    wanted = name or environment().get(SETTING, "")
    if wanted and wanted not in NAMES:
        raise SettingError(SETTING, wanted, f"must be one of {', '.join(NAMES)}")
    there = importlib.util.find_spec("numba") is not None
    if wanted == "numba" and not there:
        raise PsError(f"{SETTING}=numba, but numba is not installed. Install edl[ps], or say {SETTING}=numpy")
    return wanted or ("numba" if there else "numpy")


def at_once(name: str = "") -> str:
    """The same, but ``numpy`` as long as those of numba would have to be compiled first."""
    from ps.store.kernels.ready import ready

    wanted = chosen(name)
    return wanted if wanted != "numba" or ready() else "numpy"


def kernels(name: str = "") -> Kernels:
    """Those asked for by name or by ``EDL_PS_KERNELS``; else numba's, and numpy's where numba is not installed."""
    return importlib.import_module(f"ps.store.kernels.{NAMES[chosen(name)]}")
