"""Conversion to the fast format: what comes out, and that it survives being killed at any time."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from data_service.__main__ import commands
from data_service.convert.conversion import DONE, LOCK, PLAN, ConversionProgress, convert, tasks_of, whole_batches
from data_service.convert.recipe import Pack, Recipe, parsed_fill
from data_service.formats import open_reader
from data_service.formats.arrays import to_numpy
from data_service.formats.options import FormatOptions
from data_service.scan import scan
from edl.errors import DataError, SettingError

ROOT = Path(__file__).resolve().parents[4]
ROWS = 2000


def table(begin: int, rows: int = ROWS) -> pa.Table:
    ids = np.arange(begin, begin + rows)
    return pa.table(
        {
            "label": (ids % 2).astype(np.float32),
            "I1": ids.astype(np.float32),
            "I2": pa.array([None if i % 10 == 0 else float(i) for i in ids], pa.float32()),
            "C1": ids,
            "C2": ids * 2,
            "word": pa.array([f"w{i}" for i in ids]).dictionary_encode(),
        }
    )


def inputs(folder: Path, files: int = 3, rows: int = ROWS) -> str:
    folder.mkdir(exist_ok=True)
    for number in range(files):
        pq.write_table(table(number * rows, rows), folder / f"in{number}.parquet", row_group_size=300)
    return str(folder)


def outputs(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("part-*"))}


def read_all(folder: Path) -> pa.Table:
    manifest = scan(str(folder))
    reader = open_reader(manifest.format)
    return pa.concat_tables([reader.read(manifest.ref(index)) for index in range(len(manifest))])


PACKED = Recipe(
    packs=(Pack("dense", ("I*",)), Pack("cat", ("C1", "C2"), "int32")),
    fill={"I2": -1},
    shard_records=256,
    file_bytes=20_000,
)


def test_columns_are_packed_and_nothing_is_lost(tmp_path: Path) -> None:
    seen: list[ConversionProgress] = []
    done = convert(inputs(tmp_path / "in"), str(tmp_path / "out"), PACKED, progress=seen.append)
    assert (done.records, done.found) == (3 * ROWS, 0)
    assert done.files == len(outputs(tmp_path / "out")) > 3
    assert done.size_bytes == sum(path.stat().st_size for path in (tmp_path / "out").glob("part-*"))
    found = to_numpy(read_all(tmp_path / "out"))
    ids = np.arange(3 * ROWS)
    assert list(found) == ["label", "word", "dense", "cat"]
    assert found["dense"].dtype == np.float32 and found["cat"].dtype == np.int32
    assert np.array_equal(found["dense"], np.stack([ids, np.where(ids % 10 == 0, -1, ids)], axis=1))
    assert np.array_equal(found["cat"], np.stack([ids, ids * 2], axis=1))
    assert found["word"].tolist() == [f"w{i}" for i in ids]
    assert [one.files for one in seen] == list(range(done.files + 1))
    assert seen[-1].done_bytes == seen[-1].total_bytes and seen[-1].records == 3 * ROWS
    sizes = [ref.records for ref in (scan(str(tmp_path / "out"), shard_records=256).ref(i) for i in range(2))]
    assert sizes == [256, 44]


def test_chosen_columns_and_compression(tmp_path: Path) -> None:
    for compression in ("lz4", "zstd"):
        recipe = Recipe(columns=("C2",), packs=(Pack("dense", ("I*",)),), compression=compression)
        convert(inputs(tmp_path / "in"), str(tmp_path / compression), recipe)
        found = read_all(tmp_path / compression)
        assert found.column_names == ["C2", "dense"]
        assert found.column("C2").to_pylist() == [2 * i for i in range(3 * ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_records_are_shuffled_within_a_file_by_the_seed(tmp_path: Path, workers: int) -> None:
    source = inputs(tmp_path / "in")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        recipe = Recipe(columns=("C1",), seed=seed, file_bytes=20_000, shard_records=300)
        convert(source, str(tmp_path / name), recipe, workers=workers)
    assert outputs(tmp_path / "a") == outputs(tmp_path / "b") != outputs(tmp_path / "c")
    found = [ref for ref in read_all(tmp_path / "a").column("C1").to_pylist()]
    assert found != list(range(3 * ROWS)) and sorted(found) == list(range(3 * ROWS))
    first = scan(str(tmp_path / "a")).files[0]
    records = open_reader("ipc").read(scan(first.path, shard_records=10**6).ref(0)).column("C1").to_pylist()
    assert set(records) == set(range(len(records)))  # not across files


def test_every_format_can_be_converted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,s\n" + "".join(f'{i},"a\nb{i}"\n' for i in range(500)))
    options = FormatOptions(quoted_newlines=True)
    convert(str(tmp_path / "a.csv"), str(tmp_path / "csv"), Recipe(shard_records=100), options=options)
    assert read_all(tmp_path / "csv").column("s")[499].as_py() == "a\nb499"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"n": i, "l": [i, i]}) + "\n" for i in range(500)))
    convert(str(tmp_path / "a.jsonl"), str(tmp_path / "jsonl"), shard_bytes=1000)
    assert read_all(tmp_path / "jsonl").column("l")[499].as_py() == [499, 499]
    (tmp_path / "a.txt").write_text("".join(f"{i}\n" for i in range(500)))
    convert(str(tmp_path / "a.txt"), str(tmp_path / "text"), shard_bytes=100)
    assert read_all(tmp_path / "text").num_rows == 500
    user = FormatOptions(read=lambda file, begin, end: {"n": np.ones((7, 2), np.int8)})
    convert("anything", str(tmp_path / "user"), format="user", options=user)
    assert to_numpy(read_all(tmp_path / "user"))["n"].shape == (7, 2)
    convert(str(tmp_path / "text"), str(tmp_path / "ipc"))
    assert read_all(tmp_path / "ipc").equals(read_all(tmp_path / "text"))


def test_types_of_csv_are_settled_over_all_files(tmp_path: Path) -> None:
    for number, value in enumerate(("1", "2.5", "")):
        (tmp_path / f"{number}.csv").write_text(f"n,s\n{value},{'x' if number else 7}\n")
    convert(str(tmp_path / "*.csv"), str(tmp_path / "out"), workers=2)
    assert read_all(tmp_path / "out").to_pylist() == [
        {"n": 1.0, "s": "7"},
        {"n": 2.5, "s": "x"},
        {"n": None, "s": "x"},
    ]


def test_a_header_alone_makes_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n")
    assert convert(str(tmp_path / "a.csv"), str(tmp_path / "out")).files == 0


def test_an_empty_file_may_come_first(tmp_path: Path) -> None:
    """Spark writes one for a partition without records."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.csv").touch()
    (tmp_path / "in/1.csv").write_text("a,b\n1,2\n3,4\n")
    done = convert(str(tmp_path / "in"), str(tmp_path / "out"), Recipe(packs=(Pack("ab", ("a", "b")),)))
    assert done.records == 2
    assert to_numpy(read_all(tmp_path / "out"))["ab"].tolist() == [[1, 2], [3, 4]]


def test_a_batch_with_more_text_than_an_array_can_hold_is_divided() -> None:
    """pyarrow leaves a column of more than 2 GiB in chunks."""

    class Large:
        def combine_chunks(self) -> pa.Table:
            return pa.table({"text": pa.chunked_array([["a", "b"], ["c"]]), "n": pa.chunked_array([[1, 2, 3]])})

    found = whole_batches(Large())
    assert [batch.to_pydict() for batch in found] == [{"text": ["a", "b"], "n": [1, 2]}, {"text": ["c"], "n": [3]}]
    nothing = whole_batches(pa.table({"text": pa.chunked_array([], pa.string())}))
    assert [batch.num_rows for batch in nothing] == [0]


def test_lines_without_values_make_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n\n\n")
    assert convert(str(tmp_path / "a.csv"), str(tmp_path / "out")).records == 0
    assert open_reader("ipc").schema(str(tmp_path / "out/part-00000.arrow")).names == ["a", "b"]


def test_tasks_do_not_depend_on_chance(tmp_path: Path) -> None:
    manifest = scan(inputs(tmp_path / "in"), shard_records=300)
    tasks = tasks_of(manifest, 20_000)
    assert [ref.index for task in tasks for ref in task.refs] == list(range(len(manifest)))
    assert all(task.size_bytes <= 20_000 for task in tasks)
    assert tasks == tasks_of(manifest, 20_000)
    assert len(tasks_of(manifest, 1)) == len(manifest)
    assert len(tasks_of(manifest, 10**9)) == 1


# --- going on --------------------------------------------------------------------------------------------------------


def test_the_same_again_does_nothing(tmp_path: Path) -> None:
    source, out = inputs(tmp_path / "in"), tmp_path / "out"
    first = convert(source, str(out), PACKED)
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    again = convert(source, str(out), PACKED)
    assert (again.found, again.records) == (first.files, first.records)
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")} == times


def test_what_is_missing_or_not_noted_is_written_again(tmp_path: Path) -> None:
    source, out = inputs(tmp_path / "in"), tmp_path / "out"
    convert(source, str(out), PACKED)
    wanted = outputs(out)
    lines = (out / DONE).read_text().splitlines()
    (out / DONE).write_text("\n".join(lines[:-2]) + "\n" + lines[-2][:20])  # killed while it noted
    (out / "part-00000.arrow").unlink()
    (out / "part-00001.arrow").write_bytes(b"half")
    (out / ".part-00002.arrow.77.tmp").write_bytes(b"half")
    done = convert(source, str(out), PACKED)
    assert done.found == len(wanted) - 3
    assert outputs(out) == wanted
    assert sorted(path.name for path in out.iterdir()) == sorted([*wanted, DONE, PLAN, LOCK])
    assert convert(source, str(out), PACKED).found == len(wanted)


def test_other_folders_are_not_touched(tmp_path: Path) -> None:
    source = inputs(tmp_path / "in")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("…")
    with pytest.raises(DataError, match=r"mine: contains thesis\.tex and no conversion"):
        convert(source, str(tmp_path / "mine"))
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]
    out = tmp_path / "out"
    convert(source, str(out), PACKED)
    with pytest.raises(DataError, match="contains a conversion with different packs"):
        convert(source, str(out), replace(PACKED, packs=()))
    inputs(tmp_path / "in", files=4)
    with pytest.raises(DataError, match="contains a conversion with different inputs, files"):
        convert(source, str(out), PACKED)
    (out / PLAN).write_text("{")
    with pytest.raises(DataError, match=r"_convert\.json: damaged"):
        convert(source, str(out), PACKED)


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    source, out = inputs(tmp_path / "in"), tmp_path / "out"

    def meanwhile(now: ConversionProgress) -> None:
        with pytest.raises(DataError, match="another conversion is writing to this folder"):
            convert(source, str(out), PACKED)

    convert(source, str(out), PACKED, progress=meanwhile)


def test_an_unexpected_file_at_the_end_is_reported(tmp_path: Path) -> None:
    source, out = inputs(tmp_path / "in"), tmp_path / "out"

    def meanwhile(now: ConversionProgress) -> None:
        (out / "part-99999.arrow").write_bytes(b"")

    with pytest.raises(DataError, match=r"part-99999\.arrow is unexpected"):
        convert(source, str(out), PACKED, progress=meanwhile)


@pytest.mark.parametrize("name", ["_lock", "_convert.json.tmp", "_done.jsonl"])
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, name: str) -> None:
    source, out = inputs(tmp_path / "in"), tmp_path / "out"
    if name == "_done.jsonl":  # a folder with records is refused if it has no plan
        convert(source, str(out), PACKED)
        (out / name).unlink()
        next(out.glob("*.arrow")).unlink()
    (out / name).mkdir(parents=True)  # neither can it be written by root
    with pytest.raises(DataError, match=rf"cannot write to {out}: .*{name}.*; the same command continues"):
        convert(source, str(out), PACKED)
    (out / name).rmdir()
    convert(source, str(out), PACKED)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_input_is_reported_and_the_rest_is_kept(tmp_path: Path, workers: int) -> None:
    source, out = inputs(tmp_path / "in"), tmp_path / "out"
    path = tmp_path / "in/in2.parquet"
    good = path.read_bytes()
    column = pq.ParquetFile(path).metadata.row_group(5).column(3)
    begin = column.data_page_offset
    path.write_bytes(good[:begin] + b"\xff" * 40 + good[begin + 40 :])
    with pytest.raises(
        DataError, match=r"in2\.parquet, shard \d+ .*\(\d+ of 21 output files finished; the same command"
    ):
        convert(source, str(out), PACKED, workers=workers)
    assert len(outputs(out)) > 3
    path.write_bytes(good)
    assert convert(source, str(out), PACKED, workers=workers).found > 3
    convert(source, str(tmp_path / "whole"), PACKED)
    assert outputs(out) == outputs(tmp_path / "whole")


PROGRAM = """
import sys
from data_service.convert.conversion import convert
from data_service.convert.recipe import Pack, Recipe

if __name__ == "__main__":
    recipe = Recipe(packs=(Pack("dense", ("I*",)),), fill={"I2": -1}, shard_records=256, file_bytes=20_000, seed=7)
    def report(now):
        print(now.files, flush=True)
        sys.stdin.readline()  # until the test has read this
    convert(sys.argv[1], sys.argv[2], recipe, workers=int(sys.argv[3]), progress=report)
    print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path: Path, workers: int) -> None:
    source, out = inputs(tmp_path / "in", files=4), tmp_path / "out"
    recipe = Recipe(packs=(Pack("dense", ("I*",)),), fill={"I2": -1}, shard_records=256, file_bytes=20_000, seed=7)
    whole = convert(source, str(tmp_path / "whole"), recipe)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    kills, finished = 0, False
    while not finished:
        command = [sys.executable, str(tmp_path / "program.py"), source, str(out), str(workers)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
            assert process.stdin is not None and process.stdout is not None
            began = None
            for line in process.stdout:
                if line.strip() == "done":
                    finished = True
                    break
                began = int(line) if began is None else began
                if int(line) >= began + 2 + 2 * (kills % 3):  # at another place each time, and while others are written
                    process.send_signal(signal.SIGKILL)
                    kills += 1
                    break
                print(file=process.stdin, flush=True)
            process.stdout.read()  # until the last process that has it open is gone
        assert process.returncode in (0, -signal.SIGKILL)
    assert kills >= 3
    assert outputs(out) == outputs(tmp_path / "whole")
    assert read_all(out).num_rows == whole.records
    assert not [name for name in os.listdir(out) if name.endswith(".tmp")]


def test_a_killed_process_is_reported_and_the_same_call_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short_of_memory.py").write_text(
        "import os, signal\n"
        "def shards(file):\n    return [(n, n + 10, 10) for n in range(0, 60, 10)]\n"
        "def read(file, begin, end):\n"
        "    if begin == 40 and os.path.exists(__file__ + '.kill'):\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return {'n': list(range(begin, end))}\n"
    )
    (tmp_path / "short_of_memory.py.kill").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    options = FormatOptions(read="short_of_memory:read", shards="short_of_memory:shards")
    arguments: dict[str, Any] = {"format": "user", "options": options, "workers": 2}
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"was killed\. Out of memory\? Use fewer --workers"):
        convert("db://table", str(out), Recipe(file_bytes=1), **arguments)
    (tmp_path / "short_of_memory.py.kill").unlink()
    assert convert("db://table", str(out), Recipe(file_bytes=1), **arguments).records == 60
    assert read_all(out).column("n").to_pylist() == list(range(60))


# --- recipes and the command line ------------------------------------------------------------------------------------


def test_recipes_that_do_not_fit(tmp_path: Path) -> None:
    source = inputs(tmp_path / "in")
    number = iter(range(100))

    def refuse(kind: type[Exception], match: str, **recipe: Any) -> None:
        with pytest.raises(kind, match=match):
            convert(source, str(tmp_path / f"out{next(number)}"), Recipe(**recipe))

    refuse(SettingError, r"I1 is float and C1 is int64.*Name a type", packs=(Pack("p", ("I1", "C1")),))
    refuse(SettingError, r"word is string; only numbers", packs=(Pack("p", ("word",)),))
    refuse(SettingError, r"no such column; available are label", packs=(Pack("p", ("X*",)),))
    refuse(SettingError, r"names a column twice", packs=(Pack("p", ("I1", "I*")),))
    refuse(SettingError, r"is also the name of a kept column", packs=(Pack("label", ("I*",)),))
    refuse(DataError, r"in0\.parquet: column C1 cannot be converted to int8", packs=(Pack("p", ("C*",), "int8"),))
    refuse(DataError, r"in0\.parquet: column I2 .*10 nulls|column I2", packs=(Pack("p", ("I*",), "int32"),))
    refuse(DataError, r"in0\.parquet: column I2 has type float: 'x' cannot replace", fill={"I2": "x"})
    refuse(DataError, r"has no column nothing", columns=("nothing",))
    for wrong in ({"compression": "gzip"}, {"shard_records": 0}, {"file_bytes": 0}):
        with pytest.raises(SettingError):
            Recipe(**wrong)
    with pytest.raises(SettingError, match="must be a local folder"):
        convert(source, "s3://bucket/out")
    with pytest.raises(SettingError, match="--workers=0"):
        convert(source, str(tmp_path / "o"), workers=0)
    with pytest.raises(SettingError, match="other processes can only import"):
        convert(source, str(tmp_path / "o"), workers=2, format="user", options=FormatOptions(read=lambda *a: None))


def test_corrected_options_find_the_folder_free(tmp_path: Path) -> None:
    source, out = inputs(tmp_path / "in"), tmp_path / "out"
    with pytest.raises(SettingError, match="no such column"):
        convert(source, str(out), Recipe(packs=(Pack("p", ("X*",)),)))
    assert not out.exists()
    packs = (Pack("p", ("I*",), "int32"),)
    with pytest.raises(DataError, match="--fill I2=0"):  # only the records show it
        convert(source, str(out), Recipe(packs=packs))
    assert convert(source, str(out), Recipe(packs=packs, fill={"I2": 0})).records == 3 * ROWS
    with pytest.raises(DataError, match=r"with different fill, seed\. Use"):
        convert(source, str(out), Recipe(packs=packs, seed=1))


def test_texts_of_the_command_line() -> None:
    assert Pack.of("dense:float32=I1,I2") == Pack("dense", ("I1", "I2"), "float32")
    assert Pack.of("c=C*") == Pack("c", ("C*",))
    for wrong in ("dense", "=I1", "dense=", "dense=a,,b", "dense:flaot=a"):
        with pytest.raises(SettingError):
            Pack.of(wrong)
    assert parsed_fill(("a=1", "b=1.5", "c=x", "d=")) == {"a": 1, "b": 1.5, "c": "x", "d": ""}
    with pytest.raises(SettingError, match="--fill=a: must be"):
        parsed_fill(("a",))


def test_the_command_line(tmp_path: Path) -> None:
    source, out = inputs(tmp_path / "in"), str(tmp_path / "out")
    run = CliRunner()
    shown = run.invoke(commands, ["scan", source, "--list", "--shard-records", "300"])
    assert shown.exit_code == 0, shown.output
    assert "in0.parquet" in shown.output
    assert " 7 shards\n" in shown.output
    assert "parquet: 3 files, 21 shards, 6,000 records" in shown.output
    arguments = ["convert", source, out, "--pack", "dense=I*", "--fill", "I*=0", "--columns", "label", "--file-mb", "1"]
    done = run.invoke(commands, arguments)
    assert done.exit_code == 0, done.output
    assert "1 file, 6,000 records" in done.output
    again = run.invoke(commands, arguments)
    assert "1 file, 1 of them by an earlier run, 6,000 records" in again.output
    assert read_all(tmp_path / "out").column_names == ["label", "dense"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["scan", "/nowhere/*.parquet"], "no file found"),
        (["scan", "/nowhere"], "no such file or folder"),
        (["convert", "/nowhere", "/tmp/x", "--option", "colour=red"], "no such option"),
        (["scan", "/nowhere", "-o", "types"], "must be NAME=VALUE"),
        (["convert", "/nowhere", "/tmp/x", "--file-mb=0"], "'--file-mb': 0 is not in the range"),
        (["scan", "/nowhere", "--shard-mb=0"], "'--shard-mb': 0 is not in the range"),
    ],
)
def test_errors_of_the_command_line_are_one_line(arguments: list[str], text: str) -> None:
    command = [sys.executable, "-m", "data_service", *arguments]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 2
    assert text in finished.stderr and "Traceback" not in finished.stderr
