"""The report of all peers: what it says of recorded runs, and of those that are missing."""

from __future__ import annotations

import html
import random
import re
import statistics
from pathlib import Path

import click
import pytest

from benchmarks.common.contenders import LAUNCHERS
from benchmarks.common.report import Outcome
from benchmarks.peer_venv import PEERS, first_error
from benchmarks.report import bars
from benchmarks.report.__main__ import Session, chosen, measure_rows
from benchmarks.report.contenders import CONTENDERS, WITHOUT, Place, look
from benchmarks.report.measure import MEASURES, Run, longest_silence
from benchmarks.report.record import OtherMachine, Record, dump, load, merged
from benchmarks.report.render import DASH, NO_RUN, TIMES, Spread, load_line, plot, ratio, render, spread, took_part
from benchmarks.report.rows import ROWS

MACHINE = {
    "cores": 2,
    "memory_bytes": 8 * 2**30,
    "system": "Linux",
    "python": "3.11.1",
    "at": "2026-01-02 03:04:05",
    "processor": "A processor",
}
BY_NAME = {row.name: row for row in ROWS}


def run(row: str, contender: str, **more: object) -> Outcome:
    values = {"values": {BY_NAME[row].metrics[0].name: more.pop("value")}} if "value" in more else {}
    return Outcome(row, contender, **values, load=1.0, **more)  # type: ignore[arg-type]


def record(*outcomes: Outcome, missing: dict[str, dict[str, str]] | None = None) -> Record:
    return Record(MACHINE, {"edl": "edl 1.2.3"}, outcomes, missing or {})


def section(text: str, row: str) -> list[str]:
    """The lines of a row's section."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.endswith(f"(`{row}`)"))
    end = next((n for n, line in enumerate(lines) if n > begin and line.startswith("## ")), len(lines))
    return lines[begin:end]


def cells(text: str, row: str, contender: str) -> list[str]:
    """The cells of a contender's line in a row's table."""
    line = next(line for line in section(text, row) if line.startswith(f"| {contender} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_medians_spreads_and_ratios_are_those_of_the_runs() -> None:
    draw = random.Random(7)
    for _ in range(200):
        own = [draw.uniform(1, 9) for _ in range(draw.randint(1, 6))]
        peer = [draw.uniform(10, 900) for _ in range(draw.randint(1, 6))]
        found = spread([run("worker", "edl-rejoin", value=value) for value in own], "recovery")
        assert found.values == tuple(own) and found.median == statistics.median(own)
        shown = ratio(Spread(tuple(peer)), found)
        exact = statistics.median(peer) / statistics.median(own)
        assert shown.endswith(TIMES) and abs(float(shown[:-1]) / exact - 1) < 0.06


def test_a_spread_shows_its_ends_only_if_there_are_several_runs() -> None:
    assert Spread(()).show("s") == DASH
    assert Spread((0.25,)).show("s") == "250 ms"
    assert Spread((0.00108,)).show("s") == "1.1 ms"
    assert Spread((3.0, 1.0, 2.0)).show("s") == f"2.0 s (1.0 s{DASH}3.0 s)"
    assert Spread((10.0, 20.0)).show("MB") == f"15 MB (10 MB{DASH}20 MB)"


def test_there_is_no_ratio_without_both_values() -> None:
    assert (
        ratio(Spread(()), Spread((1.0,)))
        == ratio(Spread((1.0,)), Spread(()))
        == ratio(Spread((1.0,)), Spread((0.0,)))
        == DASH
    )


def test_a_row_has_its_contenders_with_ratio_runs_failures_and_repeated_steps() -> None:
    outcomes = (
        run("worker", "edl-rejoin", value=0.5, redone=0),
        run("worker", "edl-rejoin", value=0.7, redone=0),
        run("worker", "torchrun", value=6.0, redone=2),
        run("worker", "torchrun", note="never recovered: a new world of 2: not within 60 s"),
        run("worker", "torchrun", started=False, note="did not start: no luck"),
    )
    text = render(record(*outcomes))
    assert cells(text, "worker", "edl-rejoin") == ["edl-rejoin", f"600 ms (500 ms{DASH}700 ms)", "1", "2", "0", "0"]
    assert cells(text, "worker", "torchrun") == ["torchrun", "6.0 s", f"10{TIMES}", "2", "1", "2"]
    notes = section(text, "worker")
    assert "- torchrun, run 2: never recovered: a new world of 2: not within 60 s." in notes
    assert "- torchrun, run 3: did not start: no luck." in notes


def test_a_contender_that_never_recovered_is_in_the_overview_and_in_the_picture() -> None:
    kept = record(run("node", "edl-rejoin", value=0.2), run("node", "dlrover", note="never recovered"))
    overview = [line for line in render(kept).splitlines() if line.startswith("| dlrover |")]
    assert any("never" in line for line in overview)
    picture = plot(kept, BY_NAME["node"])
    assert "never" in picture and "dlrover" in picture


def test_each_row_says_of_each_contender_why_it_is_missing() -> None:
    reasons = {"worker": {"horovod": "cannot be installed here: error: no compiler"}}
    text = render(record(run("worker", "edl-rejoin", value=0.5), missing=reasons))
    for row in ROWS:
        lines = "\n".join(section(text, row.name))
        for contender in took_part(row):
            assert contender.name in lines, (row.name, contender.name)
    assert "- horovod is not in this row: cannot be installed here: error: no compiler." in section(text, "worker")
    assert f"- torchft is not in this row: {NO_RUN}." in section(text, "worker")


def test_a_step_time_is_compared_with_the_bare_script_of_the_same_framework() -> None:
    runs = (("bare", 0.010), ("edl", 0.011), ("bare-paddle", 0.02), ("paddle-launch", 0.06))
    text = render(record(*(run("steady", name, value=value) for name, value in runs)))
    assert [cells(text, "steady", name)[2] for name, _ in runs] == ["1", f"1.1{TIMES}", "1", f"3{TIMES}"]


def test_metrics_that_no_run_has_get_no_column() -> None:
    text = render(record(run("join", "edl-rejoin", value=0.2)))
    assert "longest gap" not in next(line for line in section(text, "join") if line.startswith("| contender"))


def test_the_load_is_shown_and_a_busy_machine_is_named() -> None:
    assert "busy with other work" not in load_line([0.5, 2.5, 19.0], 2)
    assert "busy with other work" in load_line([0.5, 3.5, 9.0], 2)
    assert load_line([], 2) == "No run yet."


def test_pictures_have_a_line_for_each_bar() -> None:
    drawn = bars.draw(
        [bars.Bar("a <b>", (1.0, 2.0, 30.0), 2.0, own=True), bars.Bar("c", note="never")], "seconds & more"
    )
    texts = [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawn)]
    assert {"a <b>", "c", "never", "seconds & more", "2"} <= set(texts)
    assert bars.draw([bars.Bar("c", note="never")], "seconds") == ""


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    kept = record(run("worker", "edl", value=1.5, redone=3), missing={"join": {"horovod": "no"}})
    assert load(tmp_path / "raw.json") is None
    (tmp_path / "raw.json").write_text(dump(kept))
    assert load(tmp_path / "raw.json") == kept


def test_new_runs_replace_those_of_the_same_row_and_contender_only() -> None:
    old = record(
        run("worker", "edl", value=1.0),
        run("worker", "edl", value=2.0),
        run("node", "edl", value=3.0),
        missing={"worker": {"dlrover": "not installed", "horovod": "no"}},
    )
    new = record(
        run("worker", "edl", value=9.0), run("worker", "dlrover", value=8.0), missing={"node": {"edl": "gone"}}
    )
    both = merged(old, new)
    assert sorted((one.event, one.launcher, one.values) for one in both.outcomes) == [
        ("worker", "dlrover", {"recovery": 8.0}),
        ("worker", "edl", {"recovery": 9.0}),
    ]
    assert both.missing == {"worker": {"horovod": "no"}, "node": {"edl": "gone"}}


@pytest.mark.parametrize("changed", ["processor", "cores", "memory_bytes"])
def test_runs_of_another_machine_are_refused(changed: str) -> None:
    with pytest.raises(OtherMachine, match=changed):
        merged(record(), Record({**MACHINE, changed: "another"}, {}))


def test_runs_of_another_version_are_refused() -> None:
    with pytest.raises(OtherMachine, match=r"edl was 'edl 1\.2\.3' and is 'edl 2' now"):
        merged(record(), Record(MACHINE, {"edl": "edl 2"}))


def test_the_tables_of_the_report_fit_together() -> None:
    rows, names = set(BY_NAME), {one.name for one in CONTENDERS}
    assert set(MEASURES) == rows and len(names) == len(CONTENDERS)
    assert set(WITHOUT) <= rows and all(set(reasons) <= names for reasons in WITHOUT.values())
    assert all(not one.launcher or one.launcher in LAUNCHERS for one in CONTENDERS)
    assert {one.peer for one in CONTENDERS} - {""} == set(PEERS)
    for row in ROWS:
        assert {base for _, base in row.base} <= {one.name for one in took_part(row)}


def test_an_environment_that_is_missing_or_failed_is_a_reason(tmp_path: Path) -> None:
    horovod = next(one for one in CONTENDERS if one.name == "horovod")
    assert "peer_venv --peer horovod" in look(horovod, tmp_path, "python").reason
    (tmp_path / "peers-horovod").mkdir()
    (tmp_path / "peers-horovod" / "not-installed.txt").write_text("CMake Error: too old\n")
    assert look(horovod, tmp_path, "python").reason == "cannot be installed here: CMake Error: too old"


def test_the_first_telling_line_of_a_failed_build_is_its_reason() -> None:
    output = (
        "Building error.cc with -Werror\n  error: subprocess-exited-with-error\n"
        "  foo.cc:3: error: no type\nERROR: Failed to build x\n"
    )
    assert first_error(output) == "foo.cc:3: error: no type"
    assert first_error("x\nModuleNotFoundError: No module named 'y'\n").startswith("ModuleNotFoundError")
    assert first_error("-- CMake 4\nCMake Error at x:1\n") == "CMake Error at x:1"
    assert first_error("one\ntwo\n") == "one" and first_error("") == "no output"


def test_the_longest_silence_is_that_of_a_plain_scan() -> None:
    draw = random.Random(3)
    for _ in range(300):
        times = sorted(draw.uniform(0, 30) for _ in range(draw.randint(0, 20)))
        begin_s, end_s = 8.0, 25.0
        last = max([t for t in times if t <= begin_s] or [begin_s])
        longest = 0.0
        for moment in [*(t for t in times if begin_s < t < end_s), end_s]:
            longest, last = max(longest, moment - last), moment
        assert longest_silence(times, begin_s, end_s) == pytest.approx(longest)


def session(out: Path) -> Session:
    places = {one.name: Place("python") if one.peer == "" else Place(reason="not here") for one in CONTENDERS}
    return Session(out, 2, None, 1.0, places, dict(MACHINE), {"edl": "edl 1.2.3"})


def test_a_row_that_fails_loses_nothing_of_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: Run) -> Outcome:
        raise OSError("the disk is full")

    monkeypatch.setitem(MEASURES, "worker", lambda run: Outcome("any", "any", {"recovery": 2.0}, 1))
    monkeypatch.setitem(MEASURES, "node", broken)
    rows, contenders = chosen("worker,node,edl,torchft,torchrun")
    with pytest.raises(OSError, match="the disk is full"):
        measure_rows(session(tmp_path), rows, contenders, None)
    text = (tmp_path / "report.md").read_text()
    assert cells(text, "worker", "edl")[-3:] == ["2", "0", "1"]
    assert "- torchft is not in this row: not here." in section(text, "worker")
    assert (tmp_path / "worker.svg").exists() and not (tmp_path / "node.svg").exists()
    kept = load(tmp_path / "raw.json")
    assert kept is not None and {one.launcher for one in kept.outcomes} == {"edl", "torchrun"}


def test_a_name_of_neither_a_row_nor_a_contender_is_refused() -> None:
    with pytest.raises(click.UsageError, match="nothing unknown; there are"):
        chosen("worker,nothing")
    assert chosen("") == (list(ROWS), list(CONTENDERS))
