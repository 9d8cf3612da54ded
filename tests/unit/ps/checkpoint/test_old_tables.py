"""Checkpoints of parameter servers that earlier versions of edl wrote are read; unknown newer ones are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from edl.adapters.remote_files import open_files
from edl.errors import CheckpointError
from ps.checkpoint.directory import CheckpointDirectory
from ps.checkpoint.reader import Loaded
from ps.rows import Rows
from ps.spec import BUCKETS, UpdateRule
from tests.support.checkpoint_rows import split
from tests.support.old_checkpoints import NEWER, STORED, VERSIONS, of_newer_format

KEYS = {-5, 0, 7, 2**40}
FOLDER = "ps/tables/checkpoint-0000000001"


@pytest.mark.parametrize("version", VERSIONS)
def test_any_number_of_pservers_goes_on_from_them(version: str) -> None:
    directory = CheckpointDirectory(open_files(str(STORED / version / "tables")), "tables")
    (found,) = directory.find().checkpoints
    assert (found.run, found.number, found.step) == (FOLDER, 1, 3)
    assert [(one.name, one.dim, one.optimizer.rule) for one in found.tables] == [
        ("plain", 3, UpdateRule.SGD),
        ("adaptive", 2, UpdateRule.ADAGRAD),
    ]
    assert json.loads(json.loads(found.extra)["values"]["node/0"]) == {"steps": 3}
    for pservers in (1, 3):
        rows: dict[str, list[Rows]] = {}

        def put(piece: Loaded, rows: dict[str, list[Rows]] = rows) -> None:
            for table, some in piece.rows.items():
                rows.setdefault(table, []).append(some)

        for mine in split(pservers) if pservers > 1 else [np.ones(BUCKETS, np.uint8)]:
            directory.restore(found.run, mine, put, threads=0)
        for table, several in rows.items():
            assert {key for some in several for key in some.keys.tolist()} == KEYS
            for some in several:
                assert (some.updates == 3).all()
                assert ((some.weights if table == "plain" else some.state) == 3.0).all()
        assert rows.keys() == {"plain", "adaptive"}


def test_one_of_an_unknown_newer_format_is_refused_and_stays(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(STORED / VERSIONS[-1] / "tables", tmp_path / "saved"))
    manifest = folder / FOLDER / "checkpoint.json"
    of_newer_format(manifest)
    before = manifest.read_bytes()
    directory = CheckpointDirectory(open_files(str(folder)), "tables")
    found = directory.find()
    assert not found.checkpoints
    (reason,) = found.refused
    assert f"{FOLDER}: " in reason and f"has format {NEWER}, newer than this edl knows (1): upgrade edl" in reason
    with pytest.raises(CheckpointError, match="newer than this edl knows"):
        directory.restore(FOLDER, np.ones(BUCKETS, np.uint8), lambda piece: None)
    assert manifest.read_bytes() == before
