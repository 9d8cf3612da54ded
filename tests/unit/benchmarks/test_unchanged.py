"""What the benchmark of unchanged scripts starts and strikes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.contenders import LAUNCHERS
from benchmarks.common.job import SCRIPTS
from benchmarks.recovery import kill_a_worker
from benchmarks.unchanged import CASES, PEERS, Case, Pace, kill_the_node_of_rank_0, strikes

PACE = Pace(kills=3, rest_s=20.0, patience=1.0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_script_exists_and_does_not_know_edl(case: Case) -> None:
    helpers = [
        path for path in SCRIPTS.glob("*.py") if path.stem in ("step_writer", "trainer_parts", "transformers_parts")
    ]
    for path in (SCRIPTS / case.script, *helpers):
        text = path.read_text()
        assert "import edl" not in text and "from edl" not in text
    assert set(PEERS[case.framework].split(",")) <= LAUNCHERS.keys()


def test_only_the_kills_after_the_first_are_in_the_row_of_the_script() -> None:
    found = strikes(CASES["transformers"], PACE)
    assert [one.name for one in found] == ["transformers, first kill", "transformers", "transformers"]
    assert [one.rest_s for one in found] == [0.0, 20.0, 20.0]
    assert all(one.kill is kill_a_worker and one.size == 2 for one in found)


def test_the_node_with_the_checkpoints_is_lost_where_each_has_its_own_folder() -> None:
    (only,) = strikes(CASES["nanogpt-sync-dir"], PACE)
    assert only.kill is kill_the_node_of_rank_0 and only.size == 1 and only.rest_s == 20.0


def test_text_is_the_same_in_each_run(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for folder in ("a", "b"):
        prepare = CASES["nanogpt"].prepare
        assert prepare is not None
        prepare(tmp_path / folder)
    text = (tmp_path / "a" / "text.txt").read_text()
    assert len(text.splitlines()) == 4000 and text == (tmp_path / "b" / "text.txt").read_text()
