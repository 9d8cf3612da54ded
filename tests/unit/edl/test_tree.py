from __future__ import annotations

import enum
import gc
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import StateError
from edl.worker import tree
from tests.support.fake_agent import NumpyArrays, Tensor

IS_ARRAY = NumpyArrays().is_array


def round_trip(value: Any) -> Any:
    flat, leaves = tree.flatten(value, IS_ARRAY, "x")
    arrays = dict(leaves)
    assert len(arrays) == len(leaves)
    text = json.dumps(flat, allow_nan=False)
    return tree.unflatten(json.loads(text), lambda name, is_numpy: arrays[name])


keys = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
of_numpy = st.one_of(
    st.floats(width=32).map(np.float32), st.floats().map(np.float64), st.integers(-9, 9).map(np.int16),
    st.booleans().map(np.bool_), st.text(max_size=3).map(np.str_),
)  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5),
    st.binary(max_size=5).map(bytearray), of_numpy,
)  # fmt: skip
leaves = st.builds(lambda n: Tensor(np.arange(n)), st.integers(0, 3))
values = st.recursive(
    scalars | leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda parts: deque(parts, 5))
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=4).map(lambda parts: defaultdict(list, parts))
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=15,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@settings(max_examples=400)
@given(values)
def test_everything_comes_back_as_it_was(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize("text", ["", "\0", "a\0", "\0ä\0\0", "\ud800"])
def test_texts_of_numpy_keep_the_nuls_at_their_end(text: str) -> None:
    for value in (np.str_(text), np.bytes_(text.encode(errors="surrogatepass"))):
        back = round_trip(value)
        assert type(back) is type(value)
        assert (len(back), back.dtype, back) == (len(value), value.dtype, value)


def test_names_are_paths() -> None:
    tensor = Tensor(0)
    state = {"layer1.weight": tensor, "state": {0: {"exp_avg": tensor}, 1: [tensor, (tensor,)]}}
    _, found = tree.flatten(state, IS_ARRAY, "model")
    assert [name for name, _ in found] == [
        "model.layer1.weight", "model.state.0.exp_avg", "model.state.1.0", "model.state.1.1.0",
    ]  # fmt: skip
    assert tree.flatten(tensor, IS_ARRAY, "lonely")[1][0][0] == "lonely"


def test_names_are_unique() -> None:
    state: dict[Any, Any] = {"a.b": Tensor(1), "a": {"b": Tensor(2)}, 0: Tensor(3), "0": Tensor(4), "a.b#2": Tensor(5)}
    _, found = tree.flatten(state, IS_ARRAY)
    assert len({name for name, _ in found}) == 5
    assert round_trip(state) == state


def test_names_are_readable() -> None:
    _, found = tree.flatten({"\ud800\n": Tensor(1), "Gewicht für ö": Tensor(2)}, IS_ARRAY, "m")
    assert [name for name, _ in found] == ["m.\\d800\\a", "m.Gewicht für ö"]


def test_keys_that_look_like_ours() -> None:
    states: list[Any] = [{"$array": "x"}, {"$tuple": [1], "b": 2}, {"b": 2, "$tuple": [1]}, {"$": {}}, {"": {}}]
    for state in states:
        assert round_trip(state) == state


def test_dicts_and_lists_are_plain_json() -> None:
    flat, _ = tree.flatten({"a": Tensor(1), "b": {"c": [1, 2]}}, IS_ARRAY, "m")
    assert flat == {"a": {"$array": "m.a"}, "b": {"c": [1, 2]}}


def test_numpy_comes_back_as_numpy() -> None:
    flat, _ = tree.flatten({"a": np.zeros(2), "b": Tensor(1)}, IS_ARRAY)
    assert flat == {"a": {"$numpy": "a"}, "b": {"$array": "b"}}
    assert round_trip([np.int64(3), np.float32(0.5), np.bool_(True), np.float64("nan")])[:3] == [3, 0.5, True]


@pytest.mark.parametrize("factory", [None, int, list, dict, set, Counter, OrderedDict])
def test_a_defaultdict_goes_on_making_values(factory: Any) -> None:
    found = round_trip(defaultdict(factory, {1: 2}))
    assert type(found) is defaultdict and found.default_factory is factory


def test_a_known_type_comes_back() -> None:
    class Size(tuple[int, ...]):
        pass

    tree.know("test.Size", Size, list, Size)
    found = round_trip({"size": Size((1, 2))})
    assert type(found["size"]) is Size and found["size"] == (1, 2)


def test_snapshots_of_an_older_edl_are_read() -> None:
    """It wrote plain dicts for all kinds of them, and ``bytes`` for both kinds of bytes."""
    old = {"a": {"$tuple": [1, {"$float": "nan"}]}, "b": {"$dict": [[0, {"$bytes": "YQ=="}]]}, "c": {"$numpy": "c"}}
    found = tree.unflatten(old, lambda name, is_numpy: (name, is_numpy))
    assert math.isnan(found["a"][1]) and found["b"] == {0: b"a"} and found["c"] == ("c", True)


@pytest.mark.parametrize("tag", [{"$scalar": ["O", ""]}, {"$scalar": ["V8", ""]}, {"$defaultdict": ["eval", []]}])
def test_a_snapshot_cannot_ask_for_other_types(tag: Any) -> None:
    with pytest.raises(StateError, match="does not know"):
        tree.unflatten(tag, lambda name, is_numpy: None)


def test_a_walk_leaves_nothing_to_collect() -> None:
    gc.collect()
    gc.disable()
    try:
        tree.walk({"a": [Tensor(0), OrderedDict(b=(1, 2))]}, IS_ARRAY, "m")
        assert not gc.collect()
    finally:
        gc.enable()


class Words(list[str]):
    pass


class Table(OrderedDict[str, int]):
    pass


class Ratio(float):
    pass


class Pair(NamedTuple):
    first: int
    second: int


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"order": {1, 2}}, "state.sampler.order: a set cannot be kept; use a list"),
        ([0, {"f": len}], r"state.sampler.1.f: a builtin_function_or_method cannot be kept; it must be None, bool"),
        ({"c": Color.RED}, "state.sampler.c: a tests.unit.edl.test_tree.Color cannot be kept; use its plain value"),
        ({"p": Pair(1, 2)}, "state.sampler.p: a .*Pair cannot be kept; use a plain tuple or a dict"),
        ({(1, 2): 3}, r"state.sampler: a dict with a key of type tuple \(\(1, 2\)\) cannot be kept"),
        ({"a": 1j}, "state.sampler.a: a complex cannot"),
        ({"w": Words()}, "state.sampler.w: a .*Words cannot be kept; it would come back as a plain list"),
        ([Table(a=1)], "state.sampler.0: a .*Table cannot be kept; it would come back as a plain dict"),
        ({"r": Ratio(1)}, "state.sampler.r: a .*Ratio cannot be kept; it would come back as a plain float"),
        ({"d": defaultdict(lambda: 1)}, r"state.sampler.d: a defaultdict .*<lambda>.* it may use bool, int"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_named(value: Any, said: str) -> None:
    with pytest.raises(StateError, match=said):
        tree.flatten(value, IS_ARRAY, "sampler")


def test_a_structure_that_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateError, match="does it contain itself"):
        tree.flatten(loop, IS_ARRAY, "x")


def test_a_tag_of_a_newer_edl() -> None:
    with pytest.raises(StateError, match=r"\$complex"):
        tree.unflatten([{"$complex": [1, 2]}], lambda name, is_numpy: None)


def test_map_arrays_leaves_the_rest() -> None:
    value = {"a": [Tensor(1), (2, Tensor(3))], "b": "x"}
    kinds: list[Any] = [OrderedDict(a=Tensor(1)), defaultdict(list, a=Tensor(1)), deque([Tensor(1)], 3), Counter("a")]
    assert [type(one) for one in tree.map_arrays(kinds, IS_ARRAY, lambda one: one)] == [type(one) for one in kinds]
    changed = tree.map_arrays(value, IS_ARRAY, lambda one: Tensor(one.data + 1))
    assert changed == {"a": [Tensor(2), (2, Tensor(4))], "b": "x"}
    assert value["a"][0] == Tensor(1)
