"""Runs a function in a worker: it is read from a private folder of the caller of ``edl.launch.api``, and its result is
written there.

Functions and results are pickled, unlike anything else here, and unpickling runs code. So only files that belong to
this user and that no other user can write or read are unpickled, and nothing from a network.

The folder holds ``before.json`` (what is needed to find the function), ``call.pickle`` (function and arguments), and at
the end ``result-ROUND-RANK.pickle`` from each worker that returns.
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
"""Set while this worker imports the caller's main module, where a call would start a job within the job."""


@dataclass(frozen=True, slots=True)
class Before:
    """The data that a worker needs before it can unpickle the call."""

    search: tuple[str, ...]
    """The caller's ``sys.path``."""
    arguments: tuple[str, ...]
    """The caller's ``sys.argv``."""
    main_path: str = ""
    """Path of the caller's main module, if the function or an argument is defined there."""
    main_name: str = ""
    """Its name, if it was started with ``-m``."""


def write_call(folder: Path, before: Before, pickled: bytes) -> None:
    """Write a function for the workers. Raises ``OSError``."""
    write_private(folder / BEFORE, json.dumps(asdict(before)).encode())
    write_private(folder / CALL, pickled)


def run(folder: str, search_first: Callable[[str], None]) -> None:
    """Call the function stored in ``folder``, and write its result there.

    ``search_first`` puts a folder first on the search path.
    """
    place = Path(folder)
    before = Before(**json.loads(read_private(place / BEFORE)))
    if before.search:
        search_first(before.search[0])
        sys.path[:] = before.search
    sys.argv[:] = before.arguments
    _import_main(before)
    function, arguments = pickle.loads(read_private(place / CALL))  # noqa: S301 - checked by read_private
    try:
        result = function(*arguments)
    except SystemExit as end:
        if end.code:
            raise
        result = None  # ended with success and without a result; torch's launcher returns None as well
    try:
        data = pickle.dumps(result)
    except Exception as error:
        kind = type(result).__qualname__
        raise TypeError(f"the result cannot go back to the caller: {kind} cannot be pickled: {error}") from error
    write_private(place / _result_name(os.environ), data)


def _result_name(environment: Mapping[str, str]) -> str:
    """File name by round and rank. Trainers of parameter servers live through rounds, and know of them only if they use
    edl: the results of all rounds count as round 0."""
    if "EDL_PS" not in environment:
        return f"result-{environment['EDL_ROUND']}-{environment['RANK']}.pickle"
    from edl.worker.session import opened  # only now: a function may do without

    session = opened()
    seat = session.seat if session is not None else None
    return f"result-0-{environment['RANK'] if seat is None else seat.rank}.pickle"


def _import_main(before: Before) -> None:
    """Import the caller's main module here under another name, as ``multiprocessing`` does when it spawns."""
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
    """The results of the newest round in the folder, by rank. Raises any exception of unpickling."""
    found: dict[int, dict[int, Path]] = {}
    for path in folder.glob("result-*-*.pickle"):
        _, number, rank = path.stem.split("-")
        found.setdefault(int(number), {})[int(rank)] = path
    newest = found[max(found)] if found else {}
    return {rank: pickle.loads(read_private(path)) for rank, path in sorted(newest.items())}  # noqa: S301 - as above


def write_private(path: Path, data: bytes) -> None:
    """Write a new file with mode 0600, complete or not at all."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    unfinished.replace(path)


def read_private(path: Path) -> bytes:
    """Read a file of this user. Raises ``PermissionError`` when another user could have written it."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{path}: other users have access to it, so it is not unpickled")
        return file.read()
