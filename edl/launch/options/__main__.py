"""``python -m edl.launch.options``: generates the option tables of docs/launcher.md.

``--markdown`` prints them; ``--write FILE`` writes them into that page, between two comments. A unit test fails if the
page is out of date.
"""

from __future__ import annotations

import sys

from edl.launch.options import SECTIONS
from edl.launch.options.option import Option, Section, default_cell
from edl.marked_page import MarkedPage


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


TABLES = MarkedPage(
    module="edl.launch.options",
    page="docs/launcher.md",
    begin="<!-- begin of the option table: python -m edl.launch.options --write docs/launcher.md -->",
    end="<!-- end of the option table -->",
    markdown=markdown,
)

if __name__ == "__main__":
    TABLES.main(sys.argv[1:])
