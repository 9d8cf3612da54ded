"""Determines the ``Origin`` of a node: who started its launcher, and which script and versions its workers run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pwd
import socket
import sys
import zipfile
from pathlib import Path

from edl import __version__
from edl.config import environment
from edl.ports import CommandKind, WorkerCommand
from edl.wire.origin import Origin
from edl.worker.script_kind import ScriptKind, kind_of

FRAMEWORKS = ("torch", "paddlepaddle", "paddlepaddle-gpu")


def origin_of(command: WorkerCommand, node: str, python: str) -> Origin:
    """The origin of this launcher. ``python``: the workers' interpreter; empty: the launcher's own. The versions in
    another interpreter are unknown and stay empty."""
    path = _source(command)
    return Origin(
        node,
        socket.gethostname(),
        os.getuid(),
        _user(os.getuid()),
        command.target,
        _digest(path, command.kind) if path is not None else "",
        __version__,
        "" if python else f"{sys.version_info.major}.{sys.version_info.minor}",
        () if python else tuple(_versions()),
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _versions() -> list[str]:
    found = []
    for name in FRAMEWORKS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _source(command: WorkerCommand) -> Path | None:
    """The file that workers run; None if a module's file is not found, and for a function, because each caller may
    define the same function differently."""
    if command.kind is CommandKind.CALL:
        return None
    if command.kind is not CommandKind.MODULE:
        path = Path(command.target)
        return path / "__main__.py" if command.kind is CommandKind.SCRIPT and path.is_dir() else path
    folders = [".", *filter(None, environment().get("PYTHONPATH", "").split(os.pathsep)), *filter(None, sys.path)]
    name = command.target.replace(".", "/")
    candidates = (Path(folder, name + tail) for folder in folders for tail in ("/__main__.py", ".py"))
    return next((path for path in candidates if path.is_file()), None)


def _digest(path: Path, kind: CommandKind) -> str:
    """SHA-256 of a file as hex; empty if it cannot be read, and for binaries, which may differ between hosts, as a
    compiled file does by the time of its source."""
    if kind is CommandKind.SCRIPT:
        match kind_of(str(path)):
            case ScriptKind.ARCHIVE:
                return _digest_of_contents(path)
            case ScriptKind.COMPILED:
                return ""
    try:
        text = path.read_bytes()
    except OSError:
        return ""
    if kind is CommandKind.PROGRAM and not text.startswith(b"#!"):
        return ""
    return hashlib.sha256(text).hexdigest()


def _digest_of_contents(path: Path) -> str:
    """That of an archive's members, without their times: hosts may have built it each for itself."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = sorted((one.filename, one.CRC) for one in archive.infolist())
    except (OSError, zipfile.BadZipFile):
        return ""
    return hashlib.sha256(repr(members).encode()).hexdigest()
