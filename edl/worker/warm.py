"""Imports ahead of time: finds the script's source, selects modules with ``preload``, and imports them."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import os
import sys
import time
import tokenize
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from zipimport import zipimporter

from edl.worker import linux
from edl.worker.preload import FRAMEWORKS, ImportPlan, ModuleSource, imported, is_library, plan
from edl.worker.script_kind import IMPORTED_FROM, ScriptKind, archive_at, kind_of, script_folder
from edl.worker.search_path import added_folders


class ImportFailed(Exception):
    """A required module cannot be imported."""

    def __init__(self, module: str, error: str, trace: str) -> None:
        super().__init__(f"cannot import {module}: {error}")
        self.module = module
        self.error = error
        self.trace = trace


@dataclass(frozen=True, slots=True)
class Image:
    """The result of the imports in this process."""

    text: str
    """Such as "torch 2.13.0 imported in 2.1 s"."""
    environment: dict[str, str]
    """The environment during the imports."""
    descriptors: frozenset[int]
    """Descriptors that the imported libraries keep open."""
    found: frozenset[str]
    """All external names that the source of the script imports."""
    changes: tuple[str, ...] = ()
    """Statements of the source that change environment variables, among its imports."""


def find_plan(kind: str, target: str, extra: tuple[str, ...]) -> ImportPlan:
    """The modules to import for this command. Raises ``ImportFailed`` when the script or module does not exist."""
    if kind == "program":
        return ImportPlan(extra, ())
    if kind == "call" and not os.path.exists(target):
        return plan(ModuleSource("", ""), lambda _: None, extra)
    found = _find_module(target) if kind == "module" else _find_script(target)
    return _without_namesakes(plan(found.entry, found.source_of, extra), found.folders, extra)


def imported_by(kind: str, target: str) -> frozenset[str]:
    """Names of external modules that a script or module imports; empty when it does not exist."""
    try:
        found = _find_module(target) if kind == "module" else _find_script(target)
    except ImportFailed:
        return frozenset()
    return imported(found.entry, found.source_of)


@dataclass(frozen=True, slots=True)
class _Found:
    """A script or module, and the user's modules that it may import."""

    entry: ModuleSource
    source_of: Callable[[str], ModuleSource | None]
    folders: list[str]
    """Folders in which the user's modules are found before libraries of the same name."""


def _find_script(target: str) -> _Found:
    path, folder = os.path.abspath(target), script_folder(target)
    kind, archive = kind_of(path), archive_at(path)
    entry_path = os.path.join(path, "__main__.py") if kind in IMPORTED_FROM else path
    read = _read if archive is None else functools.partial(_read_zipped, archive)
    entry = None if kind is ScriptKind.COMPILED else read(entry_path, "")
    if entry is None and not os.path.exists(path):
        raise ImportFailed(target, f"there is no file {path}", "")
    return _found(entry or ModuleSource("", ""), entry_path, _Folder(folder, read=read), folder)


def _find_module(target: str) -> _Found:
    """Find a module without importing its packages."""
    search: list[str] | None = [os.getcwd(), *sys.path]
    parts = target.split(".")
    root = origin = ""
    for length in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:length]), search)
        if spec is None:
            raise ImportFailed(target, f"No module named {'.'.join(parts[:length])!r}", "")
        places = list(spec.submodule_search_locations or ())
        origin = spec.origin or ""
        root = root or os.path.dirname(places[0] if places else origin)
        search = places
    package = target if search else ".".join(parts[:-1])
    path = os.path.join(search[0], "__main__.py") if search else origin
    entry = _read(path, package) or ModuleSource("", "")
    # Beside an installed package are other packages; only the package itself counts as the user's.
    only = "" if root == os.getcwd() else parts[0]
    return _found(entry, path, _Folder(root, only), root if not only else os.getcwd())


def _found(entry: ModuleSource, path: str, own: _Folder, folder: str) -> _Found:
    """``path``: that of the entry, which may add folders in which its modules are found."""
    added = added_folders(entry.text, path, os.getcwd())
    beside = [_Folder(one.folder) for one in added]

    def source_of(name: str) -> ModuleSource | None:
        source = own(name)
        # A known library is one, even if the script adds a folder that contains it.
        if source is None and not is_library(name):
            source = next(filter(None, (one(name) for one in beside)), None)
        return source

    return _Found(entry, source_of, [folder, *(one.folder for one in added if one.first)])


def _without_namesakes(found: ImportPlan, folders: list[str], extra: tuple[str, ...]) -> ImportPlan:
    """Leave out modules that the user's folders have their own version of."""

    def is_kept(name: str) -> bool:
        root = name.partition(".")[0]
        spec = PathFinder.find_spec(root, folders)
        if name in extra or name.startswith("edl.") or spec is None or spec.loader is None:
            return True
        library = PathFinder.find_spec(root)
        return library is not None and library.origin == spec.origin  # the folder is that of the libraries

    return replace(
        found, required=tuple(filter(is_kept, found.required)), optional=tuple(filter(is_kept, found.optional))
    )


class _Folder:
    """The user's modules below one folder, or in one archive, as text."""

    def __init__(
        self, folder: str, only: str = "", read: Callable[[str, str], ModuleSource | None] | None = None
    ) -> None:
        self._folder = folder
        self._only = only
        self._read = read or _read

    def __call__(self, name: str) -> ModuleSource | None:
        parts = name.split(".")
        if parts[0] == "edl" or (self._only and parts[0] != self._only):
            return None
        base = os.path.join(self._folder, *parts)
        package = self._read(os.path.join(base, "__init__.py"), name)
        return package or self._read(base + ".py", ".".join(parts[:-1]))


def _read(path: str, package: str) -> ModuleSource | None:
    try:
        with tokenize.open(path) as file:
            return ModuleSource(file.read(), package)
    except (OSError, SyntaxError, ValueError):
        return None


def _read_zipped(archive: zipimporter, path: str, package: str) -> ModuleSource | None:
    """Like ``_read``, for a path below that of the archive."""
    try:
        return ModuleSource(importlib.util.decode_source(archive.get_data(path)), package)
    except (OSError, ImportError, SyntaxError, ValueError):
        return None


def warm(kind: str, target: str, extra: tuple[str, ...]) -> Image:
    """Import what the command will import. Raises ``ImportFailed``. Starts no thread and calls no framework."""
    started, environment, before = time.monotonic(), dict(os.environ), linux.open_descriptors()
    found = find_plan(kind, target, extra)
    with uncollected():
        for name in found.required:
            if name not in extra:
                _import_required(name)
        for name in found.optional:
            _import_optional(name)
        if extra:
            own = os.getcwd() if kind == "module" else script_folder(target)
            sys.path.insert(0, own)
            for name in extra:
                _import_required(name)
            sys.path.remove(own)
    took = time.monotonic() - started
    descriptors = frozenset(linux.open_descriptors() - before)
    return Image(_summary(found, took), environment, descriptors, found.found, found.changes)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection during imports: what modules create stays, and collecting costs torch a fifth of the
    time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _import_required(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a foreign module's import may raise anything
        last = traceback.format_exception_only(error)[-1].strip()
        raise ImportFailed(name, last, traceback.format_exc()) from None


def _import_optional(name: str) -> None:
    # If it matters, the script's own import will fail in the worker, where the user sees it.
    with contextlib.suppress(Exception):
        importlib.import_module(name)


def _summary(found: ImportPlan, took_s: float) -> str:
    loaded = [name for name in FRAMEWORKS if name in sys.modules]
    shown = [f"{name} {getattr(sys.modules[name], '__version__', '')}".strip() for name in loaded]
    if not shown:
        shown = [name for name in (*found.required, *found.optional) if name in sys.modules]
    return f"{' and '.join(shown[:3])} imported in {took_s:.1f} s" if shown else "no framework to import"
