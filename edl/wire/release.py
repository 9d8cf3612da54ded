"""Which versions of edl may take part in one job.

The founder of a job writes its version to the store, in its ``Origin``. A launcher reads it before any other value,
because all others may have another form in another version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from edl.errors import ProtocolError
from edl.wire import plain

_FINAL = re.compile(r"(\d+)\.(\d+)(?:\.\d+)*(?:\.post\d+)?(?:\+[a-z0-9.]+)?")
"""A final version, with its first two numbers. Anything else is a pre-release, which is compatible with itself only."""


@dataclass(frozen=True, slots=True)
class Founder:
    """The fields of the founder's ``Origin`` that keep their names and types in all versions of edl."""

    edl: str = ""
    """Version of edl; empty: unknown."""
    node: str = ""
    host: str = ""


def founder_of(stored: bytes) -> Founder:
    """The founder of a job. ``stored``: its ``Origin`` as in the store; empty, or of an unknown form: an unknown
    founder."""
    try:
        return plain.loads(Founder, stored)
    except ProtocolError:
        return Founder()


def compatible(mine: str, theirs: str) -> bool:
    """Whether two versions may take part in one job: final ones with the same first two numbers, or equal ones."""
    line = _line(mine)
    return mine == theirs or (line is not None and line == _line(theirs))


def refusal(job: str, mine: str, founder: Founder) -> str:
    """Why this launcher may not join a running job, and what to do."""
    if not founder.edl:
        return (
            f"job {job} was started by an unknown version of edl, and this launcher is edl {mine}. "
            f"Install the job's version on this node, or end the job and start all its launchers with edl {mine}"
        )
    upgrade = f", or upgrade the job: end it with a checkpoint, and start all launchers with edl {mine}"
    rest = upgrade if _newer(mine, founder.edl) else ""
    return (
        f"job {job} runs edl {founder.edl}{_where(founder)}, and this launcher is edl {mine}: {_rule(mine, founder)}. "
        f"Install edl {founder.edl} on this node{rest} (docs/release.md)"
    )


def remark(job: str, mine: str, founder: Founder) -> str:
    """A line for the user of a command whose version may not take part in the job; empty if it may."""
    if not founder.edl or compatible(mine, founder.edl):
        return ""
    return (
        f"job {job} runs edl {founder.edl}, and this command is edl {mine}: it may misunderstand parts of the answer, "
        f"or be refused. Then use the command of edl {founder.edl}{_where(founder)}"
    )


def _where(founder: Founder) -> str:
    return f" (started by node {founder.node} on {founder.host})" if founder.node else ""


def _rule(mine: str, founder: Founder) -> str:
    if _line(mine) is None or _line(founder.edl) is None:
        return "a pre-release shares a job with no other version"
    return "only versions with the same first two numbers share a job"


def _line(version: str) -> tuple[int, int] | None:
    """The first two numbers of a final version; None for a pre-release."""
    match = _FINAL.fullmatch(version)
    return (int(match[1]), int(match[2])) if match else None


def _newer(mine: str, theirs: str) -> bool:
    """Whether a version is newer by its first three numbers. Pre-releases of one version count as equally new."""
    first, second = ([int(number) for number in re.findall(r"\d+", one)[:3]] for one in (mine, theirs))
    return first > second
