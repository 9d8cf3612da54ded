"""Lists, inspects and deletes the folders of a checkpoint directory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from edl.checkpoint.directory import manifest as text
from edl.checkpoint.directory.manifest import MANIFEST_FILE, folder_name, folder_version
from edl.errors import CheckpointError
from edl.ports import Files
from edl.wire.records import Version


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a checkpoint's folder. ``sizes`` omits temporary files."""

    sizes: dict[str, int]
    everything: tuple[str, ...]
    """All paths, in an order in which they can be deleted."""


class Folders:
    """The folders of one checkpoint directory. All calls block and raise ``OSError``."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def versions(self) -> list[Version]:
        """Versions of the checkpoints that have a folder, complete or not."""
        found = (folder_version(entry.name) for entry in self._files.entries() if entry.folder)
        return [version for version in found if version is not None]

    def content(self, folder: str, below: str = "") -> Content:
        """Everything in a folder and below; empty if there is no such folder. Does not follow links to other
        folders."""
        sizes: dict[str, int] = {}
        everything: list[str] = []
        for entry in self._files.entries(f"{folder}/{below}".rstrip("/")):
            name = f"{below}{entry.name}"
            if entry.folder and not entry.link:
                inner = self.content(folder, f"{name}/")
                sizes.update(inner.sizes)
                everything += inner.everything
            elif not entry.folder and not name.endswith(".tmp"):
                sizes[name] = entry.size
            everything.append(name)
        return Content(sizes, tuple(everything))

    def job_of(self, version: Version) -> str:
        """The job that wrote a checkpoint, according to its manifest; empty if unknown. Raises nothing."""
        with contextlib.suppress(CheckpointError, OSError):
            return text.parse_manifest(self._files.read(f"{folder_name(version)}/{MANIFEST_FILE}")).job
        return ""

    def delete(self, folder: str) -> None:
        """Delete a checkpoint's folder, the manifest first, so that it never looks complete when half deleted. If it is
        a link, delete only the link, not what it leads to."""
        if is_link(self._files, folder):
            self._files.remove(folder)
            return
        self._files.remove(f"{folder}/{MANIFEST_FILE}")
        for name in self.content(folder).everything:
            self._files.remove(f"{folder}/{name}")
        self._files.remove(folder)


def is_link(files: Files, folder: str) -> bool:
    """Whether a folder is a symbolic link, as to a checkpoint that was moved elsewhere. Object stores have none."""
    above, _, name = folder.rpartition("/")
    return not files.remote and any(entry.link for entry in files.entries(above) if entry.name == name)
