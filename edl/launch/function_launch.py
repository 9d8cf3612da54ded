"""The launcher process that ``edl.launch.api`` starts: the usual command line, with a function in place of a script.

``sys.argv``: the private folder of the call, and the file that defines the function (``-``: no function, the command
line names a script). Options and arguments are in a file in the folder, because they may contain a password and command
lines are visible to all users of the host. A process of its own does not touch the caller's signals, environment and
event loop, so calls work in any thread and in notebooks.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import click

from edl.errors import EdlError
from edl.exit_codes import ExitCode
from edl.launch.cli import with_both_spellings
from edl.launch.settings import Invocation
from edl.ports import CommandKind, WorkerCommand
from edl.worker.call import read_private, write_private

WORDS, REPORT, REFUSAL = "words.json", "report.json", "refusal.json"


def main() -> None:
    """Run the launcher, and exit with its status. Expected errors are written to the folder; the caller raises them."""
    from edl.launch.__main__ import run
    from edl.launch.console import close_console, open_console
    from edl.launch.resolved_options import forget_exports

    open_console()
    forget_exports()
    folder, source = sys.argv[1:]
    command = None if source == "-" else WorkerCommand(CommandKind.CALL, source, (folder,))
    try:
        words = json.loads(read_private(Path(folder) / WORDS))
        invocation = Invocation(command=command, report_file=str(Path(folder) / REPORT))
        run.main(args=with_both_spellings(words), standalone_mode=False, obj=invocation)
    except click.ClickException as error:
        _refuse(folder, "UsageError", error.format_message(), int(ExitCode.USAGE))
    except click.Abort:
        sys.exit(int(ExitCode.INTERRUPTED))
    except EdlError as error:
        _refuse(folder, type(error).__name__, str(error), int(error.exit_code))
    except Exception:  # noqa: BLE001 - top of the program: 1, Python's own status, means that a worker failed
        traceback.print_exc()
        sys.exit(int(ExitCode.INTERNAL))
    finally:
        close_console()


def _refuse(folder: str, kind: str, message: str, status: int) -> None:
    write_private(Path(folder) / REFUSAL, json.dumps({"kind": kind, "message": message}).encode())
    sys.exit(status)
