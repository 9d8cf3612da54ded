"""Requests to a job from the command line: send one, then read its outcome from the job's history."""

from __future__ import annotations

import getpass
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from edl.adapters.transport import MasterClient
from edl.errors import CheckpointError, UsageError
from edl.master.events import Kind
from edl.master.planning import NOT_SAVED
from edl.master.view import changed, complete, saving, unwritten
from edl.wire.messages import Asked
from edl.wire.purpose import Purpose
from edl.wire.status import HistoryEntry, JobStatus

_ENDS_WAITING = (Kind.WORLD_STOPPED.value, Kind.WORLD_FORMED.value, Kind.BOUNDARY.value, Kind.JOB_ENDED.value)
"""Events after which a checkpoint that the workers have agreed on will not be reported any more. One that they have not
agreed on yet is still to come: the next world owes it."""

NOTHING_SAVED = "; edl saved nothing (saving requires edl.State in the script and --checkpoint-dir)"


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What the Master answered to a request, and what has come of it."""

    ok: bool
    text: str
    commit: int = 0
    """The commit that is complete in the checkpoint directory; 0 if none is known."""
    where: str = ""
    """Location of that commit."""


_LISTED = " listed already"
"""End of the message about files that were added twice, which is not a failure."""


class Reader(Protocol):
    """Reads the history line by line until the outcome is known."""

    def take(self, entry: HistoryEntry) -> RequestOutcome | None:
        """Process the next line; returns the outcome once it is known, until then None."""
        ...

    def history_ended(self, why: str) -> RequestOutcome:
        """The outcome if the history ends. ``why``: the reason, such as "the Master is gone"."""
        ...


class SaveReader:
    """Waits for the commit that the workers have agreed to save, or a later one."""

    def __init__(self) -> None:
        self._commit: int | None = None

    def take(self, entry: HistoryEntry) -> RequestOutcome | None:
        """The outcome when the commit is complete, or can no longer be completed."""
        number = saving(entry)
        if number is not None:
            self._commit = number if self._commit is None else self._commit
            return None
        found = complete(entry)
        if found is not None:
            return RequestOutcome(True, entry.text, *found) if self._covers(found[0]) else None
        lost = unwritten(entry)
        if lost is not None:
            return RequestOutcome(False, entry.text) if self._covers(lost[0]) else None
        given_up = NOT_SAVED in entry.text if entry.kind == Kind.BOUNDARY.value else entry.kind == Kind.JOB_ENDED.value
        if given_up or (self._commit is not None and entry.kind in _ENDS_WAITING):
            return RequestOutcome(False, f"no checkpoint is known to be complete: {entry.text}")
        return None

    def history_ended(self, why: str) -> RequestOutcome:
        """A failure: the history ended before the checkpoint was complete."""
        return RequestOutcome(False, f"{why} before the checkpoint was complete. See edl status")

    def _covers(self, commit: int) -> bool:
        """Whether this commit is the requested one or a later one."""
        return self._commit is not None and commit >= self._commit


class StopReader:
    """Waits until the job has ended and its launchers have exited."""

    def __init__(self, before: tuple[int, str] = (0, "")) -> None:
        """``before``: the checkpoint that was the newest one at the request, as number of its commit and location."""
        self._end = ""
        self._before = before
        self._saved: tuple[int, str] = (0, "")
        self._unwritten = ""
        """The last report of a commit that could not be written."""

    def take(self, entry: HistoryEntry) -> RequestOutcome | None:
        """Never an outcome: the job has ended for good only when the history ends."""
        self._saved = complete(entry) or self._saved
        if unwritten(entry):
            self._unwritten = entry.text
        if entry.kind == Kind.JOB_ENDED.value:
            self._end = entry.text
        return None

    def history_ended(self, why: str) -> RequestOutcome:
        """The outcome: the job has ended if the history said so."""
        if not self._end:
            return RequestOutcome(False, f"{why}, and the end of the job was not reported. See edl status")
        commit, where = self._saved
        if self._unwritten and not commit:
            return RequestOutcome(False, f"the job has ended ({self._end}), but {self._unwritten}")
        if commit:
            return RequestOutcome(
                True, f"the job has ended: {self._end}; commit {commit} is complete in {where}", commit, where
            )
        commit, where = self._before  # such as that of a job that was suspended
        place = f" in {where}" if where else ""
        saved = f"; the last checkpoint is commit {commit}{place}" if commit else NOTHING_SAVED
        return RequestOutcome(True, f"the job has ended: {self._end}{saved}", commit, where)


class SetReader:
    """Waits until it is known from which step on the requested settings apply."""

    def __init__(self, who: str) -> None:
        self._who = who

    def take(self, entry: HistoryEntry) -> RequestOutcome | None:
        """The outcome when the settings have been changed or refused."""
        if entry.kind == Kind.SETTINGS.value:
            commit = changed(entry)
            if commit is not None:  # by any user: earlier requests are included in the change
                return RequestOutcome(True, entry.text, commit)
            if entry.text.startswith(self._who):
                return RequestOutcome(": refused, " not in entry.text, entry.text)
        if entry.kind == Kind.JOB_ENDED.value:
            return RequestOutcome(False, f"the job ended before the settings were changed: {entry.text}")
        return None

    def history_ended(self, why: str) -> RequestOutcome:
        """A failure: the history ended before the settings were changed."""
        return RequestOutcome(False, f"{why} before the settings were changed. See edl status")


class OrderReader:
    """Waits until a worker has checked the files of an order (``data_service.leases.file_additions``)."""

    def __init__(self, dataset: str, number: int) -> None:
        self._begin = f"data {dataset}: order {number} ("

    def take(self, entry: HistoryEntry) -> RequestOutcome | None:
        """The outcome when the history says what happened to the order."""
        if entry.kind == Kind.SERVICE.value and entry.text.startswith(self._begin):
            return RequestOutcome(": nothing is added: " not in entry.text or _LISTED in entry.text, entry.text)
        if entry.kind == Kind.JOB_ENDED.value:
            return RequestOutcome(False, f"the job ended before a worker checked the files: {entry.text}")
        return None

    def history_ended(self, why: str) -> RequestOutcome:
        """A failure: the history ended first, but the order stays valid."""
        return RequestOutcome(False, f"{why} before the outcome was known. The order is still valid; see edl events")


_READERS: dict[Purpose, Callable[[JobStatus, str], Reader]] = {
    Purpose.KILL: lambda before, who: StopReader((before.saved.commit, before.saved_in)),
    Purpose.SAVE: lambda before, who: SaveReader(),
    Purpose.SET: lambda before, who: SetReader(who),
}


async def ask(
    client: MasterClient, purpose: Purpose, command: str, *, wait: bool, argument: str = ""
) -> RequestOutcome:
    """Send a request, and with ``wait`` wait for its outcome. ``command``: its name in the history. Raises
    ``UsageError`` if it is refused."""
    before = await client.status()
    after = before.history[-1].number if before.history else 0
    who = f"{command} ({who_asks()})"
    answer = await client.ask(Asked(purpose, who, argument))
    if not answer.ok:
        raise UsageError(answer.text)
    if not wait:
        return RequestOutcome(True, answer.text)
    return await follow(client.events(after, follow=True), _READERS[purpose](before, who))


async def follow(history: AsyncIterator[HistoryEntry], reader: Reader) -> RequestOutcome:
    """Read the history until the outcome is known."""
    why = "the Master is gone"
    try:
        async for entry in history:
            outcome = reader.take(entry)
            if outcome is not None:
                return outcome
    except grpc.aio.AioRpcError as error:
        why = f"the Master no longer answers ({error.code().name.lower()})"
    return reader.history_ended(why)


def checked(outcome: RequestOutcome, purpose: Purpose) -> RequestOutcome:
    """Return a successful outcome. Raises ``CheckpointError`` for another one, or ``UsageError`` if the request was not
    about a checkpoint."""
    if not outcome.ok:
        raise (UsageError if purpose is Purpose.SET else CheckpointError)(outcome.text)
    return outcome


def who_asks() -> str:
    """The user of this command as ``user@host``, for the history."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user id without a name
        return socket.gethostname()
