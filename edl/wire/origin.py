"""Owner and software of a launcher, compared with those of the job's founder before it joins."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

OWNER, SCRIPT, VERSIONS = "owner", "script", "versions"
ASPECTS = (OWNER, SCRIPT, VERSIONS)
"""Aspects that ``--allow-differences`` accepts."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of one launcher. Empty fields are not compared. ``release.py`` reads some of them in all versions of edl,
    and compares the versions of edl."""

    node: str
    host: str
    uid: int
    user: str = ""
    """Name of ``uid``; empty: none."""
    script: str = ""
    """Script or program of the workers, as given."""
    digest: str = ""
    """SHA-256 of its text, because paths may differ between hosts."""
    edl: str = ""
    python: str = ""
    """Major and minor version of the workers' Python, such as ``3.12``."""
    frameworks: tuple[str, ...] = ()
    """Names with versions, such as ``torch 2.9.0``."""

    def differences(self, founder: Origin, proved: bool) -> dict[str, str]:
        """Differences by aspect, as text. ``proved``: both hold the job's secret, so user names do not matter."""
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
        """Compare uids on one host. Across hosts uids may differ, and containers may have no user names."""
        return self.uid == other.uid or (self.host != other.host and self.user != "" and self.user == other.user)

    def _owner(self) -> str:
        return f"{self.user or 'a user without a name'} (uid {self.uid}) at {self.host}"

    def _versions(self) -> tuple[str, str]:
        """Frameworks are compared if both sides have some."""
        return self.python and f"Python {self.python}", " and ".join(self.frameworks)


def refused(differences: dict[str, str], allowed: Collection[str]) -> dict[str, str]:
    """Differences that ``--allow-differences`` does not allow."""
    return {aspect: text for aspect, text in differences.items() if aspect not in allowed}
