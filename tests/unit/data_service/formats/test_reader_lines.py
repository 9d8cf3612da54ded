"""Readers of CSV, JSON lines and text: where lines end, and what is in them."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from data_service.formats import open_reader
from data_service.formats.options import FormatOptions
from data_service.scan import scan
from edl.errors import DataError, SettingError
from tests.support.reader_files import ROWS, read_all, write_csv, write_jsonl


@pytest.mark.parametrize("shard_bytes", [1, 20, 64, 1000, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_is_cut_between_lines(tmp_path: Path, shard_bytes: int, end: str) -> None:
    rows = 60 if shard_bytes < 100 else ROWS
    write_csv(tmp_path / "a.csv", rows, end)
    write_csv(tmp_path / "b.csv", rows, end)
    manifest = scan(str(tmp_path), shard_bytes=shard_bytes)
    found = read_all(manifest)
    assert found.column("id").to_pylist() == 2 * list(range(rows))
    assert found.column("x").to_pylist() == 2 * [i / 2 for i in range(rows)]
    assert found.column("text").to_pylist() == 2 * [f"zeile {i} ü" for i in range(rows)]
    if shard_bytes == 1:
        assert len(manifest) == 2 * rows
    assert read_all(manifest, ["text", "id"]).column_names == ["text", "id"]


@pytest.mark.parametrize("shard_bytes", [1, 64, 1000, 1 << 20])
def test_json_lines_are_cut_between_lines(tmp_path: Path, shard_bytes: int) -> None:
    rows = 60 if shard_bytes < 100 else ROWS
    write_jsonl(tmp_path / "a.jsonl", rows)
    found = read_all(scan(str(tmp_path / "a.jsonl"), shard_bytes=shard_bytes))
    assert found.column("id").to_pylist() == list(range(rows))
    assert found.column("text").to_pylist() == [f"zeile {i} ü" for i in range(rows)]
    assert read_all(scan(str(tmp_path / "a.jsonl")), ["x"]).column_names == ["x"]


@pytest.mark.parametrize("shard_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"a\nb\nc\n", ["a", "b", "c"]),
        (b"a\nb\nc", ["a", "b", "c"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\n\n", ["", ""]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"\r\r\n", ["\r"]),
        ("ä\n漢字\n\U0001f600 é\n".encode(), ["ä", "漢字", "\U0001f600 é"]),
        (b"\xef\xbb\xbfa\nb\n", ["a", "b"]),
        ("a\x0bb\u2028c\x85d\n".encode(), ["a\x0bb\u2028c\x85d"]),
    ],
)
def test_text_lines(tmp_path: Path, content: bytes, lines: list[str], shard_bytes: int) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert read_all(scan(str(tmp_path / "a.txt"), shard_bytes=shard_bytes)).column("text").to_pylist() == lines


def test_a_long_line_is_one_shard(tmp_path: Path) -> None:
    lines = ["x" * 200_000, "y" * 3000, "z" * 3_000_000]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    manifest = scan(str(tmp_path / "a.txt"), shard_bytes=1000)
    assert len(manifest) == 3
    assert read_all(manifest).column("text").to_pylist() == lines


def test_text_that_is_not_utf8_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"gut\nsch\xf6n\n")
    with pytest.raises(DataError, match=r"a\.txt, shard 0 \[0, 10\): does not fit: .*0xf6 in position 7"):
        read_all(scan(str(tmp_path / "a.txt")))


@pytest.mark.parametrize(
    "content",
    [b"a,b\n", b"a,b", b"\xef\xbb\xbfa,b\r\n"],
)
def test_a_csv_of_a_header_has_no_shards(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    said: list[str] = []
    manifest = scan(str(tmp_path / "a.csv"), say=said.append)
    assert (len(manifest), len(manifest.files)) == (0, 1)
    assert "without records" in said[0] and "a.csv" in said[0]
    assert open_reader("csv").schema(str(tmp_path / "a.csv")).names == ["a", "b"]


def test_csv_without_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1;x\n2;y")
    options = FormatOptions(header=False, names=("n", "s"), delimiter=";")
    manifest = scan(str(tmp_path / "a.csv"), options=options, shard_bytes=1)
    assert len(manifest) == 2
    assert read_all(manifest, options=options).to_pylist() == [{"n": 1, "s": "x"}, {"n": 2, "s": "y"}]
    unnamed = FormatOptions(header=False, delimiter=";")
    assert read_all(manifest, options=unnamed).column_names == ["f0", "f1"]


def test_tabs_by_the_name_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('a\t"b,c"\n1\t2,3\n')
    assert read_all(scan(str(tmp_path / "a.tsv"))).to_pylist() == [{"a": 1, "b,c": "2,3"}]


@pytest.mark.parametrize("shard_bytes", [1, 30, 1 << 20])
def test_newlines_between_quotes_are_refused_with_advice(tmp_path: Path, shard_bytes: int) -> None:
    rows = "".join(f'{i},"one\ntwo {i}"\n' if i % 7 == 3 else f"{i},plain\n" for i in range(50))
    (tmp_path / "a.csv").write_text("id,text\n" + rows)
    with pytest.raises(DataError, match=r"a\.csv.*newline between quotes.*quoted_newlines=True"):
        scan(str(tmp_path / "a.csv"), shard_bytes=shard_bytes)


def test_newlines_between_quotes_far_behind_the_beginning_are_found_when_read(tmp_path: Path) -> None:
    plain = "".join(f"{i},plain\n" for i in range(200_000))
    (tmp_path / "a.csv").write_text("id,text\n" + plain + '7,"one\ntwo"\n8,plain\n')
    manifest = scan(str(tmp_path / "a.csv"), shard_bytes=1 << 20)
    with pytest.raises(DataError, match=r"a\.csv, shard 2 .*newline between quotes"):
        read_all(manifest)


def test_newlines_between_quotes_on_request(tmp_path: Path) -> None:
    texts = [f'he said ""{i}""\nand left' if i % 2 else f"plain {i}" for i in range(100)]
    lines = ['id,"te\nxt"', *(f'{i},"{text}"' for i, text in enumerate(texts))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    options = FormatOptions(quoted_newlines=True)
    manifest = scan(str(tmp_path / "a.csv"), shard_bytes=100, options=options)
    assert len(manifest) == 1
    found = read_all(manifest, options=options)
    assert found.column("te\nxt").to_pylist() == [text.replace('""', '"') for text in texts]


def test_quotes_that_are_characters_like_others(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,size\n1,5"\n2,6"\n')
    with pytest.raises(DataError, match='quote=""'):
        scan(str(tmp_path / "a.csv"))
    options = FormatOptions(quote="")
    assert read_all(scan(str(tmp_path / "a.csv"), options=options), options=options).column("size").to_pylist() == [
        '5"',
        '6"',
    ]


def test_types_of_csv_are_those_of_its_beginning_or_given(tmp_path: Path) -> None:
    lines = ["n,m", *(f"{i}," for i in range(300_000)), "0.5,x"]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    manifest = scan(str(tmp_path / "a.csv"))
    with pytest.raises(DataError, match=r"a\.csv, shard 0 .*int64.*'0\.5'.*types"):
        read_all(manifest)
    found = read_all(manifest, options=FormatOptions(types={"n": "float64"}))
    assert found.schema.field("m").type == pa.string()  # nothing was found at the beginning
    assert found.column("n")[-1].as_py() == 0.5
    with pytest.raises(SettingError, match="is not a pyarrow type"):
        open_reader("csv", options=FormatOptions(types={"n": "flaot"}))


def test_a_line_of_csv_with_another_number_of_values(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n" + "1,2\n" * 400_000 + "1,2,3\n")
    manifest = scan(str(tmp_path / "a.csv"), shard_bytes=1 << 20)
    with pytest.raises(DataError, match=r"a\.csv, shard 1 .*Expected 2 columns, got 3"):
        read_all(manifest)


def test_keys_of_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1, "when": "2026-01-01"}\n{"a": null}\n\n{}\n')
    found = read_all(scan(str(tmp_path / "a.jsonl")))
    assert found.to_pylist() == [{"a": 1, "when": "2026-01-01"}, {"a": None, "when": None}, {"a": None, "when": None}]
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n' * 200_000 + '{"a": 2, "b": 1}\n')
    manifest = scan(str(tmp_path / "b.jsonl"))
    with pytest.raises(DataError, match=r"b\.jsonl, shard 0 .*unexpected field"):
        read_all(manifest)
    assert read_all(manifest, ["a"]).num_rows == 200_001  # who names columns does not want the others


def test_invalid_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be parsed as JSON lines"):
        scan(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lambda data: pa.compress(data, "zstd", asbytes=True)])
def test_packed_files_are_one_shard(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    suffix = {gzip.compress: ".gz", bz2.compress: ".bz2"}.get(pack, ".zst")
    write_csv(tmp_path / "a.csv")
    (tmp_path / f"b.csv{suffix}").write_bytes(pack((tmp_path / "a.csv").read_bytes()))
    if suffix == ".zst":
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write((tmp_path / "a.csv").read_bytes())
        (tmp_path / f"b.csv{suffix}").write_bytes(sink.getvalue())
    manifest = scan(str(tmp_path / f"b.csv{suffix}"), shard_bytes=100)
    assert len(manifest) == 1
    assert read_all(manifest).equals(read_all(scan(str(tmp_path / "a.csv"))))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_are_read_in_blocks_that_end_between_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("data_service.formats.lines.BLOCK_BYTES", 37)
    monkeypatch.setattr("data_service.formats.lines.HEAD_BYTES", 5)
    texts = [f'a "{i}"\nb,\r\n{"c" * (i % 50)}' for i in range(60)]
    lines = [
        '"the\nnumber",text',
        *(f'{i},"{text}"' for i, text in enumerate(text.replace('"', '""') for text in texts)),
    ]
    path = tmp_path / f"a.csv{suffix}"
    path.write_bytes((gzip.compress if suffix else bytes)("\n".join(lines).encode()))
    options = FormatOptions(quoted_newlines=True)
    manifest = scan(str(path), options=options)
    assert len(manifest) == 1
    assert len(list(open_reader("csv", options=options).pieces(manifest.ref(0)))) > 10
    found = read_all(manifest, options=options)
    assert found.column("the\nnumber").to_pylist() == list(range(60))
    assert found.column("text").to_pylist() == texts
