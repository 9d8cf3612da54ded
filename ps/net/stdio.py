"""The link between a pserver process and its launcher: lines over the standard streams."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO


class ParentLauncher:
    """The launcher that started this process. ``gone``: whether it has ended."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self.gone = False

    def say(self, message: dict[str, Any]) -> None:
        """Write one line of JSON."""
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def answer_until_gone(
        self, gone: Callable[[], None], masterless: Callable[[], bool], writes: Callable[[], bool]
    ) -> None:
        """In a thread, answer each line until stdin is closed; then call ``gone``. An answer is ``!``, then ``0`` while
        no Master is connected, then ``w`` if something may have to be written at the end."""

        def answer() -> None:
            try:
                for _ in sys.stdin:
                    self._answers.write(f"!{'0' * masterless()}{'w' * writes()}\n")
                    self._answers.flush()
            except (OSError, ValueError):
                pass
            self.gone = True
            gone()

        threading.Thread(target=answer, name="edl-ps-launcher", daemon=True).start()
