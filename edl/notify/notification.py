"""A notification: which events make one, and its text for people and for programs."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass

from edl.rendezvous.phrases import cut, one_line
from edl.wire.alarm import Alarm
from edl.wire.severity import Severity, severity_of
from edl.wire.status import HistoryEntry, Kind

MOST_SUBJECT = 120
"""Limit on the characters of a mail's subject."""
MASTER_CHANGED = "master-changed"
TEST = "test"

SEVERITIES: dict[str, Severity] = {
    Kind.JOB_ENDED.value: Severity.CRITICAL,  # the entry says so if the job has succeeded
    Kind.NODE_LOST.value: Severity.WARNING,
    Kind.DRAIN_FAILED.value: Severity.WARNING,
    Kind.SLOT.value: Severity.WARNING,
    Kind.HEALTH.value: Severity.INFO,  # the entry says so if a node is not healthy
    Kind.ALARM.value: Severity.WARNING,
    Kind.ALARM_CLEARED.value: Severity.WARNING,
    Kind.WORKER_FAILED.value: Severity.INFO,
    Kind.NODE_JOINED.value: Severity.INFO,
    Kind.NODE_RETURNED.value: Severity.INFO,
    Kind.NODE_LEAVING.value: Severity.INFO,
}
"""Kinds of history entries that notify although they have no severity of their own, and the one that they get."""


@dataclass(frozen=True, slots=True)
class Notification:
    """One message about a job."""

    id: str
    """The same whenever and by whichever Master it is sent, so that a receiver can recognise a repetition."""
    job: str
    event: str
    """The ``Kind`` of the history entry, ``master-changed`` or ``test``."""
    severity: Severity
    text: str
    at_s: float
    """When it happened, in seconds since 1970 by the clock of the Master's host."""
    node: str = ""
    """The node that it is about; empty: the job."""
    round: int = 0
    number: int = 0
    """Number of the history entry (``edl events``); 0: it is not in the history."""
    master: str = ""
    """The node that sends it."""

    @property
    def subject(self) -> str:
        """One line for people, such as the subject of a mail."""
        whole = one_line(f"edl job {self.job}: {self.severity.value}: {self.event}: {self.text}")
        return cut(whole, MOST_SUBJECT)

    @property
    def body(self) -> str:
        """The whole text for people."""
        time = datetime.datetime.fromtimestamp(self.at_s, tz=datetime.timezone.utc)
        about = f"node {self.node}" if self.node else "the whole job"
        number = f"event {self.number} of edl events" if self.number else "not in edl events"
        return (
            f"{self.text}\n\njob:      {self.job}\nevent:    {self.event} ({self.severity.value})\nabout:    {about}\n"
            f"round:    {self.round}\ntime:     {time:%Y-%m-%d %H:%M:%S} UTC\nsent by:  {self.master} ({number})\n"
        )

    def document(self) -> bytes:
        """The JSON document for programs; docs/notifications.md describes it."""
        time = datetime.datetime.fromtimestamp(self.at_s, tz=datetime.timezone.utc)
        return json.dumps(
            {
                "id": self.id,
                "job": self.job,
                "event": self.event,
                "severity": self.severity.value,
                "text": self.text,
                "subject": self.subject,
                "node": self.node,
                "round": self.round,
                "number": self.number,
                "time": time.isoformat(timespec="milliseconds"),
                "master": self.master,
            }
        ).encode()


@dataclass(frozen=True, slots=True)
class Sender:
    """Who notifies."""

    job: str
    run: str
    """Distinguishes this run of the job from others of the same name."""
    node: str

    def of_entry(self, entry: HistoryEntry) -> Notification | None:
        """The notification about a history entry; None: it is not worth one."""
        usual = SEVERITIES.get(entry.kind)
        if usual is None and not entry.severity:
            return None
        severity = severity_of(entry.severity, usual or Severity.WARNING)
        name = f"{self.job}-{self.run}-{entry.number}"
        where = entry.node, entry.round, entry.number, self.node
        return Notification(name, self.job, entry.kind, severity, entry.text, entry.at_s, *where)

    def of_alarm(self, alarm: Alarm, raised: bool, number: int, at_s: float) -> Notification:
        """The notification about an alarm that cannot be in the history. ``number``: makes its id unique."""
        event = Kind.ALARM if raised else Kind.ALARM_CLEARED
        text = f"{alarm.name}: {alarm.text if raised else 'no longer'}"
        name = f"{self.job}-{self.run}-{alarm.name}-{number}"
        severity = severity_of(alarm.severity)
        return Notification(name, self.job, event.value, severity, text, at_s, master=self.node)

    def of_change(self, before: str, token: int, at_s: float) -> Notification:
        """The notification about another Master. ``before``: the node of the last one. ``token``: of the new one."""
        text = f"{self.node} is the Master now; before it was {before}"
        name = f"{self.job}-{self.run}-master-{token}"
        return Notification(name, self.job, MASTER_CHANGED, Severity.WARNING, text, at_s, master=self.node)

    def of_test(self, by: str, number: int, at_s: float) -> Notification:
        """The notification that ``edl notify test`` sends. ``by``: who asked for it."""
        text = f"a test of this channel, requested by {by}"
        name = f"{self.job}-{self.run}-test-{number}"
        return Notification(name, self.job, TEST, Severity.INFO, text, at_s, master=self.node)
