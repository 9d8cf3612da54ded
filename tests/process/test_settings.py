"""Batch and learning rate in real jobs: every rank takes them up at the same commit, whatever becomes of the world."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.arithmetic.plan import split
from tests.process.harness import WORKERS, Job, OutsideEtcd, until

SCRIPT = str(WORKERS / "settings_worker.py")
POLICY = ("--global-batch=50", "--local-batch=8", "--lr-rule=linear", "--lr-warmup=10", "--fault-tolerance=elastic")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


def notes(running: Job) -> list[dict[str, Any]]:
    """Complete lines of all ranks' notes."""
    found = []
    for path in running.steps_folder.glob("*.settings"):
        text = path.read_text()
        found += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return found


def check(running: Job, batches: dict[int, int]) -> None:
    """All ranks of a world are under the same settings at each commit. ``batches``: global batch by their number."""
    held: dict[tuple[int, int], set[tuple[Any, ...]]] = {}
    for note in notes(running):
        same = tuple(note[name] for name in ("number", "global_batch", "accumulation", "lr_factor"))
        held.setdefault((note["round"], note["commit"]), set()).add(same)
        assert note["EDL_SETTINGS"] == str(note["number"])
        if note["number"] in batches:
            assert note["global_batch"] == batches[note["number"]]
        mine = split(note["global_batch"], note["world"])[note["rank"]]
        assert (note["local_batch"], note["EDL_LOCAL_BATCH"]) == (mine, str(mine))
        assert note["micro_batch"] <= 8
    assert {key: len(values) for key, values in held.items() if len(values) > 1} == {}


def begun(running: Job, number: int) -> int:
    """First commit under these settings, once every rank of a world has noted it."""

    def look() -> int | None:
        those = [note for note in notes(running) if note["number"] == number]
        first = min((note["commit"] for note in those), default=None)
        there = {note["rank"] for note in those if note["commit"] == first}
        return first if those and there >= set(range(those[0]["world"])) else None

    found = until(lambda: (look(),) if look() is not None else None, f"settings {number} on every rank")
    assert found is not None and found[0] is not None
    return found[0]


@pytest.mark.soak
def test_all_ranks_change_over_at_the_same_commit(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    job = Job(tmp_path, [etcd.endpoint], script=(SCRIPT,), arguments=(f"--framework={framework}",), options=POLICY)
    with job as running:
        running.start("a", "b")
        first = running.wait_world(2)
        changed = running.cli("set", "global-batch=100", "lr-scale=0.5")
        assert changed.returncode == 0, changed.stderr
        assert ": global batch 100, local batch 8, LR factor 1 (linear)" in changed.stdout
        number = int(changed.stdout.split()[1])
        commit = begun(running, number)
        assert f"settings {number} from commit {commit}:" in changed.stdout
        status = running.status()
        assert (status["settings"]["number"], status["settings"]["scale"]) == (number, 0.5)
        assert f"Settings {number}: global batch 100" in running.cli("status").stdout
        assert running.seen() is not None and running.wait_steps(3).round == first.round, "nobody was interrupted"

        running.start("c")
        grown = running.wait_world(3, after=first.round)
        running.wait_steps(3)
        joined = begun(running, number + 1)
        assert joined > commit
        os.kill(grown.pids_of("b")[0], signal.SIGKILL)
        back = running.wait_world(3, after=running.wait_world(2, after=grown.round).round)
        running.wait_steps(3)

        master = running.status()["master"]
        running.kill(master)
        del running.nodes[master]
        running.wait_world(2, after=back.round)
        running.wait_steps(3)
        running.end_soon()
        assert set(running.exit_codes().values()) == {0}
        check(running, {number: 100, number + 1: 100, number + 2: 100})
        rounds = {note["round"] for note in notes(running)}
        assert len(rounds) >= 5
        numbers = {note["round"]: note["number"] for note in notes(running) if note["commit"] > commit + 1}
        assert [numbers[one] for one in sorted(numbers)] == sorted(numbers.values()), "numbers only rise"


@pytest.mark.slow
def test_bad_requests_change_nothing(etcd: OutsideEtcd, tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    paddle = ("--framework=paddle",)
    with Job(tmp_path, [etcd.endpoint], script=(SCRIPT,), arguments=paddle, options=POLICY) as running:
        running.start("a")
        running.wait_world(1)
        for request, says in (
            ("local-batch=0", "local-batch=0: must be a number of at least 1"),
            ("lr-rule=cubic", "lr-rule=cubic: no such rule. Known: none, linear"),
            ("speed=2", "speed=2: no such setting. Known: global-batch"),
            ("lr-scale=nan", "lr-scale=nan: must be more than 0"),
        ):
            refused = running.cli("set", request)
            assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr
        unchanged = running.cli("set", "global-batch=50")
        assert unchanged.returncode == 0 and "nothing changes" in unchanged.stdout
        assert running.status()["settings"]["number"] == 1
        running.end_soon()
        assert set(running.exit_codes().values()) == {0}
        check(running, {1: 50})


def test_plain_scripts_read_the_environment_of_each_world(etcd: OutsideEtcd, tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def told(size: int) -> dict[int, Any] | None:
        found = [json.loads(path.read_text()) for path in running.steps_folder.glob("*.plain") if path.stat().st_size]
        return {int(one["local_batch"]): one for one in found if one["world"] == size} or None

    with Job(tmp_path, [etcd.endpoint], script=(SCRIPT,), arguments=("--plain",), options=POLICY) as running:
        running.start("a", "b")
        seen = until(lambda: told(2), "both workers of the first world")
        assert seen is not None and set(seen) == {25}
        assert (seen[25]["EDL_ACCUMULATION"], seen[25]["EDL_MICRO_BATCH"], seen[25]["accumulation"]) == ("4", "7", 4)
        later = running.cli("set", "global-batch=100")
        assert later.returncode == 0 and "takes effect with the next world" in later.stdout
        running.start("c")
        grown = until(lambda: (told(3) or {}) if len(told(3) or {}) == 2 else None, "the workers of the next world")
        assert grown is not None and set(grown) == {34, 33}
        assert grown[34]["EDL_LR_FACTOR"] == "2.0", "after the ramp: nobody counts steps here"
        (running.steps_folder / "enough").touch()
        assert set(running.exit_codes().values()) == {0}
