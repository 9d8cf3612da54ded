"""What the store keeps of a long history, and how many notes of one write become one."""

from __future__ import annotations

import random

from edl.master.events import HistoryNote, Kind
from edl.master.history import FOLDED, KEPT, RECENT, ROUTINE, JobHistory, folded, remaining
from edl.master.view import complete
from edl.wire.status import HistoryEntry

CAUSES = [kind for kind in Kind if kind.value not in ROUTINE]


def entry(number: int, kind: Kind, text: str = "text") -> HistoryEntry:
    return HistoryEntry(number, 0.0, kind.value, text, "a", 1)


class TestKept:
    def test_the_cause_of_a_change_outlives_thousands_of_joins(self) -> None:
        history = JobHistory()
        history.publish([history.make(HistoryNote(Kind.WORKER_FAILED, "the cause", "a"), 1, 0.0)])
        for _ in range(5 * KEPT):
            history.publish([history.make(HistoryNote(Kind.NODE_JOINED, "node b is ready", "b"), 1, 0.0)])
        kept = history.last(KEPT + 1)
        assert len(kept) == KEPT
        assert [one.text for one in kept if one.kind == Kind.WORKER_FAILED.value] == ["the cause"]

    def test_failures_losses_ends_and_requests_are_causes(self) -> None:
        assert {*CAUSES} >= {
            *(Kind.WORKER_FAILED, Kind.NODE_LOST, Kind.NODE_LEAVING, Kind.WORLD_STOPPED, Kind.JOB_ENDED),
            *(Kind.SCALE, Kind.DRAIN, Kind.DRAIN_FAILED, Kind.SETTINGS, Kind.SLOT),
        }

    def test_the_last_complete_checkpoint_and_each_failed_one_stay(self) -> None:
        entries = [
            entry(1, Kind.STATE, "commit 3 is complete in /ckpt/3"),
            entry(2, Kind.STATE, "commit 4 could not be written: disk full"),
            entry(3, Kind.STATE, "commit 5 is complete in /ckpt/5"),
            *(entry(number, Kind.NODE_JOINED) for number in range(4, KEPT + 50)),
        ]
        assert [one.number for one in remaining(entries)][:2] == [2, 3]

    def test_seeded_histories_against_the_rule_one_by_one(self) -> None:
        kinds = [*Kind]
        for seed in range(300):
            draw = random.Random(seed)
            weights = [draw.choice((0, 1, 9)) + (index == 0) for index in range(len(kinds))]
            entries = [
                entry(number, kind, draw.choice(("text", f"commit {number} is complete in /ckpt")))
                for number, kind in enumerate(draw.choices(kinds, weights, k=draw.randrange(KEPT - 5, KEPT + 40)), 1)
            ]
            kept, expected = remaining(entries), list(entries)
            while len(expected) > KEPT:
                newest = max((one.number for one in expected if complete(one)), default=0)
                recent = entries[-RECENT].number
                old = [one for one in expected if one.number < recent and one.number != newest]
                routine = [
                    one for one in old if one.kind in ROUTINE and (one.kind != Kind.STATE.value or complete(one))
                ]
                expected.remove((routine or old)[0])
            assert list(kept) == expected, seed
            assert kept[-RECENT:] == tuple(entries[-RECENT:])

    def test_the_store_holds_what_is_shown(self) -> None:
        draw, history, stored = random.Random(1), JobHistory(), dict[int, HistoryEntry]()
        for _ in range(900):
            notes = [HistoryNote(draw.choice([*Kind]), "text", "a") for _ in range(draw.randrange(1, 6))]
            added = [history.make(note, 1, 0.0) for note in notes]
            new, outdated = history.change(added)
            stored |= {one.number: one for one in new}
            for number in outdated:
                del stored[number]
            history.publish(added)
            assert tuple(stored.values()) == history.last(KEPT)
        assert len(stored) == KEPT


class TestFolded:
    def test_a_thousand_nodes_that_join_get_lost_or_leave_are_one_line(self) -> None:
        for kind in (Kind.NODE_JOINED, Kind.NODE_RETURNED, Kind.NODE_LOST, Kind.NODE_LEAVING):
            notes = [HistoryNote(kind, f"node n{one}", f"n{one}") for one in range(1000)]
            (note,) = folded(notes)
            assert note.kind is kind
            assert note.text.startswith("1000 nodes ")
            assert note.text.endswith(f"n0, {', '.join(f'n{one}' for one in range(1, FOLDED))} and 992 more")

    def test_of_a_thousand_failures_the_first_is_told_and_the_others_are_counted(self) -> None:
        others = [HistoryNote(Kind.WORKER_FAILED, f"also worker {one} ended", f"n{one // 8}") for one in range(1000)]
        first = HistoryNote(Kind.WORKER_FAILED, "worker 7 was killed; restart 1 of 3", "n0")
        formed = HistoryNote(Kind.WORLD_FORMED, "round 2")
        found = folded([*others, first, formed])
        assert found[:FOLDED] == others[:FOLDED]
        assert found[FOLDED].text == (
            "also 992 more workers failed, on n1, n2, n3, n4, n5, n6, n7, n8 and 116 more nodes"
        )
        assert found[FOLDED + 1 :] == [first, formed]

    def test_a_few_failures_stay_as_they_are(self) -> None:
        notes = [HistoryNote(Kind.WORKER_FAILED, f"also worker {one} ended", "a") for one in range(FOLDED + 1)]
        assert folded(notes) == notes
