"""Switches: files in the checkpoint directory by which anyone with write access requests something of the job.

``SAVE``: write a checkpoint now and continue; the file is removed when that is done. ``KILL``: write a checkpoint and
end; the file stays, so that a job that is started again, by a queue or by mistake, ends at once. The file's content is
shown as the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edl.checkpoint.directory.failures import cannot_read, why
from edl.errors import Killed
from edl.ports import Files
from edl.rendezvous.phrases import one_line
from edl.wire.messages import Asked
from edl.wire.purpose import Purpose

NAMES = {Purpose.KILL: "KILL", Purpose.SAVE: "SAVE"}
REASON_CHARACTERS = 200
POLL_S = 1.0
REMOTE_POLL_S = 15.0
"""Seconds; each poll of an object store is a paid request."""


@dataclass(frozen=True, slots=True)
class SwitchFile:
    """A switch's file as last seen."""

    stamp: str
    reason: str


def asked(seen: dict[Purpose, SwitchFile], paths: dict[Purpose, str]) -> frozenset[Asked]:
    """The requests of the existing files. A job that is to end needs no separate checkpoint."""
    purposes = [Purpose.KILL] if Purpose.KILL in seen else list(seen)
    return frozenset(Asked(purpose, _by(paths[purpose], seen[purpose].reason)) for purpose in purposes)


def _by(path: str, reason: str) -> str:
    return f"the file {path} ({reason})" if reason else f"the file {path}"


def reason_in(content: bytes) -> str:
    """The first non-empty line, made printable and truncated to ``REASON_CHARACTERS``."""
    for line in content.decode(errors="replace").splitlines():
        shown = one_line(line)
        if shown:
            return shown if len(shown) <= REASON_CHARACTERS else shown[:REASON_CHARACTERS] + " …"
    return ""


class Switches:
    """The two switch files. Calls block for one request per file."""

    def __init__(self, files: Files, say: Callable[[str], None]) -> None:
        """``files``: the checkpoint directory. ``say``: called with each warning."""
        self._files = files
        self._say = say
        self._paths = {purpose: files.path(name) for purpose, name in NAMES.items()}
        self._seen: dict[Purpose, SwitchFile] = {}
        self._answering = ""
        """Stamp under which ``SAVE`` was first seen since the last checkpoint that it requested."""
        self._trouble = ""
        self.poll_s = REMOTE_POLL_S if files.remote else POLL_S
        """Seconds between two polls."""

    def poll(self) -> frozenset[Asked]:
        """The current requests. A request is repeated as long as its file exists.

        If the directory cannot be read, there are no new requests; that is reported once.
        """
        try:
            for purpose in NAMES:
                self._look(purpose)
            if Purpose.SAVE in self._seen and not self._answering:
                self._answering = self._seen[Purpose.SAVE].stamp
            self._trouble = ""
        except OSError as error:
            trouble = f"cannot look for the files KILL and SAVE in {self._files.where}: {why(error)}"
            if trouble != self._trouble:
                self._trouble = trouble
                self._say(trouble)
        return asked(self._seen, self._paths)

    def clear_save(self) -> None:
        """Remove ``SAVE`` after its checkpoint was written. A file touched since then stays, since it requests another
        one."""
        answered, self._answering = self._answering, ""
        name = NAMES[Purpose.SAVE]
        try:
            if answered and self._files.stamp(name) == answered:
                self._files.remove(name)
                self._seen.pop(Purpose.SAVE, None)
        except OSError as error:
            self._say(
                f"cannot remove {self._paths[Purpose.SAVE]}: {why(error)}. Remove it, or it requests another checkpoint"
            )

    def refuse_if_killed(self) -> None:
        """Check at the start of a launcher. Raises ``Killed`` while the ``KILL`` file exists, ``CheckpointError`` if
        the directory cannot be read."""
        try:
            self._look(Purpose.KILL)
        except OSError as error:
            raise cannot_read(self._files, error) from error
        seen = self._seen.get(Purpose.KILL)
        if seen is not None:
            by = _by(self._paths[Purpose.KILL], seen.reason)
            raise Killed(f"this job was ended by {by} and may not start. Remove that file to start it")

    def _look(self, purpose: Purpose) -> None:
        name = NAMES[purpose]
        stamp = self._files.stamp(name)
        if not stamp:
            self._seen.pop(purpose, None)
            return
        seen = self._seen.get(purpose)
        if seen is None or seen.stamp != stamp:
            try:
                self._seen[purpose] = SwitchFile(stamp, reason_in(self._files.read(name)))
            except FileNotFoundError:
                self._seen.pop(purpose, None)
            except OSError:  # a folder of that name, or an unreadable file: it is a request all the same
                self._seen[purpose] = SwitchFile(stamp, "")
