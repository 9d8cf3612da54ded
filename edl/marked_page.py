"""Pages of the documentation with a part that is generated, between two comments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click


@dataclass(frozen=True, slots=True)
class MarkedPage:
    """The generated part of one page."""

    module: str
    """The module whose ``python -m`` generates it."""
    page: str
    """The page's usual place."""
    begin: str
    end: str
    """The comments around it."""
    markdown: Callable[[], str]

    def replaced(self, page: str) -> str:
        """The text of the page, brought up to date. Raises ``ValueError`` if one of the two comments is missing."""
        before, begin, rest = page.partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not (begin and end):
            raise ValueError(f"the page lacks the line {self.begin!r} or {self.end!r}")
        return f"{before}{self.begin}\n\n{self.markdown()}\n\n{self.end}{after}"

    def main(self, arguments: Sequence[str]) -> None:
        """``--markdown`` prints the part, ``--write FILE`` writes it into a page. Raises ``SystemExit`` for other
        arguments."""
        match list(arguments):
            case ["--markdown"]:
                click.echo(self.markdown())
            case ["--write", path]:
                page = Path(path)
                page.write_text(self.replaced(page.read_text()))
            case _:
                raise SystemExit(f"usage: python -m {self.module} --markdown | --write {self.page}")
