"""Runs the example, with pauses between its steps that the benchmark sets while it runs: joining nodes take their time.

paced.py PACE_FILE SCRIPT ARGUMENTS…
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

MARK_S = 0.123456
"""``--step-time`` of the script; sleeping for exactly so long means the pause between two steps."""


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
