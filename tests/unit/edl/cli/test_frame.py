"""Frames of ``edl top``, compared with ``frames/*.txt``: the look of each line, and its text."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from edl.cli.frame import SMALLEST, FrameLine, LineLook, ScreenSize, frame
from edl.cli.node_text import kind_of, pace_of, rate_text, step_text
from edl.cli.show import pace_lines
from edl.wire.alarm import Alarm
from edl.wire.rank_pace import UNKNOWN, RankPace
from edl.wire.records import Version
from edl.wire.scale_requests import ScaleView
from edl.wire.status import Count, HistoryEntry, JobStatus, NodeView, ServiceView

FRAMES = Path(__file__).parent / "frames"
SMALL, LARGE = ScreenSize(40, 20), ScreenSize(80, 24)


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def node(number: int, **more: Any) -> NodeView:
    view = NodeView(
        f"n{number:04}", f"10.0.{number // 256}.{number % 256}", 8, "running", attached=True, position=number,
        first_rank=8 * number, step_s=0.08 + number % 7 * 0.001,
    )  # fmt: skip
    return dataclasses.replace(view, **more)


def job(*nodes: NodeView, **more: Any) -> JobStatus:
    events = [HistoryEntry(number, 1.8e9 + number, "world-formed", f"round {number}: {len(nodes)} nodes", "", number)
              for number in range(1, 8)]  # fmt: skip
    status = JobStatus(
        "digits", "running", 7, 8 * len(nodes), "round 7: all nodes that are ready", "1:2000", "elastic", 1, 3, "n0000",
        nodes, tuple(events), (), era=3, saved=Version(3, 100), scale=ScaleView(nodes=len(nodes)), commit=120,
    )  # fmt: skip
    return dataclasses.replace(status, **more)


EVIL = "evil\x1b[31m\x07\r\n[red]<b>&\u202e\ud800"
THREE = job(
    node(0),
    node(1, step_s=0.2),
    node(2, node=EVIL, draining=True),
    reason=f"round 7: {EVIL}",
    warnings=("commits of node n0001 are not kept in memory: 1 MiB left",),
    services=(ServiceView("data", "mnist", "mnist: epoch 2, 40 of 100 shards used"),),
)
THOUSAND = job(
    *(node(number) for number in range(500)),
    node(500, attached=False),
    *(node(number, state="spare", position=-1, first_rank=-1, step_s=0.0) for number in range(501, 505)),
    node(505, draining=True),
    node(506, state="warming", position=-1, first_rank=-1, step_s=0.0),
    node(507, step_s=0.9),
    *(node(number) for number in range(508, 1000)),
)


@pytest.mark.parametrize("screen", [SMALL, LARGE], ids=lambda screen: f"{screen.width}x{screen.height}")
@pytest.mark.parametrize(
    ("name", "status", "problem"),
    [("three", THREE, ""), ("thousand", THOUSAND, ""), ("searching", THREE, f"looking for the Master: {EVIL}")],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
def test_golden(name: str, status: JobStatus, problem: str, screen: ScreenSize) -> None:
    lines = frame(status, None, screen, problem)
    shown = "".join(f"{line.look.name:<8}|{line.text}\n" for line in lines)
    path = FRAMES / f"{name}-{screen.width}x{screen.height}.txt"
    assert shown == path.read_text()


def texts(lines: list[FrameLine]) -> str:
    return "\n".join(line.text for line in lines)


def test_the_worst_nodes_come_first_and_the_others_are_counted() -> None:
    lines = [line.text for line in frame(THOUSAND, None, LARGE)]
    first = next(at for at, line in enumerate(lines) if line.startswith("NODE"))
    assert [line.split()[0] for line in lines[first + 1 : first + 4]] == ["n0500", "n0506", "n0505"]
    assert any("n0507" in line and line.endswith("900 ms slowest  10.0.1.251") for line in lines)
    counted = next(line for line in lines if line.startswith("and "))
    listed = sum(line.startswith("n0") for line in lines)
    assert f"and {1000 - listed} more: " in counted


def test_nodes_and_events_that_are_new_stand_out() -> None:
    before = job(node(0), node(1, state="stopping"))
    after = job(node(0), node(1), history=(*before.history, HistoryEntry(8, 1.8e9, "scale", "more", "", 8)))
    changed = [line.text for line in frame(after, before, LARGE) if line.look is LineLook.CHANGED]
    assert [text.split()[0] for text in changed] == ["n0001", "08:00:00"]
    assert not [line for line in frame(after, None, LARGE) if line.look is LineLook.CHANGED]
    assert not [line for line in frame(after, after, LARGE) if line.look is LineLook.CHANGED]


def test_goodput() -> None:
    status = job(node(0), goodput=(Count("useful", 60.0), Count("waiting", 40.0)))
    assert "goodput: 60.0% of 100 s of slot time (waiting 40.0 s)" in texts(frame(status, None, LARGE))


def test_a_frame_never_exceeds_its_screen() -> None:
    rng = random.Random(7)
    letters = "abc\x1b\x00\n\t[]<>日本é\u202e "

    def word(most: int) -> str:
        return "".join(rng.choice(letters) for _ in range(rng.randrange(most)))

    for _ in range(400):
        nodes = [
            node(number, node=word(40), state=rng.choice(("running", "spare", "stopping", "unheard-of")),
                 attached=rng.random() < 0.8, host=word(60), step_s=rng.choice((0.0, 0.01, 3.0, 1e6)))
            for number in range(rng.choice((0, 1, 3, 30, 200)))
        ]  # fmt: skip
        warnings = tuple(word(90) for _ in range(rng.randrange(6)))
        history = tuple(HistoryEntry(number, 0.0, word(9), word(150)) for number in range(rng.randrange(11)))
        status = job(*nodes, reason=word(200), job=word(50), warnings=warnings, history=history)
        screen = ScreenSize(rng.randrange(1, 130), rng.randrange(1, 50))
        lines = frame(status, rng.choice((None, status)), screen, rng.choice(("", word(99))))
        assert len(lines) <= max(screen.height, SMALLEST[1])
        for line in lines:
            assert cell_len(line.text) <= max(screen.width, SMALLEST[0])
            assert line.text.isprintable(), repr(line.text)


def test_pace() -> None:
    assert pace_of(job(node(0, step_s=0.0))).nodes == 0
    pace = pace_of(job(node(0, step_s=0.1), node(1, step_s=0.1), node(2, step_s=0.2), node(3, step_s=0.0)))
    assert (pace.steps_per_s, pace.median_s, pace.slowest, pace.slowest_ranks, pace.nodes) == (10, 0.1, "n0002",
                                                                                              "16-23", 3)  # fmt: skip
    assert pace_of(job(node(0, step_s=0.1), node(1, step_s=0.105))).slowest == ""
    assert pace_of(job(node(0, step_s=0.1))).slowest == ""


def test_own_times_tell_the_slow_rank_from_those_that_wait() -> None:
    def ranks(*peers: float) -> tuple[RankPace, ...]:
        return tuple(RankPace(slot, 0.2, 0.3, share, samples=4.0) for slot, share in enumerate(peers))

    two: dict[str, Any] = {"slots": 2, "places": (0, 1), "step_s": 0.2}
    nodes = node(0, first_rank=0, ranks=ranks(0.5, 0.5), **two), node(1, first_rank=2, ranks=ranks(0.6, 0.1), **two)
    status = dataclasses.replace(job(*nodes), world_size=4)
    pace = pace_of(status)
    assert pace.ranks is not None
    assert (pace.ranks.slowest, pace.ranks.node) == (3, "n0001")
    assert [pace.ranks.median_s, pace.ranks.slowest_s] == pytest.approx([0.1, 0.18])
    assert pace.samples_per_s == pytest.approx(80.0)
    assert pace_lines(status)[1] == "Own time of a step: median 100 ms, most on rank 3 (n0001): 180 ms"
    assert "own 100 ms, most rank 3 180 ms" in texts(frame(status, None, LARGE))
    unknown = dataclasses.replace(status, nodes=(node(0, step_s=0.2, places=(0, 1), ranks=ranks(UNKNOWN, UNKNOWN)),))
    assert pace_of(unknown).ranks is None
    assert len(pace_lines(unknown)) == 1


WAITS = "node n0001 lost: its launcher is gone (connection refused); 1 node ready, at least 2 needed (--nnodes=2:3)"
PODS = "training: 1 of 2 nodes have joined (Insufficient nvidia.com/gpu)"


def waiting(text: str) -> JobStatus:
    """A job that waits for nodes. ``text``: what its size waits for."""
    return dataclasses.replace(
        THREE, phase="forming", reason=WAITS, scale=dataclasses.replace(THREE.scale, waiting=text)
    )


def test_a_job_that_waits_says_for_what_once_and_whole() -> None:
    shown = texts(frame(waiting(WAITS), None, LARGE))
    assert WAITS in " ".join(shown.split())
    assert "pending" not in shown
    explained = texts(frame(waiting(f"{WAITS}; {PODS}"), None, LARGE))
    assert f"pending: {PODS}" in explained, "the scheduler's words follow"
    assert explained.count("its launcher is gone") == 1


def test_an_option_is_not_broken_between_lines_and_what_is_left_out_shows() -> None:
    narrow = texts(frame(waiting(WAITS), None, ScreenSize(24, 24)))
    assert "(--nnodes=2:3)" not in narrow and " …\n" in narrow
    for width in range(60, 120):
        assert "(--nnodes=2:3)" in texts(frame(waiting(WAITS), None, ScreenSize(width, 24)))


def test_alarms() -> None:
    status = job(node(0), alarms=(Alarm("straggler", "slot 1", "warning", "the others wait", "n0000"),))
    assert "alarm: straggler (slot 1) on n0000: the others wait" in texts(frame(status, None, LARGE))


def test_texts() -> None:
    times = (0.0, 0.00012345, 0.08149, 0.99949, 0.9996, 1.0, 12.345, 99.96, 1234.5)
    assert [step_text(one) for one in times] == [
        "-", "0.123 ms", "81.5 ms", "999 ms", "1 s", "1 s", "12.3 s", "100 s", "1234 s"]  # fmt: skip
    assert [rate_text(one) for one in (0.0123, 12.345, 1234.5)] == ["0.0123 steps/s", "12.3 steps/s", "1234 steps/s"]
    assert kind_of(node(0, draining=True, attached=False)) == "running, draining, not attached"
