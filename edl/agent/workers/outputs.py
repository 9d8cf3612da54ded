"""The log files of a launcher's workers in each round: the shell around ``log_paths``.

Nothing here may stop training: failures are logged once and ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edl.agent.workers.disk_calls import DiskCalls
from edl.agent.workers.log_file import UNBOUNDED, Bounds, LogRoom
from edl.agent.workers.log_paths import (
    HISTORY,
    LATEST,
    REPORT,
    Attempt,
    WorkerFiles,
    changed_environment,
    launch_folder,
    number_of,
    peers,
    pod_log,
    prefix,
)
from edl.agent.workers.log_retention import LogPieces, part_bytes
from edl.agent.workers.logs import OutputStream, StreamPlan
from edl.agent.workers.paddle_environment import shortened, too_long
from edl.agent.workers.recent_output import RecentOutput
from edl.agent.workers.writer_thread import Scribe, in_loop, said_by_loop
from edl.config import LogPlan, StreamTarget
from edl.wire.records import World

TIMEOUT_S = 2.0
"""Seconds to wait for the disk when a file must be written before a worker starts, or read after it has ended."""
DAY_S = 86_400.0
MARK = ".launch"
"""File in each launch's folder that contains the launch's name. By the folder's name alone, ``a.2`` could be a node or
the second launch on ``a``."""


def claim(plan: LogPlan) -> LogPlan:
    """The plan with a newly created folder of this launch. An earlier launch's folder is kept or, with ``overwrite``,
    cleared of its rounds and its report. If the folder cannot be created, the plan is returned unchanged, and the
    failure reported later."""
    if not plan.folder:
        return plan
    wanted = Path(plan.folder)
    with contextlib.suppress(OSError):
        if plan.overwrite:
            for old in (*wanted.glob("attempt_*"), wanted / LATEST, wanted / REPORT, wanted / HISTORY):
                if old.is_dir() and not old.is_symlink():
                    shutil.rmtree(old)
                else:
                    old.unlink(missing_ok=True)
            wanted.mkdir(parents=True, exist_ok=True)
            return plan
        wanted.parent.mkdir(parents=True, exist_ok=True)
        while True:
            name = launch_folder(wanted.name, os.listdir(wanted.parent))
            with contextlib.suppress(FileExistsError):  # another launcher was quicker
                (wanted.parent / name).mkdir()
                plan = dataclasses.replace(plan, folder=str(wanted.parent / name), name=wanted.name)
                (wanted.parent / name / MARK).write_text(wanted.name)
                return plan
    return plan


def earlier(plan: LogPlan) -> dict[str, tuple[int, float]]:
    """Folders of earlier launches of this job on this node, oldest first, with their sizes in bytes and the times at
    which they were last written to. Reads the disk."""
    own = Path(plan.folder)
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(OSError):
        for folder in own.parent.iterdir():
            number = number_of(plan.name, folder.name)
            if number and folder != own and _read(str(folder / MARK)) == plan.name:
                found.append((number, folder))
    return {str(folder): _measured(folder) for _, folder in sorted(found)}


def _measured(folder: Path) -> tuple[int, float]:
    """Size of all files, and the time of the last one, in seconds since 1970."""
    total, written_s = 0, 0.0
    for inner, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                stat = os.lstat(f"{inner}/{name}")
                total, written_s = total + stat.st_size, max(written_s, stat.st_mtime)
    return total, written_s


@dataclass(slots=True)
class Output:
    """The streams of one worker, and its files in the current round."""

    stdout: OutputStream
    stderr: OutputStream
    files: WorkerFiles
    error_file: str
    """Path for the worker's description of an uncaught exception; empty for none."""
    disk: DiskCalls

    async def last_error(self, limit_s: float = TIMEOUT_S) -> str | None:
        """The worker's description of an uncaught exception, "" for none; None if its disk does not answer within
        ``limit_s``."""
        try:
            return await self.disk.call(functools.partial(_read, self.error_file), limit_s)
        except asyncio.TimeoutError:
            return None

    def close(self) -> None:
        """Close both streams after the worker's end."""
        self.stdout.close()
        self.stderr.close()


class Outputs:
    """Opens the log files of one launcher's workers.

    ``environment``: the launcher's own. ``path_each_round``: workers that live through several rounds get the path of
    their error file for each round; otherwise the first path applies. ``wall_clock_s``: seconds since 1970, for
    ``LogPlan.days``.
    """

    def __init__(
        self,
        plan: LogPlan,
        node: str,
        environment: Mapping[str, str],
        log: Callable[[str], None],
        *,
        path_each_round: bool = True,
        wall_clock_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._plan = plan
        self._node = node
        self._environment = environment
        self._log = log
        self._path_each_round = path_each_round
        self.recent = RecentOutput()
        """The last lines of all workers."""
        self._made: dict[tuple[str, int], int] = {}
        self._scribe = Scribe()
        self._disk = DiskCalls()
        self._pieces = LogPieces(plan.rounds, plan.most_bytes, plan.days * DAY_S)
        self._wall_clock_s = wall_clock_s
        self._part_bytes = part_bytes(plan.most_bytes, plan.workers)
        self._parts: dict[Path, int] = {}
        self._room: LogRoom | None = None
        """Created when there is something to write."""
        self._warn: Callable[[str], None] = lambda why: None
        self._busy: Callable[[], set[str]] = set
        self._noted = 0
        """The newest round that is noted."""

    async def done(self, limit_s: float) -> bool:
        """Wait until everything is written; False after ``limit_s``."""
        return await self._scribe.done(limit_s)

    def files(self, attempt: Attempt) -> WorkerFiles:
        """Paths that have never been used, in a folder that is being created."""
        place = (attempt.folder, attempt.local_rank)
        self._made[place] = again = self._made.get(place, 0) + 1
        files = WorkerFiles(self._plan.folder, attempt, again, self._plan.layout, self._plan.servers)
        if files.folder:
            log = said_by_loop(self._log)

            def make() -> None:
                try:
                    Path(files.folder).mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    log(f"cannot create the log folder {files.folder} ({error.strerror}): training continues")

            self._scribe.do(make)
            if self._room is None:
                self._room = self._look_around()
            self._pieces.begin(attempt.folder, self._wall_clock_s())
            self._forget()
        return files

    def met(self, job: str, world: World) -> None:
        """A round begins: in Paddle's layout, note its nodes."""
        if not self._plan.links or world.round <= self._noted:
            return
        self._noted = world.round
        path, line = Path(pod_log(self._plan.links, job, self._node)), peers(world)

        def append() -> None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(line)

        self._scribe.do(append)

    def warn_by(self, warn: Callable[[str], None]) -> None:
        """``warn`` gets the reason when nothing is written for a while, and an empty text when writing resumes."""
        self._warn = warn

    def _shut(self, why: str) -> None:
        self._warn(why)

    def ask_busy(self, busy: Callable[[], set[str]]) -> None:
        """``busy`` returns the folders of rounds that living workers write to, which must be kept."""
        self._busy = busy

    def _look_around(self) -> LogRoom:
        """Prepare for writing: find earlier launches, and watch the free space."""
        plan = self._plan
        if plan.name:
            found = in_loop(self._set_earlier)
            self._scribe.do(lambda: found(earlier(plan)))
        return LogRoom(plan.folder, plan.reserve, said_by_loop(self._log), in_loop(self._shut))

    def _set_earlier(self, launches: dict[str, tuple[int, float]]) -> None:
        sizes = {folder: size for folder, (size, _) in launches.items()}
        self._pieces.found(sizes, {folder: written_s for folder, (_, written_s) in launches.items()})
        self._forget()

    def _forget(self) -> None:
        """Delete surplus files: a job of weeks has thousands of rounds and may write without end."""
        for old in self._pieces.surplus(self._busy(), self._wall_clock_s()):
            self._scribe.do(functools.partial(_remove, Path(self._plan.folder) / old))

    def _bounds(self, round_folder: str) -> Bounds:
        """Limits of a file in the folder of a round."""

        def took(size: int) -> None:
            if self._pieces.grow(round_folder, size, self._wall_clock_s()):
                self._forget()

        def parted(path: Path, size: int) -> Path:
            self._parts[path] = number = self._parts.get(path, 0) + 1
            part = path.with_name(f"{path.name}.{number}")
            self._pieces.part(round_folder, str(part), size)
            return part

        if self._room is None:
            return UNBOUNDED
        return Bounds(self._room, self._part_bytes, took, parted, self._wall_clock_s)

    def log_dir(self, files: WorkerFiles) -> str:
        """The log folder passed to a worker (``PADDLE_LOG_DIR``)."""
        return self._plan.links or files.folder

    def open(self, files: WorkerFiles, environment: Mapping[str, str]) -> Output:
        """Create pipes for a worker with this environment. Raises ``OSError`` when no descriptors are left."""
        stdout = OutputStream(self._stream(files, environment, stderr=False), self._scribe, self._log)
        try:
            stderr = OutputStream(self._stream(files, environment, stderr=True), self._scribe, self._log)
        except OSError:
            stdout.close()
            raise
        self._scribe.do(lambda: self._note(files, environment))
        return Output(stdout, stderr, files, files.error_file, self._disk)

    def move(self, output: Output, files: WorkerFiles, environment: Mapping[str, str]) -> None:
        """Switch a worker to the files of a new round."""
        output.stdout.switch(self._stream(files, environment, stderr=False))
        output.stderr.switch(self._stream(files, environment, stderr=True))
        output.files = files
        if self._path_each_round:
            output.error_file = files.error_file
        self._scribe.do(lambda: self._note(files, environment))

    async def backed_up(self, files: WorkerFiles, environment: dict[str, str]) -> dict[str, str]:
        """The environment to start a worker with: lists that are too long are moved to a file that Paddle reads. In
        Paddle's layout all workers but pservers have the file, as with Paddle's launcher. If there is no folder or the
        file cannot be written, the environment is unchanged."""
        if not files.folder or not ((self._plan.links and not files.of_server) or too_long(environment)):
            return environment
        changed = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        text, why = json.dumps(changed, indent=4, sort_keys=True), ""

        def write() -> None:
            Path(files.folder).mkdir(parents=True, exist_ok=True)
            Path(files.backup_environment).write_text(text)

        try:
            await self._disk.call(write, TIMEOUT_S)
        except OSError as error:
            why = error.strerror or str(error)
        except asyncio.TimeoutError:
            why = f"its disk has not answered for {TIMEOUT_S:g} s"
        if why:
            self._log(f"cannot write {files.backup_environment} ({why}): workers get everything in their environment")
            return environment
        return shortened(environment, files.backup_environment)

    def _stream(self, files: WorkerFiles, environment: Mapping[str, str], *, stderr: bool) -> StreamPlan:
        plan, attempt = self._plan, files.attempt
        name, filters = ("stderr", plan.stderr_filters) if stderr else ("stdout", plan.stdout_filters)
        target = plan.stderr(attempt.local_rank) if stderr else plan.stdout(attempt.local_rank)
        both = target is StreamTarget.BOTH
        shown = prefix(plan.prefix, attempt, self._node, environment.get("ROLE_NAME", "default"), socket.gethostname())
        # Paddle's launcher shows the output of its first worker from a single file, so on a single stream.
        console = sys.stderr.buffer if stderr and not plan.quiet else sys.stdout.buffer
        return StreamPlan(
            console=console if both or target is StreamTarget.CONSOLE else None,
            prefix=shown.encode() if plan.prefixed(attempt.local_rank, stderr=stderr) else b"",
            file=Path(files.stderr if stderr else files.stdout) if both or target is StreamTarget.FILE else None,
            filtered=Path(files.filtered(name)) if both and filters else None,
            filters=tuple(text.encode() for text in filters) if both else (),
            bounds=self._bounds(attempt.folder),
            keep=functools.partial(self.recent.add, attempt.local_rank, attempt.rank, attempt.round, stderr),
        )

    def _note(self, files: WorkerFiles, environment: Mapping[str, str]) -> None:
        """Links to the newest files for people, and the environment files of Paddle's launcher."""
        if not files.folder:
            return
        if not files.attempt.ahead:
            _lead(Path(self._plan.folder) / LATEST, Path(self._plan.folder) / files.attempt.folder)
        if self._plan.links:
            with contextlib.suppress(OSError):
                # As the system gave them to this process: not every value is text in this encoding.
                Path(files.environment).write_bytes(os.fsencode(changed_environment(environment, self._environment)))
            for name, target in files.links().items():
                if os.path.exists(target):
                    _lead(Path(self._plan.links) / name, Path(target), keep=not self._plan.overwrite)


def _remove(path: Path) -> None:
    """Delete a file, or as much of a folder as possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _lead(link: Path, target: Path, *, keep: bool = True) -> None:
    """Point a link to ``target``. A regular file in its place is not ours: with ``keep`` it is renamed with a number,
    else it is replaced.

    Without support for links, nothing is created.
    """
    # Launchers of several hosts may share the folder, and containers use the same low process numbers.
    fresh = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        if keep and link.exists() and not link.is_symlink():
            link.rename(link.with_name(launch_folder(link.name, os.listdir(link.parent))))
        fresh.symlink_to(os.path.relpath(target, link.parent))
        try:
            fresh.replace(link)
        except OSError:
            fresh.unlink()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
