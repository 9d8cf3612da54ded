"""Attributes that are replaced for a time."""

from __future__ import annotations

import pytest

from edl.integrations.replacing import replacing


class Trainer:
    def __init__(self) -> None:
        self.size = 1

    def work(self) -> str:
        return "own"


def test_methods_and_attributes_are_as_before_after_an_error() -> None:
    one = Trainer()
    with pytest.raises(KeyError), replacing(one, {"work": lambda: "other", "size": 2}):
        assert (one.work(), one.size) == ("other", 2)
        one.size = 3
        raise KeyError
    assert (one.work(), one.size) == ("own", 1)
    assert vars(one) == {"size": 1}
