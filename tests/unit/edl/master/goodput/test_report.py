"""The words of the accounts."""

from __future__ import annotations

import pytest

from edl.master.goodput.report import cost_text
from edl.master.goodput.slot_times import NS, Cost
from edl.master.goodput.slot_use import SlotUse
from edl.rendezvous.phrases import goodput, measured


def test_the_cost_of_a_change() -> None:
    amounts = {
        SlotUse.RENDEZVOUS: NS * 9 // 10,
        SlotUse.RESTORE: NS // 5,
        SlotUse.REDONE: NS * 4 // 10,
        SlotUse.HANG: 0,
    }
    assert cost_text(Cost(0.143, 8, amounts)) == (
        "the change took 0.143 s and cost 1.50 s of slot time (rendezvous 0.900 s, restore 0.200 s), "
        "0.050 s of training redone"
    )
    assert cost_text(Cost(2.0, 1, {SlotUse.RESIZE: 2 * NS})).endswith("(resize 2.00 s), no training redone")


def test_the_goodput_of_a_job() -> None:
    parts = {"useful": 75.0, "data_wait": 12.5, "idle": 10.0, "lost": 2.0, "commit": 0.4, "restore": 0.1}
    assert goodput(parts) == "75.0% of 100 s of slot time (data wait 12.5 s, idle 10.0 s, lost 2.00 s, commit 0.400 s)"
    assert goodput({"useful": 0.0}) == ""
    assert goodput({"useful": 5.0}) == "100.0% of 5.00 s of slot time"


@pytest.mark.parametrize(
    ("amount_s", "text"),
    [(0.0, "0.000 s"), (0.0416, "0.042 s"), (9.871, "9.87 s"), (42.0, "42.0 s"), (12345.6, "12,346 s")],
)
def test_measured_durations(amount_s: float, text: str) -> None:
    assert measured(amount_s) == text
