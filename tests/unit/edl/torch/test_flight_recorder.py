"""Reading the records of torch's flight recorder."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")

from edl.torch import flight_recorder
from edl.torch.flight_recorder import Collective, WaitReader, parse, waited_share
from edl.wire.rank_pace import UNKNOWN

pytestmark = pytest.mark.torch


def entry(record: int, created_ms: float, duration_ms: float | None = 1.0, **more: Any) -> dict[str, Any]:
    times = {"time_created_ns": int(created_ms * 1e6)}
    if duration_ms is not None:
        times["duration_ms"] = duration_ms  # type: ignore[assignment]
    return {"record_id": record, "state": "completed", "is_p2p": False, **times, **more}


def dump(*entries: dict[str, Any]) -> str:
    return json.dumps({"version": "2.10", "pg_config": {}, "entries": list(entries)})


def test_completed_collectives_with_a_duration_are_read_in_order() -> None:
    text = dump(
        entry(3, 30.0, 2.5),
        entry(1, 10.0, 1.5, profiling_name="nccl:all_reduce"),
        entry(2, 20.0, None),
        entry(4, 40.0, state="scheduled"),
        entry(5, 50.0, is_p2p=True),
        {"record_id": "six"},
    )
    assert parse(text) == [Collective(1, 10_000_000, 1.5), Collective(3, 30_000_000, 2.5)]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"entries": [1]}', b"\xff"])
def test_what_is_not_understood_is_nothing(text: str | bytes) -> None:
    assert parse(text) == []


def test_gloos_records_have_no_durations() -> None:
    """As torch 2.13 writes them."""
    gloo = entry(1, 10.0, None, time_discovered_completed_ns=0, profiling_name="gloo:all_reduce", state="scheduled")
    assert parse(dump(gloo)) == []


def test_the_share_is_that_of_the_time_between_starts() -> None:
    three = [Collective(0, 0, 2.0), Collective(1, 10_000_000, 6.0), Collective(2, 20_000_000, 9.0)]
    assert waited_share(three) == pytest.approx(0.4)
    assert waited_share(three[:1]) == UNKNOWN
    assert waited_share([Collective(0, 5, 1.0), Collective(1, 5, 1.0)]) == UNKNOWN
    assert waited_share([Collective(0, 0, 99.0), Collective(1, 1_000_000, 1.0)]) == 1.0


def test_waits_add_up_over_looks() -> None:
    records: list[dict[str, Any]] = []
    reader = WaitReader(lambda: dump(*records[-20:]))
    waited: list[float] = []
    for second in range(1, 5):
        records += [entry(len(records) + n, 1000 * second + 10 * n, 2.5) for n in range(100)]
        found = reader.waits(100.0 * second)
        assert found is not None
        waited.append(found.waited_s)
    assert waited == pytest.approx([0.0, 25.0, 50.0, 75.0])


def test_a_build_without_records_measures_nothing() -> None:
    assert WaitReader(lambda: dump()).waits(1.0) is None

    def refuses() -> str:
        raise RuntimeError("no recorder")

    reader = WaitReader(refuses)
    assert reader.waits(1.0) is None
    assert reader.waits(100.0) is None


def test_readings_rest_as_long_as_they_cost_and_a_slow_one_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cost = [0.0], [0.0]

    def reading() -> str:
        clock[0] += cost[0]
        return dump(*(entry(n, 10.0 * n) for n in range(3)))

    monkeypatch.setattr(flight_recorder, "_now_s", lambda: clock[0])
    reader, now_s, rests = WaitReader(reading), 0.0, []
    for cost[0] in (0.004, 0.2, 0.004, 0.2, 0.2):
        reader.waits(now_s)
        rests.append(reader._rests_until_s - now_s)
        now_s = reader._rests_until_s
    assert rests == pytest.approx([4.0, 4.0, 4.0, 4.0, flight_recorder.LONGEST_REST_S])
