"""Incremental exports: exactly what differs between two checkpoints, and lookups through all of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import ps.export
from edl.adapters.remote_files import open_files
from edl.errors import CheckpointError, PsError, SettingError
from edl.worker import session as sessions
from ps.__main__ import commands
from ps.checkpoint.directory import CheckpointDirectory
from ps.client.frontend import InitOptions, part
from ps.client.warm_start import warm_start
from ps.rows import Rows, concat
from tests.support.checkpoint_rows import DENSE, USER, finish, rows_of, split, taken

KEYS = np.unique(np.random.default_rng(4).integers(-(2**63), 2**63 - 1, 3000))
FIRST = {"user": rows_of(USER, KEYS), DENSE.name: rows_of(DENSE, np.arange(50))}
CHANGED, GONE, NEW = KEYS[:100], KEYS[100:150], np.arange(40)


def second() -> dict[str, Rows]:
    """Some rows with other weights, some gone, some new, and some of which only counters changed."""
    rows = FIRST["user"].take(slice(150, None))
    rows.frequency[:20] += 1
    changed = rows_of(USER, CHANGED, seed=7)
    return {"user": concat([rows, changed, rows_of(USER, NEW, seed=8)]), DENSE.name: FIRST[DENSE.name]}


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Three checkpoints of two pservers: the second differs from the first, and the third is as the first."""
    directories = [CheckpointDirectory(open_files(str(tmp_path / "saved")), "job", one) for one in (1, 2)]
    found = []
    for number, rows in enumerate((FIRST, second(), FIRST), 1):
        told = [one.write(number, 1, own, taken(rows)) for one, own in zip(directories, split(2), strict=True)]
        found.append(str(tmp_path / "saved" / json.loads(finish(directories, number, told, '{"step": 7}'))["run"]))
    return found


def exported(runs: list[str], folder: Path, **options: str) -> list[Path]:
    ps.export.export_checkpoint(runs[0], folder / "0", **options)
    for number in (1, 2):
        ps.export.export_changes(runs[number - 1], runs[number], folder / str(number), **options)
    return [folder / str(number) for number in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["arrow", "safetensors"])
def test_only_what_differs_is_written(runs: list[str], tmp_path: Path, format: str) -> None:
    folders = exported(runs, tmp_path, format=format)
    change = ps.export.open(folders[1])
    assert change.since.endswith("checkpoint-0000000001") and change.source.endswith("checkpoint-0000000002")
    assert sorted(np.concatenate(list(change.keys("user"))).tolist()) == sorted([*CHANGED.tolist(), *NEW.tolist()])
    assert change.gone("user").tolist() == sorted(GONE.tolist())
    assert change.rows(DENSE.name) == 0 and not len(change.gone(DENSE.name))
    back = ps.export.open(folders[2])
    assert back.rows("user") == 150 and back.gone("user").tolist() == NEW.tolist()


def test_layers_are_as_a_complete_export(runs: list[str], tmp_path: Path) -> None:
    folders = exported(runs, tmp_path)
    asked = np.concatenate([KEYS, NEW, [1 << 50]]).reshape(1, -1)
    for upto in (1, 2, 3):
        ps.export.export_checkpoint(runs[upto - 1], tmp_path / f"all-{upto}")
        whole = ps.export.open(tmp_path / f"all-{upto}")
        layers = ps.export.LayeredExport(folders[:upto])
        assert layers.source == whole.source and layers.step == 7
        for missing in ("zeros", "initial"):
            assert np.array_equal(layers.lookup("user", asked, missing), whole.lookup("user", asked, missing))
        assert np.array_equal(layers.lookup(DENSE.name, range(50)), FIRST[DENSE.name].weights)
        with pytest.raises(PsError, match="keys have no row"):
            layers.lookup("user", asked, "error")


def test_layers_must_follow_one_another(runs: list[str], tmp_path: Path) -> None:
    folders = exported(runs, tmp_path)
    with pytest.raises(CheckpointError, match="the first of several exports must be a complete one"):
        ps.export.LayeredExport(folders[1:])
    with pytest.raises(CheckpointError, match=r"2 has the changes since .*0002, not since .*0001\. Give all"):
        ps.export.LayeredExport([folders[0], folders[2]])
    with pytest.raises(CheckpointError, match="0 is complete, not since"):
        ps.export.LayeredExport([folders[0], folders[0]])
    with pytest.raises(PsError, match="there is no table item"):
        ps.export.LayeredExport(folders).lookup("item", [1])
    with pytest.raises(SettingError, match="missing"):
        ps.export.LayeredExport(folders).lookup("user", [1], "none")


def test_the_command(runs: list[str], tmp_path: Path) -> None:
    arguments = ["export", runs[1], str(tmp_path / "out"), "--since", runs[0], "--table", "user"]
    done = CliRunner().invoke(commands, arguments, catch_exceptions=False)
    assert "user: 140 rows" in done.output


def test_a_job_does_not_start_from_changes(runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_current", None)
    folders = exported(runs, tmp_path)
    part.forget()
    part.init(InitOptions(local=True))
    with pytest.raises(PsError, match=r"1 has only the changes since .*Start from a complete export"):
        warm_start(folders[1])
    part.forget()
