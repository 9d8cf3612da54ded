"""The example of the parameter servers, as its README starts it: alone, and with pservers and several trainers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import Job, OutsideEtcd

pytest.importorskip("numba")
pytest.importorskip("pyarrow")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "07-click-through"
ROWS, HELD_OUT = 6000, 2000


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    run("generate.py", f"--folder={folder}", f"--rows={ROWS}", f"--held-out={HELD_OUT}", "--files=3")
    return folder


def run(script: str, *arguments: str) -> str:
    whole = [sys.executable, "-W", "ignore", str(EXAMPLE / script), *arguments]
    return subprocess.run(whole, check=True, capture_output=True, text=True, timeout=800).stdout


def held_out(said: str) -> tuple[float, int]:
    """AUC and number of records; said by exactly one trainer."""
    found = re.findall(r"held out: AUC ([0-9.]+), loss [0-9.]+, ([0-9]+) records", said)
    assert len(found) == 1, said
    return float(found[0][0]), int(found[0][1])


@pytest.mark.slow
@pytest.mark.soak_but("paddle")
def test_alone(framework: str, clicks: Path, tmp_path: Path) -> None:
    """Raw files and prepared ones are the same data, and the same run gives the same model."""
    run("prepare.py", f"--folder={tmp_path}", *map(str, sorted(clicks.glob("*.tsv"))))
    said = [
        run(f"train_{framework}.py", f"--train={folder}/train-*{kind}", f"--test={folder}/test{kind}", "--batch=96")
        for folder, kind in ((clicks, ".tsv"), (tmp_path, ".arrow"))
    ]
    (auc, records), again = held_out(said[0]), held_out(said[1])
    # Shards of the two formats are cut differently, and so the order differs.
    assert auc == pytest.approx(again[0], abs=0.02) and auc > 0.6
    assert records == again[1] == HELD_OUT


@pytest.mark.slow
@pytest.mark.soak_but("torch")
def test_with_pservers(framework: str, clicks: Path, tmp_path: Path, etcd: OutsideEtcd) -> None:
    mode, model = {"torch": ("sync", "deepfm"), "paddle": ("async", "wide-deep")}[framework]
    more = (f"--train={clicks}/train-*.tsv", f"--test={clicks}/test.tsv", "--batch=96", f"--model={model}")
    options = ("--run-mode=ps", f"--ps-mode={mode}", "--servers=2:2", "--servers-per-node=2")
    script = (str(EXAMPLE / f"train_{framework}.py"),)
    with Job(tmp_path, [etcd.endpoint], options=options, script=script, arguments=more) as job:
        command = [word for word in job.command("a", nproc=2) if not word.startswith("--folder=")]
        assert job.start("a", command=command).exit_code(800) == ExitCode.OK
        auc, records = held_out(job.nodes["a"].text)
        assert auc > 0.55 and records == HELD_OUT
