"""Fixtures that every test gets."""

from __future__ import annotations

import os

import pytest

LAUNCHER_PREFIXES = ("EDL_", "PET_", "TORCHELASTIC_", "PADDLE_")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees, or passes on, what a launcher or a user's shell left in the environment."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER_PREFIXES)]:
        monkeypatch.delenv(name)
