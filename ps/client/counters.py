"""Numbers that are counted per key beside an embedding, such as how often it was shown and clicked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import SettingError
from ps.client.frontend import part
from ps.client.layer_arguments import integer_keys, plain_array
from ps.spec import Eviction, Initial, InitMethod, Optimizer, TableSpec, UpdateRule


class Counters:
    """Counts by key, in a table of their own with the rule ``add``. They travel with the gradients of a step, so what
    holds for gradients holds for them: each record counts once. The counts of a key are on the pserver that has its
    row. They are exact up to 2**24, except in mode geo, where they are means over the trainers.

    ``name``: that of the table. ``columns``: their names. ``eviction``: give the same as to the embedding.
    """

    def __init__(
        self, name: str, columns: str | Sequence[str] = ("show", "click"), *, eviction: Eviction | None = None
    ) -> None:
        columns = (columns,) if isinstance(columns, str) else tuple(columns)
        if not columns or len(set(columns)) < len(columns):
            raise SettingError("columns", columns, "must be one or more different names")
        self.table, self.columns = name, columns
        rule, zeros = Optimizer(UpdateRule.ADD), Initial(InitMethod.ZEROS)
        part.declare(
            TableSpec(name, len(columns), rule, zeros, eviction=eviction if eviction is not None else Eviction())
        )

    def add(self, keys: Any, **values: Any) -> None:
        """Add to the counts of keys with this step: ``add(keys, show=1, click=labels)``. A value is a number, or an
        array that fits the keys' shape; columns that are not named stay. Raises ``SettingError``."""
        for name in values:
            if name not in self.columns:
                raise SettingError("column", name, f"must be one of {', '.join(self.columns)}")
        numbers = integer_keys(plain_array(keys), self.table).copy()  # the script may reuse its array before the step
        added = np.zeros((*numbers.shape, len(self.columns)), np.float32)
        for column, name in enumerate(self.columns):
            if name in values:
                given = plain_array(values[name])
                try:
                    added[..., column] = given
                except ValueError:
                    wanted = f"must be a number or fit the keys of shape {numbers.shape}"
                    raise SettingError(f"shape of {name}", given.shape, wanted) from None
        part.collect(self.table, numbers, added)

    def read(self, keys: Any) -> dict[str, NDArray[np.float32]]:
        """The counts of keys, by column, in the shape of the keys; 0 for keys that were never counted."""
        found = part.client.pull(self.table, integer_keys(plain_array(keys), self.table), insert=False)
        return {name: found[..., column] for column, name in enumerate(self.columns)}
