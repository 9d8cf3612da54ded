"""A function in a worker: taken from a private folder of whoever called ``edl.launch.api``, its result left there.

Functions and results are pickled, which nothing else here is: unpickling runs code. So it is done to files only that
belong to this user and that nobody else may write or read; nothing that came over a network is.

The folder holds ``before.json``, what has to be in place before the function can be found, ``call.pickle``, function
and arguments, and at the end ``result-ROUND-RANK.pickle`` from each worker that returns.
"""

from __future__ import annotations

import json
import os
import pickle
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BEFORE, CALL = "before.json", "call.pickle"

importing_main = False
"""Whether this worker is importing the caller's main module, in which a call would start a job within the job."""


@dataclass(frozen=True, slots=True)
class Before:
    """What a worker needs before it can unpickle."""

    search: tuple[str, ...]
    """The caller's ``sys.path``."""
    arguments: tuple[str, ...]
    """Its ``sys.argv``."""
    main_path: str = ""
    """File of its main module, if the function or an argument is from there."""
    main_name: str = ""
    """The same, where it was started with ``-m``."""


def write_call(folder: Path, before: Before, pickled: bytes) -> None:
    """Leave a function for the workers. Raises ``OSError``."""
    write_private(folder / BEFORE, json.dumps(asdict(before)).encode())
    write_private(folder / CALL, pickled)


def run(folder: str, search_first: Callable[[str], None]) -> None:
    """Call the function that lies in ``folder``, and leave its result there.

    ``search_first``: puts a folder first on the search path, and lets its modules win.
    """
    place = Path(folder)
    before = Before(**json.loads(read_private(place / BEFORE)))
    if before.search:
        search_first(before.search[0])
        sys.path[:] = before.search
    sys.argv[:] = before.arguments
    _import_main(before)
    function, arguments = pickle.loads(read_private(place / CALL))  # noqa: S301 - our user's own, read_private has seen to it
    try:
        result = function(*arguments)
    except SystemExit as end:
        if end.code:
            raise
        result = None  # it has ended well, and said no more; torch's launcher gives None as well
    try:
        data = pickle.dumps(result)
    except Exception as error:
        kind = type(result).__qualname__
        raise TypeError(f"the result cannot go back to the caller: {kind} cannot be pickled: {error}") from error
    write_private(place / _result_name(os.environ), data)


def _result_name(environment: Mapping[str, str]) -> str:
    """By round and rank. Trainers that have parameter servers live through rounds, and hear of them only if they use
    edl: those of all rounds belong together, under the number 0."""
    if "EDL_PS" not in environment:
        return f"result-{environment['EDL_ROUND']}-{environment['RANK']}.pickle"
    from edl.worker.session import opened  # only now: a function may do without

    session = opened()
    seat = session.seat if session is not None else None
    return f"result-0-{environment['RANK'] if seat is None else seat.rank}.pickle"


def _import_main(before: Before) -> None:
    """Make the caller's main module the one here, under another name, as ``multiprocessing`` does when it spawns."""
    global importing_main
    import multiprocessing.spawn  # only now: with it an alias of the main module is made, for every process to come

    importing_main = True
    try:
        if before.main_name:
            multiprocessing.spawn.prepare({"init_main_from_name": before.main_name})
        elif before.main_path:
            multiprocessing.spawn.prepare({"init_main_from_path": before.main_path})
    finally:
        importing_main = False


def results(folder: Path) -> dict[int, Any]:
    """What the workers of the newest round here have left, by rank. Raises what unpickling raises."""
    found: dict[int, dict[int, Path]] = {}
    for path in folder.glob("result-*-*.pickle"):
        _, number, rank = path.stem.split("-")
        found.setdefault(int(number), {})[int(rank)] = path
    newest = found[max(found)] if found else {}
    return {rank: pickle.loads(read_private(path)) for rank, path in sorted(newest.items())}  # noqa: S301 - as above


def write_private(path: Path, data: bytes) -> None:
    """A new file that nobody else may read, complete or not there at all."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    unfinished.replace(path)


def read_private(path: Path) -> bytes:
    """A file of this user's own. Raises ``PermissionError`` when somebody else could have written it."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{path}: not this user's alone, so it is not unpickled")
        return file.read()
