"""Exports for inference: written from checkpoints and from what runs, read by key, by us and by other tools."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import ps.export
from edl.adapters.remote_files import open_files
from edl.errors import CheckpointError, PsError, SettingError
from ps.__main__ import commands
from ps.checkpoint.directory import CheckpointDirectory
from ps.rows import Rows
from ps.spec import Optimizer, TableSpec, UpdateRule
from ps.store.kernels import plain
from ps.store.rules import TableLayout
from tests.support.checkpoint_rows import DENSE, TABLES, USER, finish, rows_of, split, taken

FORMATS = ["arrow", "safetensors"]
KEYS = np.unique(np.random.default_rng(4).integers(-(2**63), 2**63 - 1, 5000))
ROWS = {"user": rows_of(USER, KEYS), DENSE.name: rows_of(DENSE, np.arange(50))}


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Write a checkpoint of two pservers."""
    directories = [CheckpointDirectory(open_files(str(tmp_path / "saved")), "job", one) for one in (1, 2)]
    told = [one.write(3, 1, own, taken(ROWS)) for one, own in zip(directories, split(2), strict=True)]
    return str(tmp_path / "saved" / json.loads(finish(directories, 3, told, '{"step": 70}'))["run"])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_what_is_looked_up_is_what_was_trained(run: str, tmp_path: Path, format: str, dtype: str) -> None:
    done = ps.export.export_checkpoint(run, tmp_path / "out", format=format, dtype=dtype)
    assert dict(done.rows) == {"user": len(KEYS), DENSE.name: 50}
    model = ps.export.open(tmp_path / "out")
    assert (model.step, model.source, model.tables) == (
        70,
        "ps/job/checkpoint-0000000003",
        {one.name: one for one in TABLES},
    )
    assert model.rows("user") == len(KEYS) and model.dim("user") == 4
    assert np.array_equal(np.concatenate(list(model.keys("user"))), KEYS)
    expected = ROWS["user"].weights.astype(dtype).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(KEYS))
    assert np.array_equal(model.lookup("user", KEYS[order]), expected[order])
    assert np.array_equal(model.lookup(DENSE.name, range(50)), ROWS[DENSE.name].weights.astype(dtype))
    again = model.lookup("user", [[KEYS[5], KEYS[9]], [KEYS[5], 17]])
    assert again.dtype == np.float32 and np.array_equal(
        again, np.array([[expected[5], expected[9]], [expected[5], 0 * expected[0]]])
    )
    assert model.lookup("user", np.empty((0, 3), np.int64)).shape == (0, 3, 4)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_many_batches(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.client.export.BATCH_ROWS", 700)
    some = ROWS["user"].take(np.random.default_rng(1).permutation(len(KEYS)))
    pieces = [some.take(slice(start, start + 900)) for start in range(0, len(KEYS), 900)]
    ps.export.write(tmp_path / "out", [USER], lambda spec: pieces, format=format)
    model = ps.export.open(tmp_path / "out")
    asked = np.concatenate([KEYS[::3], KEYS[::3] + 1, [-(2**63), 2**63 - 1]])
    found = model.lookup("user", asked)
    count = len(KEYS[::3])
    assert np.array_equal(found[:count], ROWS["user"].weights[::3]) and not found[count:].any()
    assert len(list(model.keys("user"))) == (8 if format == "arrow" else 1)


def test_keys_without_rows(tmp_path: Path, run: str) -> None:
    ps.export.export_checkpoint(run, tmp_path / "out")
    model = ps.export.open(tmp_path / "out")
    asked = [int(KEYS[0]), 4, 5]
    assert not model.lookup("user", asked)[1:].any()
    first = model.lookup("user", asked, missing="initial")
    assert np.array_equal(first[1:], plain.first(TableLayout.of(USER), np.array([4, 5])))
    assert np.array_equal(first[0], ROWS["user"].weights[0])
    with pytest.raises(PsError, match="table user: 2 of 3 keys have no row, such as 4"):
        model.lookup("user", asked, missing="error")
    with pytest.raises(SettingError, match="missing"):
        model.lookup("user", asked, missing="none")
    with pytest.raises(PsError, match="there is no table item in this export; there are user, wide"):
        model.lookup("item", asked)
    with pytest.raises(PsError, match="integers that fit into int64, not float64"):
        model.lookup("user", [0.5])
    with pytest.raises(PsError, match="not uint64"):
        model.lookup("user", np.array([2**63], np.uint64))


@pytest.mark.parametrize("format", FORMATS)
def test_weights_that_half_precision_cannot_hold_are_refused(tmp_path: Path, format: str) -> None:
    """They would become infinite, and nobody would notice before the model is served."""
    rows = ROWS["user"].take(slice(0, 9))
    rows = replace(rows, weights=rows.weights.copy())
    rows.weights[3, 1] = 65519  # rounds to the largest number, 65504
    rows.weights[5, 0] = np.nan
    rows.weights[6, 2] = np.inf  # not a matter of the number format
    ps.export.write(tmp_path / "good", [USER], lambda spec: [rows], format=format, dtype="f2")
    found = ps.export.open(tmp_path / "good").lookup("user", rows.keys)
    assert found[3, 1] == 65504 and np.isnan(found[5, 0]) and np.isinf(found[6, 2])
    rows.weights[7, 3] = -70000
    with pytest.raises(SettingError, match=rf"--dtype=f2: .* table user, key {rows.keys[7]} is -70000.* f4"):
        ps.export.write(tmp_path / "bad", [USER], lambda spec: [rows], format=format, dtype="f2")
    assert not list((tmp_path / "bad").iterdir()), "a second attempt needs an empty folder"
    ps.export.write(tmp_path / "bad", [USER], lambda spec: [rows], format=format)
    assert ps.export.open(tmp_path / "bad").lookup("user", rows.keys[7:8])[0, 3] == -70000


def test_no_keys_at_all(tmp_path: Path) -> None:
    ps.export.write(tmp_path / "out", [USER], lambda spec: [ROWS["user"]])
    assert ps.export.open(tmp_path / "out").lookup("user", []).shape == (0, 4)


@pytest.mark.parametrize("format", FORMATS)
def test_an_empty_table(tmp_path: Path, format: str) -> None:
    ps.export.write(tmp_path / "out", [USER], lambda spec: [], format=format)
    model = ps.export.open(tmp_path / "out")
    assert model.rows("user") == 0 and not model.lookup("user", [1, 2]).any()


def test_other_tools_can_read_them(tmp_path: Path, run: str) -> None:
    pa = pytest.importorskip("pyarrow")
    ps.export.export_checkpoint(run, tmp_path / "a")
    table = pa.ipc.open_file(pa.memory_map(str(tmp_path / "a" / "user.arrow"))).read_all()
    assert table["key"].to_pylist() == KEYS.tolist()
    assert np.allclose(table["weights"][7].as_py(), ROWS["user"].weights[7])
    safetensors = pytest.importorskip("safetensors.numpy")
    ps.export.export_checkpoint(run, tmp_path / "s", format="safetensors", tables=["user"])
    assert [path.name for path in (tmp_path / "s").glob("*.safetensors")] == ["user.safetensors"]
    arrays = safetensors.load_file(tmp_path / "s" / "user.safetensors")
    assert np.array_equal(arrays["weights"], ROWS["user"].weights) and np.array_equal(arrays["keys"], KEYS)


def test_the_command(tmp_path: Path, run: str) -> None:
    out = str(tmp_path / "out")
    job = run.rpartition("/")[0]
    done = CliRunner().invoke(
        commands, ["export", job, out, "--table", "user", "--dtype", "f2"], catch_exceptions=False
    )
    assert f"user: {len(KEYS):,} rows" in done.output and out in done.output
    assert list(ps.export.open(out).tables) == ["user"]
    for arguments, text in (
        ([job, out], "already exists"),
        ([run, str(tmp_path / "b"), "--table", "items"], "no such table; there are user, wide"),
        ([str(tmp_path), str(tmp_path / "c")], "must end in ps/<job>"),
    ):
        with pytest.raises(SettingError, match=text):
            CliRunner().invoke(commands, ["export", *arguments], catch_exceptions=False)
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        CliRunner().invoke(commands, ["export", f"{tmp_path}/ps/none", str(tmp_path / "d")], catch_exceptions=False)


def test_from_a_store_in_memory(tmp_path: Path) -> None:
    where = "memory://exported"
    directory = CheckpointDirectory(open_files(where), "job", 1)
    run = json.loads(finish([directory], 1, [directory.write(1, 1, np.ones(4096, np.uint8), taken(ROWS))]))["run"]
    ps.export.export_checkpoint(f"{where}/{run}", tmp_path / "out")
    assert ps.export.open(tmp_path / "out").rows("user") == len(KEYS)


def test_of_what_runs(tmp_path: Path) -> None:
    class Running:
        def __init__(self) -> None:
            self.tables = {one.name: one for one in TABLES}
            self.step = 5

        def scan(self, table: str) -> Iterator[Rows]:
            yield from (ROWS[table].take(slice(start, start + 1000)) for start in range(0, len(KEYS), 1000))

    ps.export.export_running(Running(), tmp_path / "out", tables=["user"])  # type: ignore[arg-type]
    model = ps.export.open(tmp_path / "out")
    assert model.step == 5 and np.array_equal(model.lookup("user", KEYS), ROWS["user"].weights)


# --- what is wrong with them -----------------------------------------------------------------------------------------


def test_one_that_was_broken_off_is_none(tmp_path: Path) -> None:
    def rows(spec: object) -> Iterator[Rows]:
        yield ROWS["user"]
        raise CheckpointError("the checkpoint is damaged")

    with pytest.raises(CheckpointError, match="is damaged"):
        ps.export.write(tmp_path / "out", [USER], rows)
    with pytest.raises(CheckpointError, match="not a complete export"):
        ps.export.open(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir()), "nothing half-written is left"


@pytest.mark.parametrize("format", FORMATS)
def test_incomplete_files(tmp_path: Path, run: str, format: str) -> None:
    ps.export.export_checkpoint(run, tmp_path / "out", format=format)
    path = tmp_path / "out" / f"user.{format}"
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    with pytest.raises(CheckpointError, match=r"user\.\w+ has \d+ bytes instead of"):
        ps.export.open(tmp_path / "out")
    path.write_bytes(bytes(len(data)))
    with pytest.raises(CheckpointError, match=r"user\.\w+ is damaged"):
        ps.export.open(tmp_path / "out")
    (tmp_path / "out" / "export.json").write_text("{}")
    with pytest.raises(CheckpointError, match="does not have edl's format"):
        ps.export.open(tmp_path / "out")


def test_several_threads_look_up_at_once(tmp_path: Path, run: str) -> None:
    ps.export.export_checkpoint(run, tmp_path / "out")
    model, wrong = ps.export.open(tmp_path / "out"), []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).integers(0, len(KEYS), 3000)
        if not np.array_equal(model.lookup("user", KEYS[order]), ROWS["user"].weights[order]):
            wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


@pytest.mark.parametrize("format", FORMATS)
def test_counts_stay_exact(tmp_path: Path, format: str) -> None:
    shows = TableSpec("shows", 1, Optimizer(UpdateRule.ADD))
    keys, counts = np.arange(3), np.array([[1], [2049], [70_000]], np.float32)
    none = np.zeros(3, np.uint32)
    rows = Rows(keys, counts, np.zeros((3, 0), np.float32), none, none, none)
    ps.export.write(tmp_path / "out", [shows, USER], lambda spec: [rows] if spec is shows else [], format=format,
                    dtype="f2")  # fmt: skip
    model = ps.export.open(tmp_path / "out")
    assert np.array_equal(model.lookup("shows", keys), counts) and model.rows("user") == 0
