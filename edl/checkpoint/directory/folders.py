"""The folders of a checkpoint directory: which there are, what lies in each, and how one is removed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from edl.checkpoint.directory import manifest as text
from edl.checkpoint.directory.manifest import MARKER_FILE, folder_name, folder_version
from edl.errors import CheckpointError
from edl.ports import Files
from edl.wire.messages import Version


@dataclass(frozen=True, slots=True)
class Content:
    """What lies in a checkpoint's folder, temporary files left out of ``sizes``."""

    sizes: dict[str, int]
    everything: tuple[str, ...]
    """In an order in which it can be removed."""


class Folders:
    """Of one directory. Every call blocks, and raises ``OSError``."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def versions(self) -> list[Version]:
        """Checkpoints that have a folder, complete or not."""
        found = (folder_version(entry.name) for entry in self._files.entries() if entry.folder)
        return [version for version in found if version is not None]

    def content(self, folder: str, below: str = "") -> Content:
        """Everything in a folder and further down; nothing if there is no such folder."""
        sizes: dict[str, int] = {}
        everything: list[str] = []
        for entry in self._files.entries(f"{folder}/{below}".rstrip("/")):
            name = f"{below}{entry.name}"
            if entry.folder:
                inner = self.content(folder, f"{name}/")
                sizes.update(inner.sizes)
                everything += inner.everything
            elif not name.endswith(".tmp"):
                sizes[name] = entry.size
            everything.append(name)
        return Content(sizes, tuple(everything))

    def job_of(self, version: Version) -> str:
        """Which job wrote a checkpoint, by its marker; empty when that does not say. Raises nothing."""
        with contextlib.suppress(CheckpointError, OSError):
            return text.parse_marker(self._files.read(f"{folder_name(version)}/{MARKER_FILE}")).job
        return ""

    def delete(self, folder: str) -> None:
        """The marker first: what is half deleted must not look complete."""
        self._files.remove(f"{folder}/{MARKER_FILE}")
        for name in self.content(folder).everything:
            self._files.remove(f"{folder}/{name}")
        self._files.remove(folder)
