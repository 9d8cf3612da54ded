"""Keeps what was learnt about a script's imports for its next job: one small file per script and environment."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edl.errors import ProtocolError
from edl.wire import json_messages
from edl.worker.learnt import LIBRARY_FOLDERS, LearntModules

_FORMAT = 2
_MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class LearntFile:
    """The file of one script in one environment."""

    path: str
    """Empty: nothing is kept."""

    @classmethod
    def of(
        cls,
        kind: str,
        target: str,
        imports: Iterable[str],
        changes: Iterable[str],
        loaded: Iterable[str],
        environment: Mapping[str, str],
    ) -> LearntFile:
        """The file for a script (``kind``: ``script``; ``target``: its path) or module.

        Its name depends on the place of the script, on what its source imports, on how that changes environment
        variables (``changes``; not on the rest of the source), on the interpreter, on the names and versions of all
        installed packages, and on the modules that the fork server has (``loaded``): a record lacks these.
        """
        home = environment.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(home):
            home = os.path.join(environment.get("HOME", ""), ".cache")
        if not os.path.isabs(home):
            return cls("")
        place = [kind, os.path.abspath(target) if kind != "module" else target, os.getcwd() if kind == "module" else ""]
        words = [str(_FORMAT), *place, *sorted(imports), "", *changes, "", sys.executable, sys.version]
        words += ["", *installed(sys.path), "", *sorted(loaded)]
        name = hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:32]
        return cls(os.path.join(home, "edl", "imports", f"{name}.json"))

    def load(self) -> LearntModules:
        """What is known; nothing if there is no such file, or it is damaged or belongs to another user."""
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    return LearntModules()
                return json_messages.decode(LearntModules, file.read(_MOST_BYTES))
        except (OSError, ProtocolError):
            return LearntModules()

    def save(self, learnt: LearntModules) -> str:
        """Replace the file as a whole; returns why that was not possible, empty on success."""
        if not self.path:
            return ""
        temporary = f"{self.path}.{os.getpid()}"
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(json_messages.encode(learnt))
            os.replace(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            return f"{error.strerror}: {self.path}"
        return ""


def installed(path: Iterable[str]) -> list[str]:
    """The installed packages on a search path with their versions, as the names of the folders that describe them."""
    found: list[str] = []
    for folder in path:
        if os.path.basename(folder) in LIBRARY_FOLDERS:
            with contextlib.suppress(OSError):
                found += [
                    f"{folder}/{name}" for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info"))
                ]
    return sorted(found)
