"""From patterns to manifests: which files are found, and what is refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from data_service import scan as scanning
from data_service.filesystems import FoundFile, Storage
from data_service.formats.options import PACKED, SUFFIXES, FormatOptions
from data_service.manifest import Manifest
from data_service.scan import KnownFiles, scan, settle_types
from edl.errors import DataError, SettingError

ROOT = Path(__file__).resolve().parents[3]


def lines(path: Path, count: int = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"line {i}\n" for i in range(count)))


def names(manifest: Manifest, folder: Path) -> list[str]:
    return [os.path.relpath(file.path, folder) for file in manifest.files]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b/2.txt", "b/10.txt", "a/x/1.txt", "a/1.txt", "0.txt", "b/.hidden.txt", "b/_temporary/3.txt"):
        lines(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ([""], ["0.txt", "a/1.txt", "a/x/1.txt", "b/10.txt", "b/2.txt"]),
        (["b"], ["b/10.txt", "b/2.txt"]),
        (["b/", "b/2.txt", "b/*"], ["b/10.txt", "b/2.txt"]),
        (["*/*.txt"], ["a/1.txt", "b/10.txt", "b/2.txt"]),
        (["**/1.txt"], ["a/1.txt", "a/x/1.txt"]),
        (["**"], ["0.txt", "a/1.txt", "a/x/1.txt", "b/10.txt", "b/2.txt", "b/_temporary/3.txt"]),
        (["b/[0-9].txt"], ["b/2.txt"]),
        (["b/?.txt", "0.txt"], ["0.txt", "b/2.txt"]),
        (["b/.*.txt"], ["b/.hidden.txt"]),
        (["?/_*/*"], ["b/_temporary/3.txt"]),
    ],
)
def test_files_are_found_in_the_order_of_their_names(tree: Path, patterns: list[str], found: list[str]) -> None:
    assert names(scan([f"{tree}/{pattern}" for pattern in patterns]), tree) == found


def test_paths_are_absolute(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    for pattern in ("b/2.txt", "./b/2.*", f"file://{tree}/b/2.txt"):
        assert [file.path for file in scan(pattern).files] == [str(tree / "b/2.txt")]
    assert scan("b/*.txt").digest == scan(str(tree / "b")).digest != scan("a").digest


def test_a_name_with_wildcards_in_it_is_a_name(tmp_path: Path) -> None:
    lines(tmp_path / "a[1].txt")
    lines(tmp_path / "a1.txt")
    assert names(scan(f"{tmp_path}/a[1].txt"), tmp_path) == ["a[1].txt"]


def test_links_in_circles_end(tmp_path: Path) -> None:
    lines(tmp_path / "a/1.txt")
    (tmp_path / "a/up").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to(tmp_path / "a")
    assert "a/1.txt" in names(scan(str(tmp_path)), tmp_path)
    assert "other/1.txt" in names(scan(str(tmp_path)), tmp_path)


@pytest.mark.parametrize("pattern", ["*.parquet", "nothing/*.txt", "0.txt/*"])
def test_nothing_found(tree: Path, pattern: str) -> None:
    with pytest.raises(DataError, match=r"no file found.*quote it"):
        scan(f"{tree}/{pattern}")


def test_nothing_there(tree: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        scan([f"{tree}/b", f"{tree}/nowhere"])
    (tree / "empty").mkdir()
    with pytest.raises(DataError, match="empty: no file found"):
        scan(f"{tree}/empty")
    with pytest.raises(DataError, match="no pattern given: no file found"):
        scan([])


def test_unknown_names_and_mixed_formats(tree: Path) -> None:
    lines(tree / "b/README")
    said: list[str] = []
    scan(f"{tree}/b", say=said.append)
    assert said == [f"1 file skipped, because their names do not show their format: {tree}/b/README"]
    with pytest.raises(DataError, match=r"README: its name does not show its format\. Set format="):
        scan(f"{tree}/b/*")
    assert len(scan(f"{tree}/b/*", "text").files) == 3
    pq.write_table(pa.table({"a": [1]}), tree / "b/1.parquet")
    with pytest.raises(DataError, match=r"several formats: parquet \(.*1\.parquet\), text \(.*\.txt\)"):
        scan(f"{tree}/b")
    with pytest.raises(DataError, match=r"\.txt: is text by its name, but format=parquet"):
        scan(f"{tree}/b/*.*", "parquet")
    assert len(scan(f"{tree}/b/*.txt", "text").files) == 2


def test_empty_files_are_said(tree: Path) -> None:
    (tree / "b/1.txt").touch()
    said: list[str] = []
    manifest = scan(f"{tree}/b", say=said.append)
    assert (len(manifest), len(manifest.files)) == (2, 3)
    assert said == [f"1 file without records: {tree}/b/1.txt"]
    assert len(scan(f"{tree}/b/1.txt")) == 0
    (tree / "c").mkdir()
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tree / "c/0.parquet")
    (tree / "c/1.parquet").touch()
    pq.write_table(pa.table({"a": [1]}), tree / "c/2.parquet")
    assert [(ref.file[-9:], ref.records) for ref in (scan(str(tree / "c")).ref(0),)] == [("2.parquet", 1)]


def test_a_damaged_footer_is_named(tmp_path: Path) -> None:
    for number in range(40):
        pq.write_table(pa.table({"a": [1]}), tmp_path / f"{number:02}.parquet")
    good = (tmp_path / "33.parquet").read_bytes()
    for bad in (good[:-1], good[:-8] + b"\xff" * 8, b"x", good[:4] + b"\0" * 20 + b"PAR1"):
        (tmp_path / "33.parquet").write_bytes(bad)
        with pytest.raises(DataError, match=r"33\.parquet: cannot be read: .*Replace it"):
            scan(str(tmp_path))


def test_old_feather_is_named(tmp_path: Path) -> None:
    feather.write_feather(pa.table({"a": [1]}), str(tmp_path / "a.feather"), version=2)
    assert len(scan(str(tmp_path))) == 1
    (tmp_path / "b.feather").write_bytes(b"FEA1" + b"\0" * 40 + b"FEA1")
    with pytest.raises(DataError, match=r"b\.feather: is Feather version 1"):
        scan(str(tmp_path))


def test_more_files_than_are_good_are_taken_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        lines(tmp_path / f"{number}.txt")
    monkeypatch.setattr(scanning, "MANY_FILES", 20)
    said: list[str] = []
    assert len(scan(str(tmp_path), say=said.append)) == 30
    assert (
        f"{tmp_path}: more than 20 files." in said[0] and f"python -m data_service convert {tmp_path} OUTPUT" in said[0]
    )


def test_a_file_that_is_being_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines(tmp_path / "a.txt")
    lines(tmp_path / "b.txt")
    split = scanning._split_all

    def while_it_grows(files: list[FoundFile], *rest: Any) -> Any:
        yield from split(files, *rest)
        with (tmp_path / "b.txt").open("a") as file:
            file.write("more\n")

    monkeypatch.setattr(scanning, "_split_all", while_it_grows)
    with pytest.raises(DataError, match=r"b\.txt: is being written .* rename it when it is complete"):
        scan(str(tmp_path))


def test_a_later_scan_passes_over_files_that_are_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is being written, or of another format, keeps no others out."""
    rows = '{"a": 1}\n'
    for name in ("0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl", "4.csv"):
        (tmp_path / name).write_text(rows)
    split = scanning._split_all

    def while_it_grows(files: list[FoundFile], *rest: Any) -> Any:
        yield from split(files, *rest)
        with (tmp_path / "1.jsonl").open("a") as file:
            file.write(rows)
        (tmp_path / "2.jsonl").unlink()

    monkeypatch.setattr(scanning, "_split_all", while_it_grows)
    first = str(tmp_path / "0.jsonl")
    refused: dict[str, str] = {}
    known = KnownFiles({first: len(rows)}, first, unready=lambda path, error: refused.update({path: str(error)}))
    assert names(scan(str(tmp_path), "jsonl", known=known), tmp_path) == ["3.jsonl"]
    assert {os.path.basename(path) for path in refused} == {"1.jsonl", "2.jsonl", "4.csv"}
    assert "is csv by its name, but format=jsonl" in refused[str(tmp_path / "4.csv")]
    assert "is being written" in refused[str(tmp_path / "1.jsonl")]
    assert "has disappeared" in refused[str(tmp_path / "2.jsonl")]


def test_a_store_that_cannot_be_listed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of object stores have errors of their own, which must not end the thread that looks for new files."""

    def find(self: Storage, pattern: str) -> Iterator[FoundFile]:
        raise RuntimeError("server disconnected")
        yield

    monkeypatch.setattr(Storage, "find", find)
    with pytest.raises(DataError, match="s3://bucket/data: cannot be listed: server disconnected"):
        scan("s3://bucket/data", "text")
    with pytest.raises(RuntimeError):
        scan("data", "text")


@pytest.mark.parametrize("pattern", ["", "*.txt", "**/*.txt"])
def test_what_goes_while_its_folder_is_read_was_never_there(
    tree: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """Writers rename and delete what they have written under another name; a folder may go as well."""
    scandir = os.scandir

    @contextlib.contextmanager
    def vanishing(folder: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        def until_they_go(entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
            for entry in entries:
                if entry.name == "gone.txt":
                    os.unlink(entry.path)
                elif entry.name == "a":
                    shutil.rmtree(entry.path)
                yield entry

        with scandir(folder) as entries:
            yield until_they_go(entries)

    lines(tree / "gone.txt")
    monkeypatch.setattr("data_service.filesystems.os.scandir", vanishing)
    below = {"b/10.txt", "b/2.txt", *(["b/_temporary/3.txt"] if "**" in pattern else [])}
    assert set(names(scan(f"{tree}/{pattern}"), tree)) == {"0.txt", *(below if pattern != "*.txt" else ())}


def test_a_folder_that_may_not_be_read_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr("data_service.filesystems.os.scandir", refuse)
    with pytest.raises(DataError, match=r"cannot be listed: .*Permission denied.* Check the path and its permissions"):
        scan(str(tree))


def test_what_is_known_is_not_opened_again(tmp_path: Path) -> None:
    for name in "abc":
        lines(tmp_path / f"{name}.txt")
    before = scan(str(tmp_path / "a.txt"))
    known = scanning.KnownFiles(dict(before.paths_and_sizes()), str(tmp_path / "a.txt"))
    (tmp_path / "b.txt").write_text("")
    found = scan(str(tmp_path), known=known)
    assert [Path(path).name for path, _ in found.paths_and_sizes()] == ["b.txt", "c.txt"]
    assert known.seen == {str(tmp_path / "a.txt")}
    lines(tmp_path / "a.txt", 50)
    with pytest.raises(DataError, match=r"1 file whose size has changed since they were listed: .*a\.txt"):
        scan(str(tmp_path), known=known)


def test_few_files_are_scanned_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        lines(tmp_path / f"{number}.txt")
    monkeypatch.setattr(scanning, "AHEAD", 4)
    monkeypatch.setattr(scanning, "SAY_EVERY", 100)
    said: list[str] = []
    assert len(scan(str(tmp_path), say=said.append)) == 300
    assert said == [f"{n} of 300 files scanned" for n in (100, 200, 300)]


def test_a_scan_does_not_run_ahead_of_who_takes_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "AHEAD", 4)
    begun: list[str] = []

    class Reader:
        format = "text"

        def split(self, file: str, *sizes: int) -> list[Any]:
            begun.append(file)
            return []

    files = [FoundFile(str(number), 1, named=True) for number in range(100)]
    found = scanning._split_all(files, Reader(), (1, 1))  # type: ignore[arg-type]
    for number, (file, _) in enumerate(found):
        assert file is files[number]
        assert len(begun) <= number + 5


def test_large_shards_that_cannot_be_cut_are_said(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(1000)}), tmp_path / "a.parquet")
    said: list[str] = []
    assert len(scan(str(tmp_path), shard_records=10, say=said.append)) == 1
    assert "1 shard of more than 160 records" in said[0] and "convert" in said[0]


@pytest.mark.parametrize("wrong", [{"shard_records": 0}, {"shard_bytes": -1}, {"format": "xml"}])
def test_wrong_options(tree: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=f"{next(iter(wrong))}="):
        scan(str(tree), **wrong)


def test_types_are_settled_over_the_beginnings_of_files(tmp_path: Path) -> None:
    rows = ("1,x,,2026-01-01", "2.5,7,,2026-01-02", ",y,,2026-01-03")
    for number, row in enumerate(rows):
        (tmp_path / f"{number}.csv").write_text(f"n,s,none,day\n{row}\n")
    settled = settle_types(scan(str(tmp_path)))
    assert settled.types == {"n": "double", "s": "string", "none": "string", "day": "date32[day]"}
    assert FormatOptions.of(settled.plain()) == settled
    assert settle_types(scan(str(tmp_path)), ["n"]).types == {"n": "double"}
    given = settle_types(scan(str(tmp_path)), options=FormatOptions(types={"n": "float32"}))
    assert given.types["n"] == "float32"
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"b": [1], "a": null}\n')
    found = settle_types(scan(str(tmp_path / "?.jsonl"), columns=["a"]), ["a"])
    assert found.types == {"a": "int64"}


def test_the_readers_are_only_loaded_when_they_are_needed() -> None:
    program = "import data_service.scan, data_service.formats, data_service.filesystems, sys; print(*sys.modules)"
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"numpy", "pyarrow", "fsspec"} & set(finished.stdout.split()) == set()


def test_the_page_names_all_suffixes_and_options() -> None:
    page = (ROOT / "docs/data-formats.md").read_text()
    for suffix in (*SUFFIXES, *PACKED):
        assert f"`{suffix}`" in page
    for option in fields(FormatOptions):
        assert f"`{option.name}=" in page or option.name == "open_files"
    assert f"{scanning.MANY_FILES:,} files" in page and f"up to {scanning.SAMPLED_FILES} files" in page


def test_keys_of_json_lines_that_only_some_files_have(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"b": "x", "a": null}\n')
    manifest = scan(str(tmp_path))
    assert settle_types(manifest).types == {"a": "int64", "b": "string"}
