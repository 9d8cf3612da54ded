"""The arguments of a loader that concern its own work: sizes, mode and the conversion of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from data_service.formats.ragged import RaggedColumn, checked_pad
from data_service.loader.batching import Columns
from data_service.loader.worker_context import Convert, converted
from data_service.protocol.messages import INDEPENDENT, STEPS
from edl.errors import SettingError

MODES = {"steps": STEPS, "independent": INDEPENDENT, "free": INDEPENDENT}
"""Modes by the name that a script gives. ``free`` is the former name of ``independent``."""
MIXED, MIXED_INDEPENDENT = 16, 4
"""Default number of shards whose records are mixed: fewer for independent trainers, so that an epoch ends quickly."""
MIXED_BYTES = 1 << 30
"""Most bytes of shards that are mixed by default."""


@dataclass(frozen=True, slots=True)
class LoaderConfig:
    """How a loader works; its arguments that the launcher cannot set. Raises ``SettingError``."""

    batch_size: int
    """Samples per batch, unless the job prescribes other batches."""
    prefetch: int
    """Number of steps kept ready."""
    shuffle_shards: int | None
    """Number of open shards whose records are mixed; None: the default, limited by their size."""
    failures: int
    """Attempts to read a shard before it is skipped."""
    mode: str
    """A key of ``MODES``."""
    acknowledge: str | None
    """Independent mode: when a batch counts as used. ``next``: when the next one is requested; ``done``: when ``done``
    is called; None: as with ``done`` if there are parameter servers, otherwise as with ``next``."""

    def __post_init__(self) -> None:
        for option in ("batch_size", "prefetch", "shuffle_shards", "failures"):
            value = getattr(self, option)
            if value is not None and (not _is_integer(value) or value < 1):
                raise SettingError(option, value, "must be an integer of at least 1")
        if self.mode not in MODES:
            raise SettingError("mode", self.mode, "must be steps or independent")
        if self.acknowledge not in (None, "next", "done") or (self.acknowledge and not self.independent):
            raise SettingError("acknowledge", self.acknowledge, "must be next or done, and is for mode=independent")

    @property
    def independent(self) -> bool:
        """True if the mode is the independent one."""
        return MODES[self.mode] == INDEPENDENT

    @property
    def mixed_shards(self) -> int:
        """Most shards whose records are mixed."""
        return self.shuffle_shards or (MIXED_INDEPENDENT if self.independent else MIXED)

    @property
    def mixed_bytes(self) -> int:
        """No further shard is opened for mixing while the open ones take this many bytes; 0: unlimited."""
        return 0 if self.shuffle_shards else MIXED_BYTES


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


class BatchConversion:
    """Converts the records of a step to what the script gets. Called on the reading thread."""

    def __init__(
        self,
        transform: Callable[[dict[str, Any]], Any] | None,
        fill: Mapping[str, Any] | None,
        pad: Mapping[str, Any] | None,
    ) -> None:
        """``fill`` replaces nulls and ``pad`` fills up lists of varying length, by column. Raises ``SettingError``."""
        self._transform = transform
        self._fill = fill
        self._pad = checked_pad(dict(pad or {}))

    def columns(self, table: Any) -> Columns:
        """Convert a table of records to arrays."""
        from data_service.formats.arrays import to_numpy  # pyarrow takes a moment to load

        return to_numpy(table, self._fill)

    def finish(self, columns: Columns, tensor: Convert) -> Any:
        """Convert a micro-batch: copies of read-only arrays, padding, the script's ``transform``, then tensors."""
        # Unmixed records are read-only views of the file.
        whole = {name: array if array.flags.writeable else array.copy() for name, array in columns.items()}
        for name, array in whole.items():
            if isinstance(array, RaggedColumn):
                whole[name] = array.public(self._pad.get(name))
        return converted(whole if self._transform is None else self._transform(whole), tensor)
