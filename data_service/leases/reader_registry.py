"""The registry of remote readers, as sent by the Master to the workers. Pure; part of the lease machine."""

from __future__ import annotations

import json
from collections.abc import Collection

from data_service.protocol.messages import ReaderList, encode
from edl.master.service import AddToHistory, Caller, Effect, KeyGone, KeyPut, Progress, TellWorker

PREFIX = "readers/"
_SHOWN = 8
"""Most names shown in the status."""


class ReaderRegistry:
    """The list of readers, and the workers that have received it. Not stored: the next Master rebuilds it from the
    readers' keys."""

    def __init__(self, authority: str = "") -> None:
        """``authority``: sent with the list, in a job with a secret."""
        self._authority = authority
        self._readers: dict[str, tuple[str, str, int, str]] = {}
        self._informed: set[Caller] = set()
        self._ever: set[Caller] = set()
        """Workers that have ever received a list."""
        self.due = False
        """A worker may need the list although the set of workers has not changed."""

    def report(self) -> tuple[Progress, ...]:
        """Number and names of readers; nothing if there are none."""
        names = sorted(self._readers)
        if not names:
            return ()
        text = f"{len(names)} remote reader{'s' if len(names) > 1 else ''}: {', '.join(names[:_SHOWN])}"
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return (Progress("readers", text + more, {"readers": len(names)}),)

    def changed(self, event: KeyPut | KeyGone) -> list[Effect]:
        """A reader was added, changed or removed."""
        if not event.name.startswith(PREFIX):
            return []
        name, before = event.name[len(PREFIX) :], dict(self._readers)
        notes: list[Effect] = []
        if isinstance(event, KeyGone):
            self._readers.pop(name, None)
        else:
            try:
                stored = json.loads(event.value)
                host, port, secret = stored["host"], stored["port"], stored["secret"]
                if not (isinstance(host, str) and isinstance(secret, str) and type(port) is int and 0 < port < 65536):
                    raise ValueError("host, port or secret is invalid")
                self._readers[name] = (name, host, port, secret)
            except (ValueError, TypeError, KeyError) as error:
                self._readers.pop(name, None)
                notes.append(AddToHistory(f"ignoring reader {name}: its key has no valid address ({error})"))
        if self._readers != before:
            self._informed.clear()
            self.due = True
        return notes

    def ask_again(self, caller: Caller) -> None:
        """The caller opens data, so earlier messages to it may be lost: send it the list again."""
        self._informed.discard(caller)
        self.due = True

    def world_began(self) -> None:
        """New processes may run in the slots: all need the list."""
        self._informed.clear()
        self._ever.clear()

    def tell(self, callers: Collection[Caller]) -> list[Effect]:
        """Send the current list to callers that do not have it. An empty list only goes to those that have received
        another."""
        self.due = False
        concerned = callers if self._readers else self._ever.intersection(callers)
        missing = sorted(caller for caller in concerned if caller not in self._informed)
        self._informed.update(missing)
        self._ever.update(missing)
        if not missing:
            return []
        text = encode(ReaderList(tuple(self._readers[name] for name in sorted(self._readers)), self._authority))
        return [TellWorker(caller, text) for caller in missing]
