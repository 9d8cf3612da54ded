"""What torch's modules are given before a worker's script begins."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from edl.torch import startup


@pytest.mark.parametrize(
    ("arguments", "named", "longest_s"),
    [
        ((), {}, 60.0),
        ((), {"timeout": None}, 60.0),
        ((), {"timeout": timedelta(seconds=5)}, 5.0),
        ((2, False, timedelta(seconds=5)), {}, 5.0),
        ((), {"timeout": timedelta(minutes=5)}, 60.0),
        ((2, True), {}, None),
    ],
)
def test_a_rank_waits_for_the_store_no_longer_than_its_script_allows(
    arguments: tuple[Any, ...], named: dict[str, Any], longest_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    rendezvous = SimpleNamespace(TCPStore=lambda *words, **more: opened.append((words, more)))
    waits: list[Any] = []
    monkeypatch.setitem(sys.modules, "torch.distributed.rendezvous", rendezvous)
    monkeypatch.setattr(startup, "pending_collectives", SimpleNamespace(set_up=lambda env: None, begin=lambda: None))
    monkeypatch.setattr(startup, "wait_until_open", lambda address, *limit: waits.append((address, *limit)))
    startup.before_script({}, {})
    rendezvous.TCPStore("host", 29500, *arguments, **named)
    assert waits == ([] if longest_s is None else [(("host", 29500), longest_s)])
    assert opened == [(("host", 29500, *arguments), named)]
