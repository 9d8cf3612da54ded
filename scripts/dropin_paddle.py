"""Paddle's own parsers against ours: every option that either of its launchers knows, and what it is here.

``python -m scripts.dropin paddle`` prints it; ``tests/unit/edl/launch/test_dropin_paddle.py`` checks that it is
complete and true.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from edl.launch.dropin_table import Fate, Row
from edl.launch.paddle_table import PADDLE_ROWS

LAUNCHERS = {"launch": "paddle.distributed.launch", "legacy": "paddle.distributed.fleet.launch"}


@dataclass(frozen=True, slots=True)
class Theirs:
    """One option of one of Paddle's parsers."""

    launcher: str
    """A key of ``LAUNCHERS``."""
    spellings: tuple[str, ...]
    default: str
    """As text; empty for none."""


def options() -> list[Theirs]:
    """Of the installed Paddle; imports it, which takes a second or two. Raises ``ImportError``."""
    from paddle.distributed.fleet import launch as legacy
    from paddle.distributed.launch.context import args_envs

    found = []
    for launcher, module, parse in (
        ("launch", args_envs, args_envs.parse_args),
        ("legacy", legacy, legacy._parse_args),
    ):
        for action in _actions(module, parse):
            if action.option_strings and action.dest != "help":
                default = "" if action.default is None else str(action.default)
                found.append(Theirs(launcher, tuple(action.option_strings), default))
    return found


def variables() -> dict[str, str]:
    """Variables that override its command line, and the option of each."""
    from paddle.distributed.launch.context import args_envs

    return {variable: f"--{option}" for variable, (option, _) in args_envs.env_args_mapping.items()}


def rows_by_spelling() -> dict[str, Row]:
    """Our table, by every way to write an option."""
    return {spelling: row for row in PADDLE_ROWS for spelling in (row.option, *row.aliases)}


def report(theirs: list[Theirs], overriding: Mapping[str, str]) -> str:
    """All options, what they are here, and the exceptions with their reasons."""
    known, lines, exceptions, seen = rows_by_spelling(), [], [], set()
    for one in theirs:
        row = known.get(one.spellings[0])
        if row is None:
            lines.append(f"{one.spellings[0]:24} MISSING")
            continue
        if row.option in seen:
            continue
        seen.add(row.option)
        stand_in = ", ".join(variable for variable, option in overriding.items() if option == row.option)
        lines.append(f"{row.option:24} {one.default or '-':9} {row.fate.value:10} {row.becomes or '-':40} {stand_in}")
        if row.exception:
            reasons = "; ".join(filter(None, (row.why, row.default_why)))
            reasons += f". {row.advice}" if row.advice else ""
            exceptions.append(f"{row.option:24} {row.fate.value:10} {reasons}")
    head = f"{'option':24} {'default':9} {'here':10} {'as':40} variable that overrides it"
    fates = Counter(known[option].fate.value for option in seen)
    told = ", ".join(f"{fates[fate.value]} {fate.value}" for fate in Fate)
    tail = [f"{len(seen)} options: {told}. Those that are not the same in all, and why:", *exceptions]
    return "\n".join([head, *lines, "", *tail])


def main() -> str:
    """For ``scripts.dropin``."""
    return report(options(), variables())


@contextmanager
def _capturing(module: ModuleType) -> Iterator[list[argparse.ArgumentParser]]:
    """Parsers that the module makes meanwhile."""
    made: list[argparse.ArgumentParser] = []
    theirs, arguments = module.ArgumentParser, sys.argv

    def make(*given: Any, **named: Any) -> argparse.ArgumentParser:
        made.append(argparse.ArgumentParser(*given, **named))
        return made[-1]

    module.ArgumentParser, sys.argv = make, ["launch", "train.py"]  # type: ignore[attr-defined]
    try:
        yield made
    finally:
        module.ArgumentParser, sys.argv = theirs, arguments  # type: ignore[attr-defined]


def _actions(module: ModuleType, parse: Callable[[], Any]) -> list[argparse.Action]:
    with _capturing(module) as made:
        parse()
    return made[0]._actions
