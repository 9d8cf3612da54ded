"""Modes of a script's models that it may change while it trains: whether a module trains, and whether a parameter is
trained or frozen.

Modules begin each world as the script had set them up when it called ``run``: an interrupted evaluation must not last.
Parameters begin it as in the commit: those that are unfrozen late stay so. A commit holds only what the script has
changed since ``run``, so a script that is set up in another way begins in that way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

TRAINING = "training"
"""The mode of modules; any other one is of parameters."""
CHANGED = "_changed_modes"
"""The name under which a ``State`` keeps the changes, if there are any. Scripts cannot use it."""
Mode = tuple[str, Any, str]
"""Name of a part of a model, the part, and the name of its attribute."""


def merged(kept: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The changes in several parts of one commit: each stage of a pipeline keeps those of its own parameters."""
    found = [one for one in kept if one]
    parameters: dict[str, Any] = {}
    for one in reversed(found):
        parameters.update(one["parameters"])
    return {**found[0], "parameters": parameters} if found else {}


class Modes:
    """The modes of the models in one ``State``."""

    def __init__(self) -> None:
        self._set_up: dict[tuple[str, str], bool] = {}
        self._parameters: list[tuple[str, Any, str, bool]] = []
        """With the mode of each before this world's commit was restored."""
        self._runs = 0
        self._kept: dict[str, Any] = {}
        """The changes of the restored commit, until the next commit."""
        self._first_boundary: tuple[int, dict[str, bool]] | None = None
        """Number of the first boundary in this world, and in this call of ``run``, and the parameters' modes there."""

    def run(self, modes: Iterable[Mode]) -> None:
        """``run`` is called: note how the script has set up its models."""
        found = list(modes)
        self._runs += 1
        self._set_up = {(name, mode): bool(getattr(part, mode)) for name, part, mode in found}
        self.built(found)
        self._apply()

    def set_back(self, modes: Iterable[Mode]) -> None:
        """A world begins: set up the models as at ``run``. A process that was interrupted in an evaluation, or while
        parameters were frozen for a moment, would else train in another way than new workers."""
        self._parameters, self._kept = [], {}  # no part of an earlier world is to take memory
        for name, part, mode in modes:
            noted = self._set_up.get((name, mode))
            if noted is not None and bool(getattr(part, mode)) is not noted:
                setattr(part, mode, noted)

    def built(self, modes: Iterable[Mode]) -> None:
        """All models of this world exist, and nothing has been restored yet."""
        self._parameters = [
            (name, part, mode, bool(getattr(part, mode))) for name, part, mode in modes if mode != TRAINING
        ]
        self._first_boundary = None

    def changed(self, commit: int) -> dict[str, Any]:
        """What a commit keeps; empty if the script has changed nothing."""
        self._kept = {}
        if self._first_boundary is None:
            here = {name: bool(getattr(part, mode)) for name, part, mode, _ in self._parameters}
            self._first_boundary = commit, here
        changed = {
            name: now for name, part, mode, before in self._parameters if (now := bool(getattr(part, mode))) != before
        }
        return {"run": self._runs, "parameters": changed} if changed else {}

    def restore(self, kept: dict[str, Any]) -> None:
        """Change the parameters as in the commit. If it was made in a later call of ``run``, this process first has to
        get there: the script may change them in between."""
        self._kept = kept
        self._apply()

    def put_back(self, kept: dict[str, Any], commit: int) -> None:
        """An earlier commit has been restored in the middle of a world: change the parameters as there. The script goes
        on where it is, and does not repeat what it did before its first boundary: this stays, and so do modules."""
        self._kept = kept
        changed = self._kept_changes()
        first, at_first = self._first_boundary or (commit + 1, {})
        for name, part, mode, before in self._parameters:
            now = bool(getattr(part, mode))
            wanted = at_first.get(name, now) if commit < first else changed.get(name, before)
            if wanted is not now:
                setattr(part, mode, wanted)

    def _apply(self) -> None:
        changed = self._kept_changes()
        for name, part, mode, _ in self._parameters:
            if name in changed:
                setattr(part, mode, changed[name])

    def _kept_changes(self) -> dict[str, bool]:
        """What has been changed since this call of ``run`` in the restored commit."""
        return self._kept["parameters"] if self._kept.get("run") == self._runs else {}
