"""The command line ``python -m edl.launch``, also installed as ``edl-run``; start reading here.

``run`` resolves the options, ``settings_of`` (``cli.py``) makes settings of them, and ``compose.launch`` runs the
launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn

import click

from edl import __version__
from edl.adapters.system_threads import PatientPool
from edl.config import adopt, environment
from edl.errors import EdlError, SettingError
from edl.exit_codes import ExitCode
from edl.launch import cluster_env, paddle_options, torchrun_options
from edl.launch.cli import settings_of, with_both_spellings
from edl.launch.console import close_console, exit_at_once, open_console, unblocked_console
from edl.launch.leave_signals import SIGNALS, outlive_loop
from edl.launch.options import SectionedCommand, launcher_options
from edl.launch.reporting import report_error
from edl.launch.resolved_options import OF_WORKER, ResolvedOptions, forget_exports, inside_worker
from edl.launch.settings import Invocation, LaunchSettings, PserverSettings, ReaderSettings

THREADS_S = 5.0
"""Seconds that threads may take to end after the launcher has finished."""


@click.command(
    name="edl-run",
    cls=SectionedCommand,
    context_settings={
        "ignore_unknown_options": False,
        "allow_interspersed_args": False,
        "auto_envvar_prefix": "EDL",
        "max_content_width": 120,
    },
)
@launcher_options
# Not from the environment: container images use EDL_VERSION for the version of edl that they contain.
@click.version_option(__version__, prog_name="edl", allow_from_autoenv=False)
@click.argument("script", required=False, default="")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], **_: Any) -> None:
    """Run SCRIPT as an elastic job; start the same command on every node.

    \b
    One node, two workers:      edl-run --nproc-per-node=2 train.py
    Two to four nodes:          edl-run --nnodes=2:4 --rdzv-endpoint=HOST1:2379 --rdzv-id=my-job train.py
    Data readers for that job:  edl-run --role=reader --readers=8 --rdzv-endpoint=HOST1:2379 --rdzv-id=my-job
    Trainers and pservers:      edl-run --run-mode=ps --trainers=1:4 --nproc-per-node=2 train.py
    """
    context = click.get_current_context()
    resolved = ResolvedOptions.by(context, script, arguments)
    try:
        settle(resolved, environment())
        adopt(resolved.environment)
        _start(resolved, context.find_object(Invocation) or Invocation())
    except SettingError as error:
        raise resolved.named(error) from error


def _start(resolved: ResolvedOptions, invocation: Invocation) -> None:
    """Run the launcher that the options describe, and exit with its status."""
    _find_temporary_folder()
    settings = settings_of(resolved, invocation)
    # Imported late: printing the help does not need the network libraries.
    match settings:
        case PserverSettings():
            from edl.launch.pservers import serve_parameters

            _run_and_exit(serve_parameters(settings))
        case ReaderSettings():
            from edl.launch.readers import serve_readers

            _run_and_exit(serve_readers(settings))
        case LaunchSettings():
            from edl.launch.compose import launch

            _run_and_exit(launch(settings))


def _find_temporary_folder() -> None:
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        value, what = environment().get("TMPDIR", ""), "no folder for temporary files can be written to"
        raise SettingError("TMPDIR", value, what, "Name one, or mount one at /tmp") from None


def _run_and_exit(work: Coroutine[Any, Any, int]) -> NoReturn:
    """Run the launcher and exit with its status.

    Signals do not change the status once it is known: the interpreter takes a moment to exit, and the host of an ended
    job may be shut down meanwhile. They end the wait for a console that does not accept what is left.
    """
    with unblocked_console():
        status, timer = asyncio.run(_with_exit_timeout(work))
        timer.cancel()
        for number in SIGNALS:
            signal.signal(number, lambda *_: exit_at_once(status))
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _exit_timer(status).start()
    sys.exit(status)


async def _with_exit_timeout(work: Coroutine[Any, Any, int]) -> tuple[int, threading.Timer]:
    """Run the launcher; returns its status and the timer that limits the end of the event loop's threads."""
    asyncio.get_running_loop().set_default_executor(PatientPool(thread_name_prefix="edl-pool"))
    await asyncio.to_thread(int)  # its first thread, before workers may use up what the system allows
    status = await work
    outlive_loop()
    timer = _exit_timer(status)
    timer.start()
    return status, timer


def _exit_timer(status: int) -> threading.Timer:
    """A timer, not started yet, that exits the process ``THREADS_S`` later.

    A thread that is blocked on a hanging file system cannot be stopped, and both asyncio and the interpreter would wait
    for it.
    """

    def give_up() -> None:
        what = f"exiting with status {status} without waiting for it"
        text = f"edl: a thread is still blocked, possibly on a hanging file system: {what}\n"
        with contextlib.suppress(OSError, ValueError):
            if select.select([], [2], [], 0)[1]:  # else the console is blocked as well
                os.write(2, text.encode())
        os._exit(status)

    timer = threading.Timer(THREADS_S, give_up)
    timer.daemon = True
    return timer


def settle(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    """Translate other launchers' options and variables into edl's own. Raises ``UsageError``."""
    torchrun_options.apply(resolved, env)
    paddle_options.apply(resolved, env)
    if inside_worker(env):
        resolved.for_workers.update(dict.fromkeys(OF_WORKER))
    else:
        cluster_env.apply(resolved, env)


def main(dialect: str = "") -> None:
    """Entry point. Every expected error ends with one message and its exit status; only a bug shows a traceback.

    ``dialect``: the default of ``--dialect``; empty: ``auto``.
    """
    open_console()
    if dialect:
        sys.argv.insert(1, f"--dialect={dialect}")
    forget_exports()
    try:
        arguments = with_both_spellings(sys.argv[1:])
        run.main(args=arguments, standalone_mode=False, obj=Invocation(tuple(arguments)))
    except click.ClickException as error:
        error.show()
        sys.exit(int(ExitCode.USAGE))
    except click.Abort:
        sys.exit(int(ExitCode.INTERRUPTED))
    except EdlError as error:
        click.echo(f"edl: error: {error}", err=True)
        _report_error(error, int(error.exit_code))
        sys.exit(int(error.exit_code))
    except Exception as error:  # noqa: BLE001 - top of the program: 1, Python's own status, means that a worker failed
        traceback.print_exc()
        click.echo("edl: error: this is a bug in edl. Please report it, with the lines above", err=True)
        _report_error(error, int(ExitCode.INTERNAL))
        sys.exit(int(ExitCode.INTERNAL))
    finally:
        close_console()


def _report_error(error: Exception, status: int) -> None:
    path = environment().get("TORCHELASTIC_ERROR_FILE", "")
    report_error(path, error, status, lambda text: click.echo(f"edl: {text}", err=True))


if __name__ == "__main__":
    main()
