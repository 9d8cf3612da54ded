"""Types of the tables of other launchers' options, ``torchrun_table`` and ``paddle_table``.

Each table is the single source of the messages and of the tests that compare it with the documentation and with the
other launcher's own parser.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fate(enum.Enum):
    """How edl treats an option of another launcher."""

    HONOURED = "honoured"
    """The option has the same meaning; ``Row.why`` describes differences."""
    EXPLAINED = "explained"
    """The option is accepted and has no effect; a remark says why."""
    REFUSED = "refused"
    """The launcher ends with a one-line error."""


@dataclass(frozen=True, slots=True)
class Row:
    """One option of another launcher."""

    option: str
    """The other launcher's spelling, with dashes: ``--elastic_level``."""
    fate: Fate
    becomes: str = ""
    """The corresponding option of edl, such as ``--rdzv-endpoint``; empty: the option of the same name, or none."""
    default: str = ""
    """The other launcher's default, as text; empty: none."""
    why: str = ""
    """The difference and its reason, or the reason of a refusal: one sentence without a full stop. Empty: the same
    meaning."""
    default_why: str = ""
    """The reason why edl's default differs; empty: it has the same effect."""
    aliases: tuple[str, ...] = ()
    """Further spellings in the other launcher."""
    variables: tuple[str, ...] = ()
    """Environment variables that set it, the one with the highest precedence last."""
    advice: str = ""
    """For a refused option: what to do instead."""
    since: str = ""
    """First release of the other launcher that has it; empty: all that edl supports."""

    @property
    def name(self) -> str:
        """The option's name among the launcher's values: with underscores and without dashes."""
        return self.option.lstrip("-").replace("-", "_")

    @property
    def exception(self) -> bool:
        """Whether edl differs in any way."""
        return bool(self.why or self.default_why) or self.fate is not Fate.HONOURED
