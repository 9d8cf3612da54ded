"""Data of the data service in real jobs: each record once in each epoch of what was committed, whatever is killed."""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import WORKERS, Job, OutsideEtcd, until

SCRIPTS = {"torch": WORKERS / "data_torch.py", "paddle": WORKERS / "data_paddle.py"}
RECORDS, FILES = 1500, 3
NODES = ("a", "b", "c")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(FILES):
        first = number * RECORDS // FILES
        ids = np.arange(first, first + RECORDS // FILES)
        table = pa.table({"id": ids, "x": (ids % 7).astype(np.float32)})
        with pa.OSFile(str(folder / f"{number}.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    return folder


def job(etcd: OutsideEtcd, folder: Path, framework: str, files: Path, *arguments: str, **named: Any) -> Job:
    options = ("--max-restarts=10000", "--slot-strikes=0", f"--data=train={files}/*", *named.pop("options", ()))
    script = (str(SCRIPTS[framework]),)
    return Job(folder, [etcd.endpoint], script=script, arguments=arguments, options=options, **named)


def end_soon(running: Job, more: int = 2) -> int:
    """Have the training end some epochs from now; how many it has had then."""
    newest: int = max(line["epoch"] for line in lines(running.steps_folder) if "epoch" in line)
    file = running.steps_folder / "epochs"
    file.with_suffix(".new").write_text(str(newest + more))
    file.with_suffix(".new").replace(file)
    return newest + more


# --- what was committed ----------------------------------------------------------------------------------------------


def lines(*folders: Path) -> list[Any]:
    """Everything in the workers' books; what a killed worker has written half is left out."""
    found = []
    for folder in folders:
        for path in folder.glob("*.records"):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    found.append(json.loads(line))
    return found


def _run(folder: Path) -> tuple[dict[int, tuple[int, int]], dict[tuple[int, int], list[Any]]]:
    """Where each era of a run began, and what was written down for each commit."""
    told = lines(folder)
    began = {line["era"]: (line["from_era"], line["from_commit"]) for line in told if "from_era" in line}
    steps: dict[tuple[int, int], list[Any]] = collections.defaultdict(list)
    for line in told:
        if "commit" in line:
            steps[line["era"], line["commit"]].append(line)
    return began, steps


def committed(*folders: Path) -> dict[int, list[int]]:
    """Records by epoch, along the line of commits that leads to the last one.

    ``folders``: of the run, then of the run before it, from whose checkpoint it began, and so on. A run counts eras
    from that of the checkpoint, so two runs may use the same numbers.
    """
    runs = iter(folders)
    began, steps = _run(next(runs))
    era = max(era for era, _ in steps)
    commit = max(commit for one, commit in steps if one == era)
    found: dict[int, list[int]] = collections.defaultdict(list)
    while commit:
        if era not in began:
            began, steps = _run(next(runs))
        first = began[era][1]
        for number in range(first + 1, commit + 1):
            assert steps[era, number], f"nobody has written down commit {number} of era {era}"
            for line in steps[era, number]:
                found[line["epoch"]] += line["records"]
        era, commit = began[era]
    return found


def check(epochs: int, *folders: Path, expected: set[int] | None = None) -> None:
    """Each record once in each epoch."""
    expected = expected or set(range(RECORDS))
    found = committed(*folders)
    assert sorted(found) == list(range(epochs))
    for epoch, records in found.items():
        counts = collections.Counter(records)
        assert set(counts) == expected, f"epoch {epoch} lacks {sorted(expected - set(counts))[:20]}"
        assert len(records) == len(expected), f"epoch {epoch}: {[r for r, n in counts.items() if n > 1][:20]} twice"


# --- tests -----------------------------------------------------------------------------------------------------------


class Killer:
    """Kills workers and the Master's launcher, and brings back what it has killed."""

    def __init__(self, running: Job, draw: random.Random) -> None:
        self.job = running
        self.draw = draw

    def strike(self, master: bool) -> None:
        seen = self.job.wait_steps(self.draw.randrange(1, 10))
        time.sleep(self.draw.uniform(0, 0.1))  # not always at the same place in a step
        if master:
            name = self.job.status()["master"]
            self.job.kill(name)
            self.job.start(name)
        else:
            os.kill(self.draw.choice(list(seen.pids.values())), signal.SIGKILL)
        self.job.wait_world(len(NODES), after=seen.round)


def kill_at_random(etcd: OutsideEtcd, folder: Path, framework: str, files: Path, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    copies = f"--copy-every={draw.choice([1, 3])}"
    with job(etcd, folder, framework, files, copies) as running:
        running.start(*NODES)
        running.wait_world(len(NODES))
        killer = Killer(running, draw)
        for number in range(kills):
            begun = time.monotonic()
            master = number % 4 == 1
            killer.strike(master)
            what = "the Master's launcher" if master else "a worker"
            print(f"seed {seed}, kill {number + 1}: {what}, in {time.monotonic() - begun:.1f} s")
        epochs = end_soon(running)
        assert set(running.exit_codes().values()) == {0}
        check(epochs, running.steps_folder)


@pytest.mark.soak_but("torch")
def test_each_record_counts_once_whatever_is_killed(
    etcd: OutsideEtcd, tmp_path: Path, framework: str, files: Path
) -> None:
    kill_at_random(etcd, tmp_path, framework, files, kills=4, seed=random.randrange(1_000_000))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_kills(etcd: OutsideEtcd, tmp_path: Path, framework: str, files: Path) -> None:
    kill_at_random(etcd, tmp_path, framework, files, kills=30, seed=random.randrange(1_000_000))


@pytest.mark.soak
@pytest.mark.soak_but("paddle")
def test_the_job_goes_on_from_its_checkpoints_in_the_middle_of_an_epoch(
    etcd: OutsideEtcd, tmp_path: Path, framework: str, files: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    options = (f"--checkpoint-dir={checkpoints}",)
    with job(etcd, tmp_path, framework, files, "--save-every=7", options=options, name="lasting") as running:
        running.start("a", "b")
        running.wait_world(2)
        until(lambda: len(list(checkpoints.glob("*/DONE"))) >= 2, "two checkpoints")
        for name in "ab":
            running.kill(name)
        before = running.steps_folder
    first = committed(before)
    assert sorted(first) == [0] and len(first[0]) < RECORDS, "it is to be in the middle of the first epoch"
    with job(etcd, tmp_path / "again", framework, files, "--save-every=7", options=options, name="lasting") as running:
        running.start("c", "d", "e")
        running.wait_world(3)
        epochs = end_soon(running)
        assert set(running.exit_codes().values()) == {0}
        again = committed(running.steps_folder, before)
        assert len([line for line in lines(running.steps_folder) if line.get("epoch") == 0]) > 0
        check(epochs, running.steps_folder, before)
    assert set(first[0]) & set(again[0])


@pytest.mark.slow
@pytest.mark.soak_but("paddle")
def test_a_row_group_that_cannot_be_read_is_left_out_and_told(
    etcd: OutsideEtcd, tmp_path: Path, framework: str
) -> None:
    folder = tmp_path / "parquet"
    folder.mkdir()
    for number in range(3):
        ids = np.arange(number * 400, number * 400 + 400)
        table = pa.table({"id": ids, "x": ids.astype(np.float32)})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=100, compression="zstd")
    poison = folder / "1.parquet"
    column = pyarrow.parquet.ParquetFile(poison).metadata.row_group(2).column(0)
    with poison.open("r+b") as file:
        file.seek(column.dictionary_page_offset or column.data_page_offset)
        file.write(b"\xaa" * column.total_compressed_size)
    with job(etcd, tmp_path, framework, folder, "--shard-records=100") as running:
        running.start("a", "b")
        told = running.wait_status(lambda status: bool(status["flaws"]), "a flaw in the status")
        assert "1.parquet" in json.dumps(told["flaws"])
        assert any("could not read" in event["text"] for event in running.events())
        epochs = end_soon(running)
        assert set(running.exit_codes().values()) == {ExitCode.INCOMPLETE}
        running.nodes["a"].says("ended with status 0; data train: 1 shard skipped as unreadable:", 1)
        check(epochs, running.steps_folder, expected=set(range(1200)) - set(range(600, 700)))


@pytest.mark.slow
@pytest.mark.soak_but("paddle")
def test_growing_and_draining_repeat_nothing(etcd: OutsideEtcd, tmp_path: Path, framework: str, files: Path) -> None:
    with job(etcd, tmp_path, framework, files) as running:
        running.start("a")
        seen = running.wait_world(1)
        running.start("b", "c")
        seen = running.wait_world(3, after=seen.round)
        running.wait_steps(5)
        running.nodes["a"].send(signal.SIGTERM)
        assert running.nodes["a"].exit_code() == 0
        del running.nodes["a"]
        running.wait_world(2, after=seen.round)
        epochs = end_soon(running)
        assert set(running.exit_codes().values()) == {0}
        check(epochs, running.steps_folder)
        handed_out = collections.Counter(
            (line["epoch"], record)
            for line in lines(running.steps_folder)
            if "commit" in line
            for record in line["records"]
        )
        assert max(handed_out.values()) == 1, "planned changes hand out nothing twice"
