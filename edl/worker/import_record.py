"""What a worker imports, recorded in memory that it shares with the fork server.

The worker does nothing but append lines: no thread, no descriptor and no message is needed, and the fork server reads
whenever it likes, also from a worker that computes or hangs.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

SIZE_BYTES = 1 << 20
"""Size of a record, enough for ten thousand modules. Memory is used only for what is written."""


class ImportRecord:
    """The modules that one worker has found on its search path, in the order in which their imports began.

    Created before the worker is forked. One line for each module: milliseconds since the record was begun, whether the
    import is nested in another one (0 or 1), name, and file. A line with a 2 names an environment variable that the
    process has changed before the next import.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SIZE_BYTES)

    def begin(self) -> None:
        """Record this process's imports from now on."""
        # Just before the finder that searches sys.path, so that all others find what they would find anyway.
        place = next((at for at, finder in enumerate(sys.meta_path) if finder is PathFinder), None)
        if place is not None:
            self._memory.seek(0)
            sys.meta_path.insert(place, _Recorder(self._memory))

    def length(self) -> int:
        """Bytes written so far."""
        return max(0, self._memory.find(b"\0", 0))

    def text(self) -> str:
        """The lines written so far."""
        return self._memory[: self.length()].decode(errors="replace")

    def clear(self) -> None:
        """Make it empty, for another worker."""
        length = self.length()
        self._memory[:length] = bytes(length)


class _Recorder:
    """Finds what ``PathFinder`` finds, and records it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._process = os.getpid()
        self._began_s = time.monotonic()
        self._outermost: ModuleSpec | None = None
        self._environment = dict(os.environ)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec, as from ``PathFinder``."""
        spec = PathFinder.find_spec(fullname, path, target)
        # A process that the worker has forked shares the memory, but not the position in it.
        if spec is not None and os.getpid() == self._process:
            nested = getattr(self._outermost, "_initializing", False)
            at_ms = int((time.monotonic() - self._began_s) * 1000)
            line = f"{at_ms}\t{int(nested)}\t{fullname}\t{spec.origin or ''}\n"
            if not nested:
                self._outermost = spec
                line = "".join(f"{at_ms}\t2\t{name}\t\n" for name in self._changed_variables()) + line
            try:
                # One call into C, so that the lines of several threads do not mix.
                self._memory.write(line.encode(errors="replace"))
            except ValueError:  # it is full
                self._process = 0
        return spec

    def _changed_variables(self) -> list[str]:
        """Environment variables that have changed since the last call."""
        before, now = self._environment, dict(os.environ)
        if now == before:
            return []
        self._environment = now
        return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
