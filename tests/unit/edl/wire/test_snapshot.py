from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import CheckpointError
from edl.wire import snapshot
from edl.wire.snapshot import ELEMENT_BYTES, Layout, Leaf, Meta, SnapshotPlan, parse, plan

META = Meta(job="job", era=2, commit=7, round=3, shard=0, shards=1, framework="torch")
KINDS = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16,
    "I8": np.int8, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.bool_,
}  # fmt: skip


def leaf(name: str, kind: str, *shape: int) -> tuple[str, str, tuple[int, ...], int]:
    return name, kind, shape, math.prod(shape) * ELEMENT_BYTES[kind]


def filled(made: SnapshotPlan, contents: dict[str, bytes]) -> bytearray:
    buffer = bytearray(made.size)
    view = memoryview(buffer)
    made.write_header(view)
    for name, offset, size in made.leaves:
        view[offset : offset + size] = contents[name]
    return buffer


def small() -> bytearray:
    made = plan([leaf("b", "BOOL", 3), leaf("w", "F32", 2, 2), leaf("n", "I64")], META, {"x": {"$array": "w"}})
    return filled(made, {"b": b"\1\0\1", "w": np.arange(4, dtype=np.float32).tobytes(), "n": struct.pack("<q", 5)})


def changed(buffer: bytearray, edit: Any) -> bytes:
    """The same snapshot with another header."""
    start = snapshot.header_bytes(bytes(buffer))
    header = json.loads(buffer[8:start])
    edit(header)
    text = json.dumps(header).encode().ljust(start)
    return struct.pack("<Q", len(text)) + text + bytes(buffer[start:])


def edit_ours(**fields: Any) -> Any:
    def edit(header: Any) -> None:
        ours = json.loads(header["__metadata__"]["edl"])
        ours.update(fields)
        header["__metadata__"]["edl"] = json.dumps(ours)

    return edit


def test_reads_what_it_writes() -> None:
    buffer = small()
    found = parse(buffer, job="job")
    assert found.meta == META
    assert found.tree == {"x": {"$array": "w"}}
    entry = found.entries["w"]
    assert (entry.dtype, entry.shape) == ("F32", (2, 2))
    assert np.frombuffer(buffer, np.float32, 4, entry.offset).tolist() == [0, 1, 2, 3]


def test_arrays_are_aligned_to_their_elements() -> None:
    for entry in parse(small()).entries.values():
        assert entry.offset % ELEMENT_BYTES[entry.dtype] == 0


def test_order_does_not_depend_on_how_they_are_given() -> None:
    leaves = [leaf("b", "BOOL", 3), leaf("w", "F32", 2, 2), leaf("n", "I64")]
    one, other = plan(leaves, META, None), plan(leaves[::-1], META, None)
    assert one.header == other.header
    assert [name for name, _, _ in other.leaves] == ["n", "w", "b"]


def test_a_layout_is_good_for_many_commits() -> None:
    layout = Layout([Leaf(*leaf("w", "F32", 2))])
    for number in (9, 10, 10**9):
        made = layout.plan(META, {"step": number})
        assert parse(filled(made, {"w": bytes(8)})).tree == {"step": number}


def test_a_layout_confuses_no_value_with_that_of_the_commit_before() -> None:
    """Also where Python says that they are equal, and where a part goes and comes again."""
    layout, fresh = Layout([]), {"format": 0}
    for value in (1, 1.0, True, 0.0, -0.0, "1", None, [1, 2], [1, [2]], [True, 2], {"a": 1}, {"a": 1.0}, {}, 1, 1.0):
        for tree in ({"values": {"x": value, "y": 7}}, {"values": {"y": 7}}, {"values": value}, value, {"x": [fresh]}):
            made = layout.plan(META, tree)
            assert made.header == plan([], META, tree).header
            assert repr(parse(filled(made, {})).tree) == repr(tree)


def test_nothing_but_a_structure() -> None:
    made = plan([], META, {"epoch": 3})
    assert parse(filled(made, {})).tree == {"epoch": 3}


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(
        st.lists(st.text(min_size=1, max_size=12).filter(lambda n: n != "__metadata__"), unique=True, max_size=8)
    )
    found: dict[str, Any] = {}
    for name in names:
        kind = draw(st.sampled_from(sorted(KINDS)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        found[name] = (np.arange(math.prod(shape)) % 2).astype(KINDS[kind]).reshape(shape)
    return found


def snapshot_of(values: dict[str, Any]) -> bytearray:
    names = {np.dtype(kind): name for name, kind in KINDS.items()}
    leaves = [(name, names[value.dtype], value.shape, value.nbytes) for name, value in values.items()]
    return filled(
        plan(leaves, META, {"any": ["thing", None]}), {name: value.tobytes() for name, value in values.items()}
    )


@settings(max_examples=100)
@given(arrays())
def test_the_library_reads_ours(values: dict[str, Any]) -> None:
    buffer = snapshot_of(values)
    assert set(parse(buffer).entries) == set(values)
    read = safetensors.numpy.load(bytes(buffer))
    assert read.keys() == values.keys()
    for name, value in values.items():
        assert read[name].dtype == value.dtype and np.array_equal(read[name], value)


@settings(max_examples=50)
@given(arrays())
def test_ours_reads_the_librarys(values: dict[str, Any]) -> None:
    ours = json.dumps({"format": 1, "tree": None, **{name: getattr(META, name) for name in META.__slots__}})
    data = safetensors.numpy.save(values, {"edl": ours})
    found = parse(data)
    assert found.meta == META
    for name, value in values.items():
        entry = found.entries[name]
        assert entry.shape == value.shape
        assert data[entry.offset : entry.offset + entry.size] == value.tobytes()


def test_the_library_reads_the_file(tmp_path: Any) -> None:
    path = tmp_path / snapshot.FILE_NAME
    path.write_bytes(small())
    with safetensors.safe_open(path, framework="numpy") as file:
        assert json.loads(file.metadata()["edl"])["commit"] == 7


def test_every_truncation_is_noticed() -> None:
    buffer = bytes(small())
    for length in range(len(buffer)):
        with pytest.raises(CheckpointError):
            parse(buffer[:length])
    with pytest.raises(CheckpointError, match="truncated: its arrays end at byte"):
        parse(buffer[:-1])
    with pytest.raises(CheckpointError, match="damaged: its arrays end"):
        parse(buffer + b"x")


@settings(max_examples=300)
@given(st.data())
def test_no_bytes_lead_to_another_error(data: st.DataObject) -> None:
    buffer = small()
    for _ in range(data.draw(st.integers(1, 4))):
        buffer[data.draw(st.integers(0, len(buffer) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = parse(buffer)
    except CheckpointError:
        return
    for entry in found.entries.values():
        assert 0 <= entry.offset <= entry.offset + entry.size <= len(buffer)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (edit_ours(format=2), "format 2, this edl reads format 1"),
        (edit_ours(job="other"), "belongs to job 'other', this is job 'job': give each job"),
        (edit_ours(shard=1), "shard 1 of 1"),
        (edit_ours(commit=-1), "damaged"),
        (edit_ours(commit=True), "damaged"),
        (edit_ours(job=5), "damaged"),
        (lambda h: h.pop("__metadata__"), "not one of edl"),
        (lambda h: h.update(__metadata__={"edl": "{"}), "not valid JSON of a snapshot"),
        (lambda h: h.update(__metadata__=None), "not valid JSON of a snapshot"),
        (lambda h: h["w"].update(data_offsets=[0, 16]), "'w' at byte .* overlaps array 'n'"),
        (lambda h: h["w"].update(data_offsets=[9, 25]), "leaves a gap"),
        (lambda h: h["w"].update(shape=[2, 3]), "'w' is invalid"),
        (lambda h: h["w"].update(shape=[-2, -2]), "'w' is invalid"),
        (lambda h: h["w"].update(dtype="F33"), "'w' is invalid"),
        (lambda h: h.update(w=None), "'w' is invalid"),
        (lambda h: h.pop("n"), "leaves a gap after the header"),
    ],
)
def test_what_is_wrong_is_said(edit: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse(changed(small(), edit), job="job")


def test_a_header_without_end_is_not_read() -> None:
    with pytest.raises(CheckpointError, match="header would be"):
        parse(struct.pack("<Q", 1 << 60) + bytes(100))


def test_a_header_that_others_could_not_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The safetensors library limits its length, without the eight bytes before it."""
    made = plan([leaf("w", "F32", 2)], META, {"numbers": [1] * 500})
    length = len(made.header) - snapshot.HEADER_BYTES
    monkeypatch.setattr(snapshot, "_LARGEST_HEADER", length)
    assert plan([leaf("w", "F32", 2)], META, {"numbers": [1] * 500}).header == made.header
    assert parse(filled(made, {"w": bytes(8)})).tree == {"numbers": [1] * 500}
    monkeypatch.setattr(snapshot, "_LARGEST_HEADER", length - 1)
    with pytest.raises(CheckpointError, match="keep large lists of numbers as arrays"):
        plan([leaf("w", "F32", 2)], META, {"numbers": [1] * 500})
    with pytest.raises(CheckpointError, match=f"header would be {length} bytes"):
        parse(filled(made, {"w": bytes(8)}))


def test_impossible_plans() -> None:
    with pytest.raises(CheckpointError, match=r"two arrays .* 'w'"):
        plan([leaf("w", "F32"), leaf("w", "F32")], META, None)
    with pytest.raises(CheckpointError, match="__metadata__"):
        plan([leaf("__metadata__", "F32")], META, None)
    with pytest.raises(CheckpointError, match="elements of type C128"):
        plan([("w", "C128", (1,), 16)], META, None)
    with pytest.raises(CheckpointError, match="does not take 5 bytes"):
        plan([("w", "F32", (1,), 5)], META, None)


def test_a_folder_has_the_same_name_everywhere() -> None:
    assert snapshot.folder_name(era=3, commit=12) == "commit-0000000012.era-0000000003"
