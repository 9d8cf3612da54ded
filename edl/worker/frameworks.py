"""Connects the framework-neutral worker start with ``edl.torch`` and ``edl.paddle``, by name only.

Each framework's ``startup`` module offers ``why_unsafe()``, called after the imports and before the first fork, and
``before_script(imported_under, environment)``, called in each worker before the user's code.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Protocol, cast

from edl.worker import linux

_STARTUPS = {"torch": "edl.torch.startup", "paddle": "edl.paddle.startup"}
_PATCHED_ON_IMPORT = ("paddle",)
"""Frameworks that need ``before_script`` even if only the script imports them."""


class Startup(Protocol):
    """The interface of a framework's startup module."""

    def why_unsafe(self) -> str:
        """Why this process, which has imported the framework, must not be forked; empty when it may."""
        ...

    def before_script(self, imported_under: Mapping[str, str], environment: Mapping[str, str]) -> None:
        """Adapt the framework to this worker.

        ``imported_under``: the environment at import time; ``environment``: the worker's, live.
        """
        ...


def startup(framework: str) -> Startup:
    """The startup module of an imported framework."""
    return cast(Startup, importlib.import_module(_STARTUPS[framework]))


def why_unsafe() -> str:
    """Why a fork of this process could hang or crash; empty if there is no known reason."""
    if threading.active_count() > 1:
        names = ", ".join(sorted(thread.name for thread in threading.enumerate()[1:]))
        return f"an imported module started threads ({names})"
    device = linux.open_accelerator()
    if device:
        return f"an imported module opened the accelerator {device}"
    reasons = (startup(name).why_unsafe() for name in _STARTUPS if name in sys.modules)
    return next((reason for reason in reasons if reason), "")


def before_script(imported_under: Mapping[str, str]) -> None:
    """Adapt loaded frameworks to this worker, and others as soon as the script imports them."""
    for name in _STARTUPS:
        if name in sys.modules:
            startup(name).before_script(imported_under, os.environ)
        elif name in _PATCHED_ON_IMPORT:
            sys.meta_path.insert(0, _AfterImport(name))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Imports one module as usual and calls its ``before_script`` right after."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's usual spec, with a loader that adapts it; None for other modules."""
        if fullname != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def execute_and_adapt(module: types.ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            startup(self._name).before_script(dict(os.environ), os.environ)

        loader.exec_module = execute_and_adapt  # type: ignore[method-assign]
        return spec
