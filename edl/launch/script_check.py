"""Checks that the workers' command can run, before anything is started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import warnings
from importlib.machinery import SourcelessFileLoader
from pathlib import Path

from edl.config import environment
from edl.errors import ScriptError, UsageError
from edl.launch.torchrun_options import python_from
from edl.ports import CommandKind, WorkerCommand
from edl.worker.script_kind import ScriptKind, archive_at, kind_of


def worker_command(module: bool, no_python: bool, script: str, arguments: tuple[str, ...]) -> WorkerCommand:
    """The workers' command. Raises ``UsageError``, mostly ``ScriptError``, if it cannot run."""
    if module and no_python:
        raise UsageError("--module and --no-python exclude each other: only Python has modules. Drop one of them")
    if module:
        if not python_from(environment()):  # another interpreter may have other modules
            _check_module(script)
        return WorkerCommand(CommandKind.MODULE, script, arguments)
    if no_python:
        if shutil.which(script) is None:
            raise ScriptError(
                f"{script}: no such program on the PATH, or not executable. Check the name and the file mode"
            )
        return WorkerCommand(CommandKind.PROGRAM, script, arguments)
    _check_script(script)
    return WorkerCommand(CommandKind.SCRIPT, script, arguments)


def _check_module(name: str) -> None:
    """Check that the top-level package of a module exists; checking more would import it. Raises ``ScriptError``."""
    if name.endswith(".py") and os.path.isfile(name):
        raise ScriptError(f"-m {name}: this is a file, but -m takes a module name. Write {name} without -m")
    top = name.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        found = top and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        del sys.path[0]
    if not found:
        raise ScriptError(
            f"-m {name}: {sys.executable} finds no module {top!r} (working directory {os.getcwd()}). "
            "Install it there, start from its folder, or give the script's path without -m"
        )


def _check_script(script: str) -> None:
    """Check that Python can run the script: a source file, or a compiled one, an archive or a folder. Raises
    ``ScriptError``."""
    kind, shown = kind_of(script), script
    match kind:
        case ScriptKind.FOLDER | ScriptKind.ARCHIVE:
            source, shown = _main_of(script), f"{script}/__main__.py"
        case ScriptKind.COMPILED:
            source = None
        case _:
            source = _text_of(script)
    if python_from(environment()):
        return  # another Python version may have another syntax
    if kind is ScriptKind.COMPILED:
        _check_compiled(script)
    if source is not None:
        _check_syntax(source, shown)


def _text_of(script: str) -> bytes:
    try:
        return Path(script).read_bytes()
    except OSError as error:
        raise ScriptError(
            f"{script}: {error.strerror} (working directory {os.getcwd()}). Give the path of the training script; "
            "for a module use -m, for a program --no-python"
        ) from error


def _main_of(script: str) -> bytes | None:
    """The source of ``__main__`` in a folder or an archive; None if there is only its compiled form."""
    archive = archive_at(script)
    for name in ("__main__.py", "__main__.pyc"):
        with contextlib.suppress(OSError, ImportError):
            found = Path(script, name).read_bytes() if archive is None else archive.get_data(name)
            return found if name == "__main__.py" else None
    what = "folder" if archive is None else "archive"
    raise ScriptError(f"{script}: this {what} has no __main__.py, which Python would run. Name the script in it")


def _check_compiled(script: str) -> None:
    try:
        SourcelessFileLoader("__main__", script).get_code("__main__")
    except (ImportError, EOFError, ValueError) as error:
        raise ScriptError(
            f"{script}: {error}. Compile it again with {sys.executable}, or give the source. Nothing was started"
        ) from error


def _check_syntax(source: bytes, shown: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers print them
            compile(source, shown, "exec", dont_inherit=True)
    except SyntaxError as error:
        if error.lineno is None:  # the file contains null bytes
            raise ScriptError(f"{shown}: not Python source ({error.msg}). For a program use --no-python") from error
        raise ScriptError(f"{shown}, line {error.lineno}: {error.msg}. Nothing was started") from error
    except ValueError as error:  # null bytes, before Python 3.12
        raise ScriptError(f"{shown}: not Python source ({error}). For a program use --no-python") from error
