"""Asks a person before something is done that ends workers."""

from __future__ import annotations

import sys

import click

yes_option = click.option(
    "-y", "--yes", is_flag=True, help="Do not ask for confirmation. Without a terminal edl never asks."
)


def must_ask(yes: bool, as_json: bool) -> bool:
    """Whether a person has to confirm: neither ``--yes`` nor ``--json`` is given, and stdin is a terminal."""
    return not (yes or as_json) and sys.stdin.isatty()


def confirm(question: str) -> None:
    """Ask, and raise ``click.Abort`` unless the answer is yes."""
    click.confirm(question, abort=True, err=True)  # stdout may be a file
