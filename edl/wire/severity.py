"""Severities of alarms and notifications."""

from __future__ import annotations

import enum


class Severity(enum.Enum):
    """How bad it is, in ascending order."""

    INFO = "info"
    """For the record: the job ended with success, a node joined."""
    WARNING = "warning"
    """The job continues, but is worse off or will be: a node was lost, a disk fills up."""
    CRITICAL = "critical"
    """Somebody has to act: the job failed, or cannot continue."""

    @property
    def rank(self) -> int:
        """Its position in the order, from 0."""
        return list(Severity).index(self)


def severity_of(text: str, default: Severity = Severity.WARNING) -> Severity:
    """The severity with this name; ``default`` for an unknown one, which a newer program may have written."""
    return next((one for one in Severity if one.value == text), default)
