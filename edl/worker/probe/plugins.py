"""The user's own probes: functions named on the command line, and entry points of installed packages.

A probe is called without arguments in the probe's process of a node. It returns what is wrong with the node: nothing
(``None`` or an empty text), a text, or a mapping from slots to texts. An exception counts as a fault.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from edl.wire.health import SlotFinding

GROUP = "edl.health_probes"
"""Entry points: the name is for messages, the value is the function."""

Probe = Callable[[], Any]


def run_plugins(named: Sequence[str]) -> tuple[str, tuple[SlotFinding, ...]]:
    """Call all probes; returns what is wrong with the node, and with slots. ``named``: functions as
    ``module:function``."""
    errors: list[str] = []
    slots: dict[int, str] = {}
    for name, load in _found(named):
        try:
            found = load()()
        except Exception as error:  # noqa: BLE001 - the user's code
            found = f"{type(error).__name__}: {error}"
        if isinstance(found, Mapping):
            slots |= {int(slot): f"{name}: {text}" for slot, text in found.items() if text}
        elif found:
            errors.append(f"{name}: {found}")
    return "; ".join(errors), tuple(SlotFinding(slot, text) for slot, text in sorted(slots.items()))


def _found(named: Sequence[str]) -> Iterator[tuple[str, Callable[[], Probe]]]:
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda one: one.name):
        yield entry.name, entry.load
    for name in named:
        yield name, lambda name=name: _function(name)  # type: ignore[misc]


def _function(name: str) -> Probe:
    module, _, path = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as with python -m
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is no function")
    return found  # type: ignore[no-any-return]
