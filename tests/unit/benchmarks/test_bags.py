"""The figures of the benchmark of bags."""

from __future__ import annotations

import pytest

from benchmarks.ps.bags import Spent, against, spread


def test_a_spread_is_the_median_with_the_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 1000.0]).text(1) == "3.0 (1.5 - 502.0)"
    assert spread([1500.4, 1500.4]).text(0) == "1,500 (1,500 - 1,500)"


def test_ratios_are_those_within_a_round() -> None:
    """A round in which the host is slow for both does not count."""
    peer = Spent([100.0, 10.0, 100.0], [30.0, 300.0, 30.0])
    faster, cheaper = against(Spent([300.0, 30.0, 300.0], [10.0, 100.0, 15.0]), peer)
    assert (faster.low, faster.middle, faster.high) == (3.0, 3.0, 3.0)
    assert cheaper.middle == pytest.approx(3.0) and cheaper.low == pytest.approx(2.0)
    same = against(peer, peer)
    assert [one.text(2) for one in same] == ["1.00 (1.00 - 1.00)"] * 2
