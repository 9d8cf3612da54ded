"""What a script is: Python runs source files, compiled files, archives and folders (``python app.pyz``)."""

from __future__ import annotations

import enum
import importlib.util
import os
import zipimport


class ScriptKind(enum.Enum):
    """How Python runs a script."""

    FILE = enum.auto()
    """As source, also where it does not exist."""
    COMPILED = enum.auto()
    """A ``.pyc`` file."""
    ARCHIVE = enum.auto()
    """A zip file under any name, such as ``.pyz`` or ``.pex``: its ``__main__`` is run."""
    FOLDER = enum.auto()
    """Its ``__main__`` is run."""


IMPORTED_FROM = (ScriptKind.ARCHIVE, ScriptKind.FOLDER)
"""Kinds that come first on the search path themselves, instead of the folder that they are in."""


def kind_of(path: str) -> ScriptKind:
    """What Python itself takes the script for: it looks at the content first."""
    if os.path.isdir(path):
        return ScriptKind.FOLDER
    if not os.path.isfile(path):
        return ScriptKind.FILE
    if archive_at(path) is not None:
        return ScriptKind.ARCHIVE
    return ScriptKind.COMPILED if path.endswith(".pyc") or _is_compiled(path) else ScriptKind.FILE


def archive_at(path: str) -> zipimport.zipimporter | None:
    """The archive at this path; None if it is none, or cannot be read."""
    try:
        return zipimport.zipimporter(os.path.abspath(path))  # importers are kept by path
    except (zipimport.ZipImportError, OSError):
        return None


def script_folder(path: str) -> str:
    """The first entry of ``sys.path`` while the script runs."""
    return os.path.abspath(path) if kind_of(path) in IMPORTED_FROM else os.path.dirname(os.path.realpath(path))


def _is_compiled(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(importlib.util.MAGIC_NUMBER)) == importlib.util.MAGIC_NUMBER
    except OSError:
        return False
