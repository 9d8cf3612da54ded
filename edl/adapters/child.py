"""What processes that a launcher starts, and talks to in lines, have in common."""

from __future__ import annotations

import json
import os
import sys
from typing import TextIO

from edl.errors import ProtocolError


def private_stdout() -> TextIO:
    """The launcher's pipe for ourselves; what users' functions print goes to standard error."""
    mine = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(mine, "w")


def secret_line(who: str, option: str) -> str:
    """The first line of standard input: ``{"secret": …}``. Raises ``ProtocolError``, naming ``who`` this is for and the
    option of the launcher that starts them."""
    order = sys.stdin.readline()
    try:
        return str(json.loads(order)["secret"])
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(
            f'the first line of standard input must be {{"secret": "…"}}. {who} are started by a launcher: '
            f"python -m edl.launch {option}"
        ) from error
