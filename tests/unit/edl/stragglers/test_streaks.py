"""From slow windows to verdicts."""

from __future__ import annotations

from edl.stragglers.streaks import StragglerVerdict, Streak, judge
from edl.stragglers.windows import Cause, Excess, TimeSpent

NEEDED = 3


class Following:
    """One rank, from window to window."""

    def __init__(self) -> None:
        self.streaks: dict[str, Streak] = {}
        self.named: set[str] = set()
        self.verdicts: list[StragglerVerdict] = []

    def window(self, share: float, cause: Cause = Cause.COMPUTE, doubtful: bool = False) -> bool:
        """Returns whether the rank is named after this window."""
        found = {"r": Excess(share, 0.2, cause, TimeSpent(cause.value, share, 0.1), doubtful)}
        judged = judge(self.streaks, found, self.named, NEEDED)
        self.streaks = dict(judged.streaks)
        self.verdicts += judged.named.values()
        self.named = (self.named | set(judged.named)) - judged.cleared
        return bool(self.named)


def test_it_takes_several_slow_windows_in_a_row() -> None:
    rank = Following()
    assert [rank.window(share) for share in (0.3, 0.3, 0.0, 0.3, 0.3, 0.3)] == [False] * 5 + [True]
    assert [rank.window(0.3) for _ in range(5)] == [True] * 5
    assert len(rank.verdicts) == 1


def test_it_is_cleared_after_as_many_good_windows() -> None:
    rank = Following()
    assert [rank.window(0.3) for _ in range(NEEDED)][-1]
    assert [rank.window(share) for share in (0.0, 0.0, 0.3, 0.0, 0.0, 0.05)] == [True] * 5 + [False]


def test_a_window_between_good_and_slow_counts_as_neither() -> None:
    rank = Following()
    assert not any([rank.window(share) for share in (0.3, 0.3, 0.15, 0.3, 0.3, 0.15)])
    assert [rank.window(0.3) for _ in range(NEEDED)][-1]
    assert all([rank.window(share) for share in (0.0, 0.0, 0.15, 0.0, 0.0, 0.15)])


def test_doubtful_windows_take_twice_as_long() -> None:
    rank = Following()
    assert [rank.window(0.3, Cause.STOPPED, doubtful=number == 1) for number in range(6)] == [False] * 5 + [True]


def test_the_most_frequent_cause_is_named_with_its_mean_values() -> None:
    rank = Following()
    rank.window(0.25, Cause.DATA)
    rank.window(0.9, Cause.COMPUTE)
    rank.window(0.5, Cause.DATA)
    (verdict,) = rank.verdicts
    assert verdict == StragglerVerdict((0.25 + 0.9 + 0.5) / 3, Cause.DATA, TimeSpent("data", 0.375, 0.1))
    assert verdict.evidence.text == "data 38% of the time, the others 10%"


def test_a_rank_without_a_window_loses_its_streak() -> None:
    rank = Following()
    rank.window(0.3)
    rank.window(0.3)
    rank.streaks = dict(judge(rank.streaks, {}, rank.named, NEEDED).streaks)
    assert not rank.window(0.3)
