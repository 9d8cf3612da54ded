"""Files in the checkpoint directory by which anybody who can write there asks something of the job.

``SAVE``: write a checkpoint now and go on; the file goes away once that is done. ``KILL``: write a checkpoint and end;
the file stays, so that a job which is started again, by a queue or by mistake, ends at once. What is written inside is
shown as the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edl.checkpoint.directory.failures import cannot_read, why
from edl.errors import Killed
from edl.ports import Files
from edl.rendezvous.phrases import one_line
from edl.wire.messages import Asked, Purpose

NAMES = {Purpose.KILL: "KILL", Purpose.SAVE: "SAVE"}
REASON_CHARACTERS = 200
POLL_S = 1.0
REMOTE_POLL_S = 15.0
"""Each look at an object store is a paid request."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A switch's file as it was seen last."""

    stamp: str
    reason: str


def asked(seen: dict[Purpose, Seen], paths: dict[Purpose, str]) -> frozenset[Asked]:
    """What is asked for by the files that are there. A job that is to end needs no other checkpoint before."""
    purposes = [Purpose.KILL] if Purpose.KILL in seen else list(seen)
    return frozenset(Asked(purpose, _by(paths[purpose], seen[purpose].reason)) for purpose in purposes)


def _by(path: str, reason: str) -> str:
    return f"the file {path} ({reason})" if reason else f"the file {path}"


def reason_in(content: bytes) -> str:
    """The first line with something in it, made fit to be shown."""
    for line in content.decode(errors="replace").splitlines():
        shown = one_line(line)
        if shown:
            return shown if len(shown) <= REASON_CHARACTERS else shown[:REASON_CHARACTERS] + " …"
    return ""


class Switches:
    """The two files. Blocks for one request a file."""

    def __init__(self, files: Files, say: Callable[[str], None]) -> None:
        """``say`` takes warnings."""
        self._files = files
        self._say = say
        self._paths = {purpose: files.path(name) for purpose, name in NAMES.items()}
        self._seen: dict[Purpose, Seen] = {}
        self._answering = ""
        """Stamp under which ``SAVE`` was first seen since the last checkpoint it asked for."""
        self._trouble = ""
        self.poll_s = REMOTE_POLL_S if files.remote else POLL_S
        """How often to look."""

    def poll(self) -> frozenset[Asked]:
        """What is asked for now. The same request comes again as long as its file is there.

        A directory that cannot be read asks for nothing new; that is said once.
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
        """The checkpoint that was asked for is written. A file touched since then stays: it asks for another one."""
        answered, self._answering = self._answering, ""
        name = NAMES[Purpose.SAVE]
        try:
            if answered and self._files.stamp(name) == answered:
                self._files.remove(name)
                self._seen.pop(Purpose.SAVE, None)
        except OSError as error:
            self._say(f"cannot remove {self._paths[Purpose.SAVE]}: {why(error)}. Remove it, or it is answered again")

    def refuse_if_killed(self) -> None:
        """For a launcher that starts. Raises ``Killed`` while the file lies there, ``CheckpointError`` when nobody can
        tell."""
        try:
            self._look(Purpose.KILL)
        except OSError as error:
            raise cannot_read(self._files, error) from error
        seen = self._seen.get(Purpose.KILL)
        if seen is not None:
            by = _by(self._paths[Purpose.KILL], seen.reason)
            raise Killed(f"this job was ended by {by} and may not start. Remove that file to let it")

    def _look(self, purpose: Purpose) -> None:
        name = NAMES[purpose]
        stamp = self._files.stamp(name)
        if not stamp:
            self._seen.pop(purpose, None)
            return
        seen = self._seen.get(purpose)
        if seen is None or seen.stamp != stamp:
            try:
                self._seen[purpose] = Seen(stamp, reason_in(self._files.read(name)))
            except FileNotFoundError:
                self._seen.pop(purpose, None)
            except OSError:  # a folder of that name, or no right to read it: it asks all the same
                self._seen[purpose] = Seen(stamp, "")
