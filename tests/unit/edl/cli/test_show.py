"""``edl status`` for people: a job of any size fits a screen."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from edl.cli.show import SCREEN, hang_lines, health_lines, show_status
from edl.wire.health import HealthView
from edl.wire.scale_requests import ScaleView
from edl.wire.status import JobStatus, NodeView


def node(number: int, **more: object) -> NodeView:
    host = f"10.0.{number // 256}.{number % 256}"
    view = NodeView(f"n{number:04}", host, 8, "running", attached=True, position=number, first_rank=8 * number)
    return dataclasses.replace(view, **more)  # type: ignore[arg-type]


def job(nodes: list[NodeView]) -> JobStatus:
    return JobStatus("big", "running", 7, 8 * len(nodes), "all is well", "1:2000", "elastic", 0, 3, "n0000",
                     tuple(nodes), (), ())  # fmt: skip


def shown(nodes: list[NodeView], *, everything: bool = False) -> list[str]:
    text = io.StringIO()
    show_status(Console(file=text, width=120), job(nodes), everything=everything)
    return text.getvalue().splitlines()


def test_a_small_job_is_listed() -> None:
    lines = shown([node(number) for number in range(SCREEN)])
    assert sum(line.startswith("n0") for line in lines) == SCREEN


@pytest.mark.parametrize("count", [SCREEN + 1, 1000])
def test_a_large_one_that_is_well_is_a_line(count: int) -> None:
    lines = shown([node(number) for number in range(count)])
    assert lines[-1] == f"{count} nodes: {count} running (--all lists them)"
    assert not any(line.startswith("n0") for line in lines)


def test_of_a_large_one_the_unusual_nodes_are_listed_the_rarest_first() -> None:
    nodes = [node(number) for number in range(1000)]
    nodes[500] = node(500, attached=False)
    nodes[600:605] = [node(number, state="spare", first_rank=-1) for number in range(600, 605)]
    nodes[700] = node(700, draining=True)
    lines = shown(nodes)
    summary = "1000 nodes: 993 running, 5 spare, 1 running, not attached, 1 running, draining"
    assert f"{summary} (the others below; --all lists them)" in lines
    listed = [line.split()[0] for line in lines if line.startswith("n0")]
    assert listed == ["n0500", "n0700", "n0600", "n0601", "n0602", "n0603", "n0604"]


def test_no_more_than_a_screen_of_them() -> None:
    nodes = [node(number, state="spare" if number % 3 == 0 else "running") for number in range(1000)]
    lines = shown(nodes)
    assert sum(line.startswith("n0") for line in lines) == SCREEN
    assert any("(some below; --all lists them)" in line for line in lines)
    assert len(lines) < 40


def test_all_are_listed_where_that_is_asked_for() -> None:
    lines = shown([node(number) for number in range(1000)], everything=True)
    assert sum(line.startswith("n0") for line in lines) == 1000


def test_a_check_of_all_nodes_is_one_line() -> None:
    checked = [HealthView(f"n{at:03}", "h", "checking", "", excluded=True) for at in range(300)]
    good, bad = HealthView("x", "h", "good", "", excluded=False), HealthView("y", "h", "faulty", "no", excluded=True)
    assert health_lines([*checked, good, bad]) == [
        "Health of y: kept out, faulty: no",
        "Health check of 300 nodes runs: n000, n001, n002, n003, n004 and 295 more",
    ]
    assert health_lines([good]) == []


def test_how_much_of_the_limit_of_hangs_is_learnt() -> None:
    off = "Hang detection: off until a limit is learnt"
    for nodes, line in (
        ([node(0), node(1)], f"{off} (--hang-timeout=SECONDS sets one)"),
        (
            [node(0, hang_pauses=15, hang_needed=20), node(1, hang_pauses=5, hang_needed=20)],
            f"{off} (5 of 20 pauses seen on n0001; --hang-timeout=SECONDS sets one)",
        ),
    ):
        assert hang_lines(dataclasses.replace(job(nodes), hang_timeout="auto")) == [line]


def test_the_address_of_the_dashboard_is_shown() -> None:
    text = io.StringIO()
    show_status(Console(file=text, width=120), job([node(0)]), "http://10.0.0.1:8080")
    lines = text.getvalue().splitlines()
    at = lines.index("Dashboard: http://10.0.0.1:8080/ (edl token prints a token for it)")
    assert lines[at + 1] == "HTTP: http://10.0.0.1:8080/v1/jobs/big"


@pytest.mark.parametrize(
    ("waiting", "pending"),
    [("too few nodes", []), ("too few nodes; 1 of 2 pods run", ["Pending: 1 of 2 pods run"]), ("x", ["Pending: x"])],
)
def test_what_a_job_waits_for_is_said_once(waiting: str, pending: list[str]) -> None:
    text = io.StringIO()
    scale = ScaleView(minimum=2, maximum=2, waiting=waiting)
    status = dataclasses.replace(job([node(0)]), phase="forming", reason="too few nodes", scale=scale)
    show_status(Console(file=text, width=120), status)
    lines = text.getvalue().splitlines()
    assert [line for line in lines if line.startswith("Pending")] == pending
    assert sum("too few nodes" in line for line in lines) == 1
