"""What becomes of another launcher's options here: the form of the tables in ``torchrun_table`` and ``paddle_table``.

A table is the one source for the messages, the documentation, and the tests that hold it against the other launcher's
own parser.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fate(enum.Enum):
    """What an option does here."""

    HONOURED = "honoured"
    """It means what it means there; what differs is in ``Row.why``."""
    EXPLAINED = "explained"
    """It is accepted and changes nothing; a remark says why, if it was given."""
    REFUSED = "refused"
    """The launcher ends with one line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One option of another launcher."""

    option: str
    """As it is spelt there, with its dashes: ``--elastic_level``."""
    fate: Fate
    becomes: str = ""
    """What it is here, such as ``--rdzv-endpoint``; empty: the same option, or none."""
    default: str = ""
    """Its default there, as text; empty: none."""
    why: str = ""
    """What is different here and why: one sentence without its full stop, a remark or the reason of a refusal.
    Empty: the same meaning."""
    default_why: str = ""
    """Why the default is another one here; empty: it has the same effect."""
    aliases: tuple[str, ...] = ()
    """Other spellings of it there."""
    variables: tuple[str, ...] = ()
    """Variables that stand in for it, the strongest last."""
    advice: str = ""
    """With a refusal: what to do instead."""
    since: str = ""
    """First release that has it; empty: all that edl supports."""

    @property
    def name(self) -> str:
        """The option's name among the launcher's values: with underscores and without dashes."""
        return self.option.lstrip("-").replace("-", "_")

    @property
    def exception(self) -> bool:
        """Whether anything is different here."""
        return bool(self.why or self.default_why) or self.fate is not Fate.HONOURED
