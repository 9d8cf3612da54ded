"""Runs the user's script or module inside a worker exactly as ``python script.py`` would.

``main()`` starts a cold worker; warm ones come here from the fork server or a standby.
"""

from __future__ import annotations

import builtins
import faulthandler
import importlib
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from importlib.machinery import PathFinder, SourceFileLoader, SourcelessFileLoader
from typing import NoReturn, cast

from edl.wire.fork_server import PROBE, WorkerOrder
from edl.worker.frameworks import before_script
from edl.worker.import_record import ImportRecord
from edl.worker.script_kind import IMPORTED_FROM, ScriptKind, kind_of
from edl.worker.spawn import shown_command

_CANNOT_OPEN = 2
"""Exit status of the interpreter when the script cannot be read."""

DUMP_SIGNAL = signal.SIGRTMIN + 12
"""On this signal a worker writes the stacks of its threads. No other user is known: glibc reserves the first two
real-time signals, the JVM, Go and profilers use some of the named ones, valgrind uses the last one."""

_OURS = (__file__, os.path.join(os.path.dirname(__file__), "call.py"))
"""Files whose frames are above the user's code in a traceback."""

_launcher_main = sys.modules.get("__main__")
"""Kept alive: the interpreter still runs its code while the user's module has taken its place."""


def main() -> None:
    """Start a cold worker: ``sys.argv`` holds kind, target and arguments; the environment is already the worker's."""
    kind, target, *arguments = sys.argv[1:]
    order = WorkerOrder(kind, target, tuple(arguments))
    from edl.worker.linux import set_title

    set_title(shown_command(order))
    run(order, dict(os.environ))


def run(order: WorkerOrder, imported_under: dict[str, str], record: ImportRecord | None = None) -> None:
    """Run the order's script or module as ``__main__``, or its function. Returns when it ends; ends the process when it
    fails. ``record``: where to record what it imports.

    The process ends by returning to the interpreter, so ``atexit`` functions and threads are treated as usual.
    """
    # faulthandler needs a real descriptor; 2 is one even if sys.stderr was replaced.
    faulthandler.enable(file=2)
    # In C, in whichever thread receives the signal: works even while all of Python waits for a lock or a collective.
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True, chain=False)
    before_script(imported_under)
    if record is not None:
        record.begin()
    sys.orig_argv[:] = shown_command(order)
    namespace = types.ModuleType("__main__")
    scope = vars(namespace)
    scope["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        scope["__annotations__"] = {}
    sys.modules["__main__"] = namespace
    if order.kind == "module":
        sys.argv[:] = ["-m", *order.arguments]
        _search_first(os.getcwd())
        _run_module(order.target, alter_argv=True)
        return
    if order.kind == "call":
        _run_call(*order.arguments)
        return
    if order.kind == PROBE:
        importlib.import_module(order.target).run()
        return
    sys.argv[:] = [order.target, *order.arguments]
    path = os.path.abspath(order.target)
    kind = kind_of(path)
    if kind in IMPORTED_FROM:
        sys.path.insert(0, path)
        importlib.invalidate_caches()  # of the fork server: the archive may have been replaced
        _unload_namesakes(path)
        _run_module("__main__", alter_argv=False)
        return
    _search_first(os.path.dirname(os.path.realpath(path)))
    (_run_compiled if kind is ScriptKind.COMPILED else _run_script)(path, namespace)


def _search_first(folder: str) -> None:
    """Put the folder first on the search path, and unload modules that it has its own version of."""
    if getattr(sys.flags, "safe_path", False):
        return
    sys.path.insert(0, folder)
    _unload_namesakes(folder)


def _unload_namesakes(folder: str) -> None:
    for name in _namesakes(folder):
        for loaded in [other for other in sys.modules if other == name or other.startswith(name + ".")]:
            del sys.modules[loaded]


def _namesakes(folder: str) -> list[str]:
    """Loaded top-level modules that the folder, or archive, has its own version of; except edl's and the interpreter's
    core modules."""
    try:
        present = {entry.partition(".")[0] for entry in os.listdir(folder)}
    except NotADirectoryError:
        present = {name for name in sys.modules if "." not in name}
    except OSError:
        return []
    found = []
    for name in sorted(present & sys.modules.keys()):
        if name in ("edl", "__main__") or name in sys.builtin_module_names:
            continue
        spec = PathFinder.find_spec(name, [folder])
        loaded = getattr(sys.modules[name], "__spec__", None)
        if spec is None or spec.loader is None or _is_core(name):
            continue
        if os.path.realpath(getattr(loaded, "origin", None) or "") != os.path.realpath(spec.origin or ""):
            found.append(name)
    return found


def _is_core(name: str) -> bool:
    """Whether the interpreter itself loads the module before any script; such a module is never shadowed."""
    origin = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None)
    return origin in ("frozen", "built-in") or name in ("encodings", "site", "sitecustomize", "usercustomize")


def _run_script(path: str, namespace: types.ModuleType) -> None:
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.exit(_CANNOT_OPEN)
    scope = vars(namespace)
    scope.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path), __spec__=None)
    _guarded(lambda: exec(compile(source, path, "exec", dont_inherit=True), scope))  # noqa: S102 - it is the purpose


def _run_compiled(path: str, namespace: types.ModuleType) -> None:
    loader, scope = SourcelessFileLoader("__main__", path), vars(namespace)
    scope.update(__file__=path, __cached__=None, __loader__=loader, __spec__=None)
    try:
        code = loader.get_code("__main__")
    except (ImportError, EOFError, OSError) as error:
        sys.stderr.write(f"{sys.executable}: can't run {path!r}: {error}\n")
        sys.exit(1)
    _guarded(lambda: exec(cast(types.CodeType, code), scope))  # noqa: S102 - it is the purpose


def _run_module(name: str, *, alter_argv: bool) -> None:
    # The function that the interpreter itself calls for "-m".
    _guarded(lambda: runpy._run_module_as_main(name, alter_argv))  # type: ignore[attr-defined]


def _run_call(folder: str) -> None:
    from edl.worker import call  # only now: what it imports is nothing that a script should find imported

    _guarded(lambda: call.run(folder, _search_first))


def _guarded(work: Callable[[], object]) -> None:
    """Run the user's program; an uncaught exception ends this process."""
    try:
        work()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the top of the user's program
        failure = error
    else:
        return
    _fail(failure)


def _fail(error: BaseException) -> NoReturn:
    """Report an uncaught exception as the interpreter would, and in torchrun's error file, then exit with status 1."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename in _OURS:
        step = step.tb_next
    error = error.with_traceback(step)
    status = getattr(error, "worker_status", None)
    if status is not None:
        # A request to be restarted (edl.exit_codes.START_OVER); the script's traceback would be useless.
        sys.stderr.write(f"edl: {error}\n")
        sys.exit(status)
    if isinstance(error, Exception):
        _write_error_file(error)
    sys.excepthook(type(error), error, step)
    if isinstance(error, KeyboardInterrupt):
        # Raised again, so that the interpreter ends by SIGINT as usual; the exception has already been printed.
        sys.excepthook = lambda *_: None
        raise error
    sys.exit(1)


def _write_error_file(error: Exception) -> None:
    """Write torch's ``error.json`` (``TORCHELASTIC_ERROR_FILE``), unless it already describes this error, for instance
    through torch's own ``@record``. A child process's report of an error that was handled is overwritten."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time())),
    }
    try:
        words = _words(error)
        if _tells(path, words or type(error).__name__):
            return
        with open(path, "w") as file:
            json.dump({"message": {"message": f"{type(error).__name__}: {words}", "extraInfo": details}}, file)
    except OSError as problem:
        sys.stderr.write(f"edl: cannot write the error file {path}: {problem}\n")


def _words(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a foreign __str__, of an object that may be half initialised
        return "<exception str() failed>"  # as the interpreter prints it


def _tells(path: str, words: str) -> bool:
    """Whether the file describes this error, or one that it quotes, as a parent's error does after a child has failed.
    A file in an unknown format counts as such."""
    try:
        with open(path, errors="replace") as file:
            text = file.read()
    except FileNotFoundError:
        return False
    try:
        message = json.loads(text)["message"]
        reported = message if isinstance(message, str) else str(message["message"])
        return words in reported or bool(reported and reported in words)
    except (ValueError, KeyError, TypeError):
        return bool(text)
