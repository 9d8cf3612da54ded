"""The registry of remote readers, as the Master tells it to the workers. Pure; part of the lease machine."""

from __future__ import annotations

import json
from collections.abc import Collection

from data_service.protocol.messages import Readers, encode
from edl.master.service import Caller, Effect, KeyGone, KeyPut, Note, Progress, Tell

PREFIX = "readers/"
_SHOWN = 8
"""Names that the status has room for."""


class ReaderRegistry:
    """The list of readers, and who has heard it. Not stored: the next Master rebuilds it from live readers' keys."""

    def __init__(self, authority: str = "") -> None:
        """``authority``: told beside the list, in a job with a secret."""
        self._authority = authority
        self._readers: dict[str, tuple[str, str, int, str]] = {}
        self._told: set[Caller] = set()
        self._ever: set[Caller] = set()
        """Who has ever been told."""
        self.due = False
        """Somebody may have to be told, though the same workers take part."""

    def report(self) -> tuple[Progress, ...]:
        """How many there are, and which; nothing when there are none."""
        names = sorted(self._readers)
        if not names:
            return ()
        text = f"{len(names)} remote reader{'s' if len(names) > 1 else ''}: {', '.join(names[:_SHOWN])}"
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return (Progress("readers", text + more, {"readers": len(names)}),)

    def changed(self, event: KeyPut | KeyGone) -> list[Effect]:
        """A reader has come, has changed, or has gone."""
        if not event.name.startswith(PREFIX):
            return []
        name, before = event.name[len(PREFIX) :], dict(self._readers)
        notes: list[Effect] = []
        if isinstance(event, KeyGone):
            self._readers.pop(name, None)
        else:
            try:
                told = json.loads(event.value)
                host, port, secret = told["host"], told["port"], told["secret"]
                if not (isinstance(host, str) and isinstance(secret, str) and type(port) is int and 0 < port < 65536):
                    raise ValueError("host, port or secret is none")
                self._readers[name] = (name, host, port, secret)
            except (ValueError, TypeError, KeyError) as error:
                self._readers.pop(name, None)
                notes.append(Note(f"reader {name} is not used: its key does not say where it is ({error})"))
        if self._readers != before:
            self._told.clear()
            self.due = True
        return notes

    def ask_again(self, caller: Caller) -> None:
        """It opens data: earlier messages to it may be lost."""
        self._told.discard(caller)
        self.due = True

    def world_began(self) -> None:
        """Other processes may sit in the slots."""
        self._told.clear()
        self._ever.clear()

    def tell(self, callers: Collection[Caller]) -> list[Effect]:
        """Words to those who have not heard the present list. An empty one is news only to who has heard another."""
        self.due = False
        concerned = callers if self._readers else self._ever.intersection(callers)
        missing = sorted(caller for caller in concerned if caller not in self._told)
        self._told.update(missing)
        self._ever.update(missing)
        if not missing:
            return []
        text = encode(Readers(tuple(self._readers[name] for name in sorted(self._readers)), self._authority))
        return [Tell(caller, text) for caller in missing]
