"""Cuts a worker's output into pieces to pass on, and into lines to keep. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Output to pass on."""

    text: bytes = b""
    """Exactly what was written, with its line ends."""
    lines: list[bytes] = field(default_factory=list)
    """The lines that end with this piece, from their beginnings and without newline."""


class LineSplitter:
    """Passes on whole lines at once, an unfinished one up to its last carriage return, and the rest of it after
    ``hold_s``: a progress bar is seen to move and a prompt is seen, but a line that arrives in two reads stays whole.

    A line of more than ``most_bytes`` counts as finished, so that memory is limited. Times are those of one monotonic
    clock.
    """

    def __init__(self, hold_s: float, most_bytes: int) -> None:
        self._hold_s = hold_s
        self._most_bytes = most_bytes
        self._passed = 0
        """Bytes of ``line`` that have been passed on."""
        self.line = b""
        """The unfinished line from its beginning."""
        self.due_s: float | None = None
        """When the rest of the unfinished line is to be passed on; None if there is none."""

    def feed(self, data: bytes, now_s: float) -> OutputPiece:
        """What may be passed on now that ``data`` has been read."""
        whole = self.line + data
        *lines, line = whole.split(b"\n")
        begin = len(whole) - len(line)
        until = max(begin or self._passed, begin + line.rfind(b"\r"))
        if len(line) > self._most_bytes:
            lines.append(line)
            line, begin = b"", len(whole)
            until = begin
        piece = OutputPiece(whole[self._passed : until], lines)
        self.line, self._passed = line, until - begin
        if self._passed == len(line):
            self.due_s = None
        elif piece.text or self.due_s is None:  # what is held is all new
            self.due_s = now_s + self._hold_s
        return piece

    def flush(self, now_s: float) -> OutputPiece:
        """The rest of the unfinished line if it is due, else nothing."""
        return self._rest([]) if self.due_s is not None and self.due_s <= now_s else OutputPiece()

    def end(self) -> OutputPiece:
        """The rest when there is nothing more to come."""
        piece = self._rest([self.line] if self.line else [])
        self.line, self._passed = b"", 0
        return piece

    def _rest(self, lines: list[bytes]) -> OutputPiece:
        rest = self.line[self._passed :]
        self._passed, self.due_s = len(self.line), None
        return OutputPiece(rest, lines)
