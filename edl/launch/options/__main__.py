"""``python -m edl.launch.options``: generates the option tables of docs/launcher.md.

``--markdown`` prints them; ``--write FILE`` writes them into that page, between two comments. A unit test fails if the
page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from edl.launch.options import SECTIONS
from edl.launch.options.option import Option, Section, default_cell

BEGIN = "<!-- begin of the option table: python -m edl.launch.options --write docs/launcher.md -->"
END = "<!-- end of the option table -->"


def markdown() -> str:
    """The tables of all documented sections."""
    return "\n\n".join(_section(section) for section in SECTIONS if section.documented)


def _section(section: Section) -> str:
    intro = f"{section.intro}\n\n" if section.intro else ""
    head = "| option | environment | default | meaning |\n|---|---|---|---|\n"
    return f"### {section.title}\n\n{intro}{head}" + "\n".join(_row(option) for option in section.options)


def _row(option: Option) -> str:
    names = ", ".join(f"`{name}`" for name in option.names)
    return f"| {names} | `{option.own_variable}` | {default_cell(option)} | {option.help} |"


def replaced(page: str) -> str:
    """The page with up-to-date tables. Raises ``ValueError`` if one of the two comments is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks the line {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}"


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or write them into a page. Raises ``SystemExit`` for other arguments."""
    match list(arguments):
        case ["--markdown"]:
            click.echo(markdown())
        case ["--write", path]:
            page = Path(path)
            page.write_text(replaced(page.read_text()))
        case _:
            raise SystemExit("usage: python -m edl.launch.options --markdown | --write docs/launcher.md")


if __name__ == "__main__":
    main(sys.argv[1:])
