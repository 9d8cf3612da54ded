"""Checks that the workers' command can run, before anything is started."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import warnings
from pathlib import Path

from edl.config import environment
from edl.errors import ScriptError, UsageError
from edl.launch.torchrun_options import python_from
from edl.ports import CommandKind, WorkerCommand


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
    path = Path(script)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ScriptError(
            f"{script}: {error.strerror} (working directory {os.getcwd()}). Give the path of the training script; "
            "for a module use -m, for a program --no-python"
        ) from error
    if python_from(environment()):
        return  # another Python version may have another syntax
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers print them
            compile(source, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        if error.lineno is None:  # the file contains null bytes
            raise ScriptError(f"{script}: not Python source ({error.msg}). For a program use --no-python") from error
        raise ScriptError(f"{script}, line {error.lineno}: {error.msg}. Nothing was started") from error
    except ValueError as error:  # null bytes, before Python 3.12
        raise ScriptError(f"{script}: not Python source ({error}). For a program use --no-python") from error
