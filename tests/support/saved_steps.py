"""After which boundaries a training saves."""

from __future__ import annotations

import pytest

from edl.worker.state import BaseState


def saved_boundaries(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each boundary that is passed from now on, whether its commit is written."""
    passed: list[bool] = []
    cross = BaseState._pass

    def noting(self: BaseState, *, save: bool, ok: bool | None = None, last: bool = False) -> bool:
        passed.append(save)
        return cross(self, save=save, ok=ok, last=last)

    monkeypatch.setattr(BaseState, "_pass", noting)
    return passed
