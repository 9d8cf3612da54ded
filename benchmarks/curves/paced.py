"""Runs the example with pauses between its steps, which the benchmark changes while it runs, since joining nodes take
time.

    paced.py PACE_FILE SCRIPT ARGUMENTS…
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

MARK_S = 0.123456
"""``--step-time`` of the script; a sleep of exactly this length is the pause between two steps."""


def main() -> None:
    pace, script, *arguments = sys.argv[1:]
    sleep = time.sleep

    def paced(seconds: Any) -> None:
        sleep(float(Path(pace).read_text() or 0) if seconds == MARK_S else seconds)

    time.sleep = paced
    sys.argv = [script, f"--step-time={MARK_S}", *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
