"""Wall clocks that can be moved, one a node: a small library that the node's processes load first.

libfaketime 0.9.10 does the same, but lets ``time.sleep`` of Python 3.11 and later fail: it takes absolute monotonic
deadlines for times of day.
"""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")
VARIABLE = "EDL_SOAK_CLOCK"
_SECONDS = struct.Struct("=q")


def build(folder: Path) -> tuple[Path | None, str]:
    """Compile the library; returns where it is, or why there is none."""
    library = folder / "clock.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None, "there is no C compiler (cc)"
    return (library, "") if done.returncode == 0 else (None, f"cc: {done.stderr.strip()[-300:]}")


@dataclass(frozen=True, slots=True)
class Clock:
    """The wall clock of one node."""

    library: Path
    file: Path

    def environment(self) -> dict[str, str]:
        """What the node's processes need; the file is created if it is not there."""
        if not self.file.exists():
            self.move(0)
        return {"LD_PRELOAD": str(self.library), VARIABLE: str(self.file)}

    def move(self, seconds: int) -> None:
        """Set how far the clock is from the machine's, in seconds. Takes effect at once."""
        with self.file.open("r+b" if self.file.exists() else "w+b", buffering=0) as file:
            file.write(_SECONDS.pack(seconds))
