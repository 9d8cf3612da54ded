"""The launcher's end of a pserver process: lines over the standard streams."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO


class Launcher:
    """Whoever has started this process. ``gone``: it is no more."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self.gone = False

    def say(self, word: dict[str, Any]) -> None:
        """One line."""
        self._answers.write(json.dumps(word) + "\n")
        self._answers.flush()

    def answer_until_gone(self, gone: Callable[[], None], masterless: Callable[[], bool]) -> None:
        """Say ``!`` to each line, ``!0`` while no Master is in touch, in a thread, until there are no more of them."""

        def answer() -> None:
            try:
                for _ in sys.stdin:
                    self._answers.write("!0\n" if masterless() else "!\n")
                    self._answers.flush()
            except (OSError, ValueError):
                pass
            self.gone = True
            gone()

        threading.Thread(target=answer, name="edl-ps-launcher", daemon=True).start()
