"""Jobs started from Python: ``elastic_launch(config, entrypoint)(*arguments)``, as in ``torch.distributed.launcher``.

The names are torch's (``torch/distributed/launcher/api.py`` of torch 2.13). The launcher is a separate process with the
same command line that a user would type, so options and errors are the same. The calling process needs no framework,
and its signals, environment and event loop are not touched.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import multiprocessing  # noqa: F401 - defines __mp_main__, the workers' name for the caller's main module
import os
import pickle  # noqa: TID251 - to and from files of this user's own only, see edl/worker/call.py
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edl import errors
from edl.adapters import with_parent
from edl.config import environment
from edl.errors import EdlError, JobFailed, UsageError, WorkerFailure
from edl.launch.api_options import TORCH_ROLE, words_of
from edl.launch.function_launch import REFUSAL, REPORT, WORDS
from edl.wire.fork_server import helper_command
from edl.worker import call

__all__ = ["JobFailed", "LaunchConfig", "WorkerFailure", "elastic_launch", "launch_agent"]


@dataclass
class LaunchConfig:
    """The configuration of a job: the fields of torch's ``LaunchConfig`` in the same order, then edl's own.

    Nothing is validated here: the launcher does that, and its errors name the options of its command line
    (``--nnodes=0:1: …``). A field with its default value counts as not given, so ``EDL_*`` and ``PET_*`` in the
    environment replace it.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int | str
    """Workers on this node: a number, or ``auto``, ``gpu``, ``cpu``."""
    logs_specs: Any = None
    """torch's ``DefaultLogsSpecs``, in place of ``log_dir``, ``redirects`` and ``tee``. Other kinds are refused."""
    run_id: str = ""
    """Name of the job, the same on every node; empty: a new name for each call, for a job on one node only."""
    role: str = TORCH_ROLE
    rdzv_endpoint: str = ""
    """Members of the store, ``HOST:PORT[,…]``; empty: a private store of this launcher, for one node."""
    rdzv_backend: str = ""
    """Empty, unlike torch's ``etcd``: the launchers serve the store themselves, unless an etcd runs at the endpoint."""
    rdzv_configs: Mapping[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    """``timeout`` of ``rdzv_configs``, and takes precedence over it; -1: not given."""
    max_restarts: int | None = 3
    """Worker failures that the job survives."""
    monitor_interval: float | None = 0.1
    """Accepted for compatibility with torch and not used: the end of a worker is noticed at once."""
    start_method: str = "spawn"
    """``spawn``, ``fork`` or ``forkserver``, accepted for compatibility with torch. A function runs under the same
    conditions with each: a new interpreter with the caller's ``sys.path`` and ``sys.argv``, and nothing of its
    memory."""
    log_line_prefix_template: str | None = None
    metrics_cfg: Mapping[str, str] = field(default_factory=dict)
    """Refused unless empty: edl has other metrics."""
    local_addr: str | None = None
    event_log_handler: str = "null"
    """``console`` and ``dynamic_rendezvous`` are accepted and not used; handlers of a program are refused."""
    numa_options: Any = None
    """torch's ``NumaOptions``."""
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: Sequence[str] | None = None
    duplicate_stderr_filters: Sequence[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None
    log_dir: str = ""
    redirects: int | Mapping[int, int] | str = 0
    tee: int | Mapping[int, int] | str = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other options of the launcher by name: ``{"standby": "none", "checkpoint_dir": "/ckpt"}``. True stands for a
    flag, a list for an option that is given several times."""

    def words(self) -> list[str]:
        """The configuration as command-line arguments. Raises ``UsageError`` for a value that no option can express."""
        return words_of(self)


class elastic_launch:
    """A function or a program that the workers of a job run.

    ``config``: a ``LaunchConfig``, or torch's own. ``entrypoint``: a function, which each worker calls in an
    interpreter of its own; or a program, a Python file, or the interpreter, which gets its script or module from the
    arguments.

    A call takes part in the job with this node and returns when the job has ended. The result maps global ranks to
    return values of the function, for the workers that this node had in the last world; for a program it is ``{}``.
    Calls may be made in any thread. Raises ``JobFailed`` if the job fails, and other errors of ``edl.errors`` where the
    command would end with them.

    ``health_check_server``: accepted for compatibility with torch, and neither started nor stopped. The launcher serves
    ``/healthz`` at ``--http-port``.
    """

    def __init__(
        self, config: Any, entrypoint: Callable[..., Any] | str | None, health_check_server: Any = None
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the entrypoint with these arguments."""
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(
    config: Any, entrypoint: Callable[..., Any] | str | None, args: Sequence[Any], health_check_server: Any = None
) -> dict[int, Any]:
    """Equivalent to ``elastic_launch(config, entrypoint, health_check_server)(*args)``, under torch's name for it."""
    if call.importing_main:
        raise UsageError(
            "elastic_launch was called while a worker imports the caller's main module, which would start a job within "
            "the job. Put the call below: if __name__ == '__main__':"
        )
    words = words_of(config)
    if not callable(entrypoint) and not isinstance(entrypoint, str):
        raise UsageError(f"entrypoint={entrypoint!r}: must be a function or the name of a program")
    folder = Path(tempfile.mkdtemp(prefix="edl-call-"))
    try:
        source = "-"
        if isinstance(entrypoint, str):
            words += command_words(entrypoint, args)
        else:
            source = _write_function(folder, entrypoint, tuple(args))
        status = _run(folder, source, words)
        _raise_for(folder, status)
        return call.results(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command_words(entrypoint: str, args: Sequence[Any]) -> list[str]:
    """The launcher's arguments for a program. Python scripts and modules are recognised, because the fork server can
    keep their workers warm."""
    rest = [str(one) for one in args]
    if entrypoint == sys.executable:
        while rest and rest[0] == "-u":  # workers are unbuffered
            del rest[0]
        if rest and rest[0] == "-m":
            return ["--module", "--", *rest[1:]]
        if rest and not rest[0].startswith("-"):
            return ["--", *rest]
        return ["--no-python", "--", entrypoint, *(str(one) for one in args)]
    if entrypoint.endswith(".py") and (Path(entrypoint).is_file() or shutil.which(entrypoint) is None):
        return ["--", entrypoint, *rest]
    return ["--no-python", "--", entrypoint, *rest]


def _write_function(folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Write the function into the folder from which workers load it; returns the source file that defines it, or an
    empty string."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None) or ""
    path = os.path.abspath(path) if os.path.isfile(path) else ""  # at an interactive prompt it may be "<stdin>"
    pickled = _pickled(function, args, main_is_known=bool(spec or path))
    before = call.Before(tuple(one or os.getcwd() for one in sys.path), tuple(sys.argv))
    if _from_main(pickled):
        before = replace(before, main_name=spec.name) if spec else replace(before, main_path=path)
    call.write_call(folder, before, pickled)
    with contextlib.suppress(TypeError, OSError):
        source = inspect.getsourcefile(inspect.unwrap(function)) or ""
        return source if os.path.isfile(source) else ""
    return ""


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], *, main_is_known: bool) -> bytes:
    """Pickle a function and its arguments: by reference if the workers can import it, otherwise by value with
    ``cloudpickle``. Raises ``UsageError`` if neither works."""
    problem = "it was defined at an interactive prompt or in a notebook, which workers cannot import"
    try:
        data = pickle.dumps((function, args))
        if main_is_known or not _from_main(data):
            return data
    except Exception as error:  # noqa: BLE001 - objects may raise anything when they are pickled
        problem = str(error)
    try:
        import cloudpickle
    except ImportError:
        name = getattr(function, "__qualname__", repr(function))
        raise UsageError(
            f"{name} or one of its arguments cannot be sent to the workers: {problem}. Define the function at the top "
            "of a module, or install cloudpickle, which sends functions by value"
        ) from None
    try:
        return bytes(cloudpickle.dumps((function, args)))
    except Exception as error:
        raise UsageError(f"the function or one of its arguments cannot be sent to the workers: {error}") from error


def _from_main(pickled: bytes) -> bool:
    """Whether the pickle may refer to the main module, which has another name in the workers."""
    return b"__main__" in pickled or b"__mp_main__" in pickled


def _run(folder: Path, source: str, words: Sequence[str]) -> int:
    """Run a launcher until it ends; returns its exit status. The launcher dies with this process."""
    call.write_private(folder / WORDS, json.dumps(list(words)).encode())
    launcher = helper_command(sys.executable, "edl.launch.function_launch", str(folder), source)
    command = [sys.executable, "-I", "-S", with_parent.__file__, str(os.getpid()), *launcher]
    stdin = None if source == "-" else subprocess.DEVNULL  # as the children of multiprocessing have it
    # In its own session: a signal from the keyboard reaches it once, from here.
    process = subprocess.Popen(command, env=environment(), stdin=stdin, start_new_session=True)
    try:
        return process.wait()
    except BaseException as error:
        process.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        try:
            process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)  # the second signal kills its workers
            process.wait()
            raise
        raise


def _raise_for(folder: Path, status: int) -> None:
    """Raise the launcher's error, if it failed."""
    refusal, report = _read(folder / REFUSAL), _read(folder / REPORT)
    if refusal:
        kind = getattr(errors, refusal["kind"], None)
        while kind is not None and kind.__init__ is not EdlError.__init__:
            kind = kind.__base__
        raise (kind or UsageError)(refusal["message"])
    if status == 0:
        return
    reason = str(report.get("reason") or "see the output of its launcher")
    raise JobFailed(reason, status, tuple(_failure(one) for one in report.get("failures", ())))


def _failure(plain: Mapping[str, Any]) -> WorkerFailure:
    kept = {name: plain[name] for name in ("rank", "local_rank", "node", "round", "exit_code", "what")}
    return WorkerFailure(**kept, message=plain["exception"], traceback=plain["traceback"] or plain["tail"])


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {}
