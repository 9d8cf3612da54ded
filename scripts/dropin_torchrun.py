"""torchrun's own parser against ours: every option that it knows, and what it is here.

``python -m scripts.dropin torchrun`` prints it; ``tests/unit/edl/launch/test_torchrun_options.py`` checks that it is
complete and true.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass

import click

from edl.launch.dropin_table import Row
from edl.launch.torchrun_table import TORCHRUN_ROWS

NAMED = {"help", "training_script", "training_script_args"}
"""What every launcher has."""


@dataclass(frozen=True, slots=True)
class Theirs:
    """One option of torchrun, or of ``torch.distributed.launch``."""

    name: str
    """Its destination, with underscores."""
    spellings: tuple[str, ...]
    default: str
    """As text; empty for none."""
    is_flag: bool
    choices: tuple[str, ...]
    variable: str
    """``PET_…``, where one can name its default; else empty."""


def options() -> list[Theirs]:
    """Of the installed torch; imports it, which takes a second or two. Raises ``ImportError``."""
    # By name: its stubs do not tell.
    run = importlib.import_module("torch.distributed.run")
    reading = importlib.import_module("torch.distributed.argparse_util")
    parser = run.get_args_parser()
    parser.add_argument(
        "--use-env", "--use_env", default=False, action="store_true"
    )  # as torch.distributed.launch does
    return [
        Theirs(
            name=action.dest,
            spellings=tuple(action.option_strings),
            default=_text(action.default),
            is_flag=action.nargs == 0,
            choices=tuple(action.choices or ()),
            variable=f"PET_{action.dest.upper()}" if isinstance(action, (reading.env, reading.check_env)) else "",
        )
        for action in parser._actions
        if action.dest not in NAMED
    ]


def _text(default: object) -> str:
    return "" if default in (None, [], argparse.SUPPRESS) else str(default)


def our_defaults() -> dict[str, str]:
    """The default of each of our options, as text."""
    from edl.launch.__main__ import run

    context = click.Context(run)
    return {param.name: _text(param.get_default(context)) for param in run.params if param.name}


def rows() -> dict[str, Row]:
    """Our table, by destination."""
    return {row.name: row for row in TORCHRUN_ROWS}


def report(theirs: list[Theirs]) -> str:
    """All options, what they are here, and the exceptions with their reasons."""
    known, ours, lines, exceptions = rows(), our_defaults(), [], []
    for one in theirs:
        row = known.get(one.name)
        name = one.spellings[0] if len(one.spellings[0]) > 2 else one.spellings[-1]
        if row is None:
            lines.append(f"{name:28} MISSING")
            continue
        here = row.fate.value
        lines.append(f"{name:28} {one.default or '-':28} {ours.get(one.name) or '-':28} {here:10} {row.becomes or '-'}")
        if row.exception:
            about = [("", row.why), ("default: ", row.default_why), ("", row.advice)]
            exceptions += [f"{name:28} {row.fate.value:10} {what}{why}" for what, why in about if why]
    head = f"{'option':28} {'default there':28} {'default here':28} {'here':10} as"
    differ = sum(known[one.name].exception for one in theirs if one.name in known)
    return "\n".join([head, *lines, "", f"{differ} of {len(theirs)} options differ in something:", *exceptions])


def main() -> str:
    """For ``scripts.dropin``."""
    return report(options())
