"""Writes the history files of one job on one node, in a thread: a slow disk delays no decision of the Master.

A full, slow or vanished disk costs lines of the history and nothing else. Lines that could not be written are kept up
to ``MOST_KEPT_BYTES`` and tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from edl.history.parts import HistoryPart, PartFile, part_bytes, part_of, surplus
from edl.threads import Threads
from edl.wire.history_lines import HistoryLine, line_text, parse_line

Item = TypeVar("Item")

MOST_WAITING = 10_000
"""Number of steps that wait for a slow disk; further ones are lost."""
MOST_KEPT_BYTES = 1 << 20
"""Bytes of lines that are kept while the disk takes none."""
RETRY_S = 5.0
"""Seconds between two attempts on a disk that takes none, if there is nothing new to write."""
MOST_AT_ONCE_BYTES = 1 << 20
"""Bytes that are appended at once, if there are several lines."""
_AT_EVENTS = ("event", "round")
"""Kinds of lines that a Master writes together with their event."""


class LineFiles(Protocol):
    """The files of a folder; implemented by ``edl.adapters.line_files.LineFolder``, which describes the methods."""

    where: str
    """The folder, for messages."""

    def create(self, *, parents: bool) -> None:
        """Create the folder, unless it exists."""
        ...

    def files(self) -> dict[str, tuple[int, float]]:
        """Size and last modification of each file."""
        ...

    def append(self, name: str, data: bytes) -> int:
        """Append to a file; returns its size."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        ...

    def read(self, name: str) -> bytes:
        """The content of a file."""
        ...


class HistoryFiles:
    """Appends lines to the files of one run. Not for several threads."""

    def __init__(self, files: LineFiles, run: str, most_bytes: int, say: Callable[[str], None]) -> None:
        """``most_bytes``: limit for all files of the job in this folder; 0: none. ``say``: called from the writing
        thread when the disk begins or ceases to refuse lines."""
        self._files = files
        self._run = run
        self._most_bytes = most_bytes
        self._part_bytes = part_bytes(most_bytes)
        self._say = say
        self._term = 0
        """Of the newest lines."""
        self._part = HistoryPart(run, 0, 0)
        self._size = 0
        self._waiting: deque[tuple[int, bytes]] = deque()
        """Lines with their terms."""
        self._waiting_bytes = 0
        self._lost = 0
        self._trouble = ""

    @property
    def troubled(self) -> bool:
        """Whether the disk has refused the last lines."""
        return bool(self._trouble)

    def append(self, lines: Sequence[HistoryLine]) -> None:
        """Write lines, all of the same term. Events of earlier terms (``copied``) are left out if the files of this
        folder have them."""
        if lines and lines[0].term != self._term:
            self._term = lines[0].term
            known = self._known() if any(line.copied for line in lines) else set()
            lines = [line for line in lines if not (line.copied and line.kind in _AT_EVENTS and line.after in known)]
        for line in lines:
            self._keep(line.term, line_text(line))
        self.retry()

    def retry(self) -> None:
        """Write what is waiting, if the disk takes it."""
        try:
            while self._waiting:
                self._write_some()
        except OSError as error:
            if not self._trouble:
                self._trouble = error.strerror or str(error)
                self._say(
                    f"cannot write the history to {self._files.where} ({self._trouble}): the job continues, and lines "
                    "of the history may be lost"
                )
            return
        if self._trouble:
            self._say(f"the history is written to {self._files.where} again; {self._losses()}")
            self._trouble = ""

    def _losses(self) -> str:
        lost, self._lost = self._lost, 0
        return f"{lost} lines are lost" if lost else "no line is lost"

    def _keep(self, term: int, text: bytes) -> None:
        if self._trouble and self._waiting_bytes + len(text) > MOST_KEPT_BYTES:
            self._lost += 1
            return
        self._waiting.append((term, text))
        self._waiting_bytes += len(text)

    def _write_some(self) -> None:
        """Append as many lines as belong into one file, at least one."""
        term = self._waiting[0][0]
        if term != self._part.term:
            self._part, self._size = HistoryPart(self._run, term, 0), 0
        if not self._part.number or self._size >= self._part_bytes:
            self._begin_part()
        count = size = 0
        for own, text in self._waiting:
            full = self._size + size + len(text) > self._part_bytes or size > MOST_AT_ONCE_BYTES
            if own != term or (count and full):
                break
            count, size = count + 1, size + len(text)
        data = b"".join(self._waiting[index][1] for index in range(count))
        if self._size and self._size + len(data) > self._part_bytes:
            self._begin_part()
        self._size = self._append(data)
        for _ in range(count):
            self._waiting_bytes -= len(self._waiting.popleft()[1])

    def _append(self, data: bytes) -> int:
        try:
            return self._files.append(self._part.name, data)
        except FileNotFoundError:
            self._files.create(parents=False)
            return self._files.append(self._part.name, data)

    def _begin_part(self) -> None:
        """Begin the next file, and delete the oldest ones if there is no room for it."""
        self._files.create(parents=not self._part.number)
        found = {name: PartFile(*one) for name, one in self._files.files().items()}
        for name in surplus(found, self._run, self._most_bytes, self._part_bytes):
            self._files.delete(name)
        self._part, self._size = self._part._replace(number=self._part.number + 1), 0

    def _known(self) -> set[int]:
        """Numbers of the events that the files of this folder have. Unreadable files are skipped: a line that is
        written twice does no harm."""
        known: set[int] = set()
        try:
            names = [name for name in self._files.files() if (part := part_of(name)) and part.run == self._run]
            for name in names:
                parsed = map(parse_line, self._files.read(name).split(b"\n"))
                known |= {line.after for line in parsed if line is not None and line.kind == "event"}
        except OSError:
            pass
        return known


class WriterThread(Generic[Item]):
    """Passes items to a function in a thread, in order. ``put`` never blocks."""

    def __init__(
        self,
        threads: Threads,
        files: HistoryFiles,
        lines_of: Callable[[Item], Sequence[HistoryLine]],
        say: Callable[[str], None],
    ) -> None:
        """``lines_of``: called in the thread. ``say``: as in ``HistoryFiles``."""
        self._threads = threads
        self._files = files
        self._lines_of = lines_of
        self._say = say
        self._condition = threads.condition()
        self._items: deque[Item] = deque()
        self._lost = 0
        self._said_lost = False
        self._said_none = False
        self._ending = False
        self._ended = threads.event()
        self._started = False

    def put(self, item: Item) -> None:
        """Queue an item. It is lost if too many are waiting, or after ``end``."""
        with self._condition:
            if self._ending:
                return
            if len(self._items) >= MOST_WAITING:
                self._lost += 1
                slow, self._said_lost = not self._said_lost, True
            else:
                self._items.append(item)
                slow = False
            started = self._start()
            none, self._said_none = not started and not self._said_none, not started
            self._condition.notify_all()
        if none:
            self._say("no further thread can be started: the job continues, and its history is written later")
        if slow and started:
            self._say("the disk of the history does not respond: the job continues, and lines of the history are lost")

    def _start(self) -> bool:
        """Start the thread, unless it has been started; False if the system allows no more threads at present. Requires
        the lock."""
        if not self._started:
            try:
                self._threads.start(self._run, name="edl-history")
            except RuntimeError:
                return False
            self._started = True
        return True

    def end(self, limit_s: float) -> bool:
        """Write what is waiting, and end the thread; False if that takes longer than ``limit_s``. Blocks."""
        with self._condition:
            self._ending = True
            self._condition.notify_all()
            if not self._started and not self._items:
                return True
            if not self._start():
                return False
        return self._ended.wait(limit_s)

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except Exception as error:  # noqa: BLE001 - top of a thread: the job continues without a history
            self._say(f"the history is not written any more: {type(error).__name__}: {error}")
            with self._condition:
                self._ending = True
                self._items.clear()
        finally:
            self._ended.set()

    def _serve(self) -> bool:
        """Handle what is waiting; False at the end."""
        with self._condition:
            while not self._items and not self._ending:
                if not self._condition.wait(RETRY_S if self._files.troubled else None):
                    break
            items, self._items = self._items, deque()
            lost, self._lost, ending = self._lost, 0, self._ending
        for item in items:
            self._files.append(self._lines_of(item))
        if lost:
            self._said_lost = False
            self._say(f"the disk of the history responds again; {lost} steps of the Master are missing in it")
        if not items:
            self._files.retry()
        return not ending
