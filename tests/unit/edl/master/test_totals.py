"""What a Master counts for its metrics, held against a plain reading of all its decisions."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import pytest

from edl.master.sizing import NO_SIZING
from edl.master.state import Phase, Record
from edl.master.totals import CAUSES, HistoryTally
from edl.types import Round
from edl.wire.status import HistoryEntry, Kind

SUSPENDED = dataclasses.replace(NO_SIZING, suspended="kim")
KINDS = (*Kind, *CAUSES)


@dataclass(frozen=True)
class Made:
    """One decision: the record after it, its entries, its time."""

    record: Record
    added: tuple[HistoryEntry, ...]
    now_s: float


def entry(kind: Kind, round: int, text: str = "", at_s: float = 0.0) -> HistoryEntry:
    return HistoryEntry(1, at_s, kind.value, text, "", round)


def random_entries(drawn: random.Random, round: int, now_s: float) -> list[HistoryEntry]:
    found = []
    for kind in drawn.choices(KINDS, k=drawn.randrange(4)):
        if kind in (Kind.WORLD_FORMED, Kind.WORLD_UNDERWAY):
            continue
        commit = drawn.randrange(99)
        texts = (f"commit {commit} is complete in /ckpt", f"commit {commit} could not be written: full", "other")
        found.append(entry(kind, round, drawn.choice(texts) if kind is Kind.STATE else "text", 1e9 + now_s))
    return found


def random_course(drawn: random.Random) -> list[Made]:
    """The decisions of a job: worlds form, train and end; sometimes it is suspended, sometimes one batch of events ends
    a world and forms the next."""
    made: list[Made] = []
    record, now_s, starts = Record(), 100.0, False
    for _ in range(drawn.randrange(1, 60)):
        now_s += drawn.random() * 10
        events = []
        match record.phase, drawn.random():
            case Phase.FORMING, draw if draw < 0.4 and not record.sizing.suspended:
                record = dataclasses.replace(record, phase=Phase.RUNNING, round=Round(record.round + 1))
                events, starts = [entry(Kind.WORLD_FORMED, record.round)], True
                if drawn.random() < 0.2:  # it ends in the same batch of events
                    record, starts = dataclasses.replace(record, phase=Phase.FORMING), False
            case Phase.FORMING, draw if draw < 0.6:
                record = dataclasses.replace(record, sizing=drawn.choice((SUSPENDED, NO_SIZING)))
            case Phase.RUNNING, draw if draw < 0.3:
                record = dataclasses.replace(record, phase=Phase.FORMING)
            case Phase.RUNNING, draw if draw < 0.4:
                record = dataclasses.replace(record, round=Round(record.round + 1))
                events, starts = [entry(Kind.WORLD_FORMED, record.round)], True
            case Phase.RUNNING, draw if draw < 0.8 and starts:
                events, starts = [entry(Kind.WORLD_UNDERWAY, record.round)], False
        before, after = random_entries(drawn, record.round, now_s), random_entries(drawn, record.round, now_s)
        made.append(Made(record, (*before, *events, *after), now_s))
    return made


@pytest.mark.parametrize("seed", range(150))
def test_counts_are_those_of_a_plain_reading(seed: int) -> None:
    drawn = random.Random(seed)
    course = random_course(drawn)
    took_over = drawn.randrange(len(course))
    earlier, own = course[:took_over], course[took_over:]
    old = [one for made in earlier for one in made.added]
    tally = HistoryTally()
    tally.take_over(old, earlier[-1].record if earlier else None)
    for made in own:
        tally.stepped(made.record, made.added, made.now_s)
    found = tally.totals

    new = [one for made in own for one in made.added]
    for kind in Kind:
        assert found.entries.get(kind.value, 0) == len([one for one in new if one.kind == kind.value])
    assert found.unwritten == len([one for one in new if "could not be written" in one.text])
    complete = [one.at_s for one in (*old, *new) if "is complete" in one.text]
    assert found.checkpoint_at_s == (complete[-1] if complete else 0.0)
    assert {cause: count for cause, count in found.rounds.items() if count} == causes_in(old, new)
    assert found.changes["forming"] == len([one for one in new if one.kind == "world-formed"])
    assert found.changes["starting"] == sum(1 for _ in startings(own))
    assert found.change_s["starting"] == pytest.approx(sum(startings(own)))
    assert found.change_s["forming"] == pytest.approx(sum(formings(own)))


def causes_in(old: list[HistoryEntry], new: list[HistoryEntry]) -> dict[str, int]:
    counts: dict[str, int] = {}
    all_entries = [*old, *new]
    for at, one in enumerate(all_entries):
        if one.kind != "world-formed" or at < len(old):
            continue
        since = max((number + 1 for number in range(at) if all_entries[number].kind == "world-formed"), default=0)
        kinds = {other.kind for other in all_entries[since:at]}
        cause = next((kind.value for kind in CAUSES if kind.value in kinds), "other")
        cause = "first" if one.round == 1 else cause
        counts[cause] = counts.get(cause, 0) + 1
    return counts


def startings(own: list[Made]) -> list[float]:
    """Seconds from each world that this Master formed to its being underway."""
    formed: dict[int, float] = {}
    took = []
    for made in own:
        for one in made.added:
            if one.kind == "world-formed":
                formed[one.round] = made.now_s
            if one.kind == "world-underway" and one.round in formed:
                took.append(made.now_s - formed[one.round])
    return took


def formings(own: list[Made]) -> list[float]:
    """Seconds that each formed world was waited for, suspensions left out, as far as this Master saw it."""
    took = []
    since_s: float | None = None
    for made in own:
        if any(one.kind == "world-formed" for one in made.added):
            took.append(made.now_s - since_s if since_s is not None else 0.0)
            since_s = None
        waits = made.record.phase is Phase.FORMING and not made.record.sizing.suspended
        since_s = (made.now_s if since_s is None else since_s) if waits else None
    return took
