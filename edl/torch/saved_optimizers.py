"""Matches the groups of an optimizer with those that workers have saved, by the names of their parameters. Pure.

Workers of one stage of a pipeline have the same parameters. Other stages have others, perhaps with other options, such
as the learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from edl.checkpoint.reading.assembly import NAMES
from edl.torch import loading

OF_PARAMETERS = frozenset({"params", "param_names"})
"""Entries of a group that say which parameters it has. All others are its options."""


class SavedOptimizer:
    """What one worker has saved of an optimizer. Equal to itself only."""

    def __init__(self, worker: int, kept: Mapping[str, Any]) -> None:
        """``kept``: what ``edl.torch.sharded.capture`` returned."""
        self.worker = worker
        self._kept = kept
        # An older edl kept names that changed with activation checkpointing.
        names = dict(enumerate(map(loading.key_of, kept[NAMES])))
        self.names = frozenset(names.values())
        self.groups = [[names[number] for number in group["params"]] for group in kept["param_groups"]]
        """Of each group the names of its parameters."""

    def holding(self, names: Set[str]) -> list[int]:
        """The groups with one of these parameters."""
        return [number for number, group in enumerate(self.groups) if not names.isdisjoint(group)]

    def options(self, number: int, names: Sequence[str]) -> dict[str, Any]:
        """The options for a worker's group with this number and, among others, these parameters of the saved ones:
        those of the group with the same number if they have a parameter in common, else of the first one's group."""
        holding = self.holding(frozenset(names))
        if number not in holding:
            number = next(one for one in holding if names[0] in self.groups[one])
        return self.options_of(number)

    def options_of(self, number: int) -> dict[str, Any]:
        """The options of a saved group."""
        return {key: value for key, value in self._kept["param_groups"][number].items() if key not in OF_PARAMETERS}

    @property
    def beside(self) -> dict[str, Any]:
        """What belongs neither to a group nor to a parameter; some optimizers keep such entries."""
        state = {key: value for key, value in self._kept["state"].items() if not isinstance(key, int)}
        rest = {key: value for key, value in self._kept.items() if key not in ("param_groups", NAMES)}
        return {**rest, "state": state}


def find_homes(names: Sequence[str], saved: Iterable[SavedOptimizer]) -> dict[str, SavedOptimizer]:
    """Of each parameter that any worker has saved, the first of them. Looks at no more workers than that takes."""
    found: dict[str, SavedOptimizer] = {}
    left = set(names)
    for one in saved:
        found.update(dict.fromkeys(left & one.names, one))
        left -= one.names
        if not left:
            break
    return {name: found[name] for name in names if name in found}


def check_groups(saved: Iterable[SavedOptimizer], groups: Sequence[Sequence[str]], known: Set[str]) -> None:
    """Raise ``ValueError`` if parameters that one worker has saved are in another number of groups now; parameters of
    other stages do not count. ``groups``: of each group here the names of its parameters. ``known``: all parameters of
    this worker, also those that are in no group."""
    for one in saved:
        loading.check_groups(len(one.holding(known)), sum(not one.names.isdisjoint(group) for group in groups))
