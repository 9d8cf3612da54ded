"""Whose a launcher is and what it runs: compared with what the job's founder has left, before it joins."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

OWNER, SCRIPT, VERSIONS = "owner", "script", "versions"
ASPECTS = (OWNER, SCRIPT, VERSIONS)
"""What ``--allow-differences`` can name."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Of one launcher. What is empty is not compared."""

    node: str
    host: str
    uid: int
    user: str = ""
    """Name of ``uid``; empty: it has none."""
    script: str = ""
    """What the workers run, as it was given."""
    digest: str = ""
    """Of its text: paths may differ between hosts."""
    edl: str = ""
    python: str = ""
    """Of the workers, without the last number."""
    frameworks: tuple[str, ...] = ()
    """Names with versions, such as ``torch 2.9.0``."""

    def differences(self, founder: Origin | None, proved: bool) -> dict[str, str]:
        """By aspect, in words. ``founder``: None where a running job says nothing of it, as those of older versions.
        ``proved``: both hold the job's secret, so that names of users tell nothing."""
        if founder is None:
            return {VERSIONS: f"edl {self.edl} here, and an older one in the job, which does not say whose it is"}
        found = {}
        if not proved and not self._same_owner(founder):
            found[OWNER] = f"{self._owner()} here, {founder._owner()} in the job"
        if self.digest and founder.digest and self.digest != founder.digest:
            ours, theirs = (f"{one.script} (sha256 {one.digest[:12]}…)" for one in (self, founder))
            found[SCRIPT] = f"{ours} here, {theirs} in the job"
        versions = [
            f"{ours} here, {theirs} in the job"
            for ours, theirs in zip(self._versions(), founder._versions(), strict=True)
            if ours and theirs and ours != theirs
        ]
        if versions:
            found[VERSIONS] = ", ".join(versions)
        return found

    def _same_owner(self, other: Origin) -> bool:
        """On one host the number counts. Hosts may number their users differently, and containers need no names."""
        return self.uid == other.uid or (self.host != other.host and self.user != "" and self.user == other.user)

    def _owner(self) -> str:
        return f"{self.user or 'a user without a name'} (uid {self.uid}) at {self.host}"

    def _versions(self) -> tuple[str, str, str]:
        """Frameworks count where both have some."""
        edl, python = self.edl and f"edl {self.edl}", self.python and f"Python {self.python}"
        return edl, python, " and ".join(self.frameworks)


def refused(differences: dict[str, str], allowed: Collection[str]) -> dict[str, str]:
    """Those that nobody has allowed."""
    return {aspect: text for aspect, text in differences.items() if aspect not in allowed}
