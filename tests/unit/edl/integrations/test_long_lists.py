"""Long lists of integers in a state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.integrations.long_lists import pack, unpack

values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers(), min_size=30, max_size=70),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@given(values)
def test_nothing_is_changed_on_the_way_there_and_back(value: Any) -> None:
    assert unpack(pack(value)) == value


@pytest.mark.parametrize("value", [list(range(31)), [True] * 50, [*range(50), 2**63], [*range(50), 1.0]])
def test_other_lists_stay_lists(value: Any) -> None:
    assert pack({"a": value}) == {"a": value}
    assert all(type(one) is type(other) for one, other in zip(pack(value), value, strict=True))


def test_a_long_list_is_one_array() -> None:
    (packed,) = pack([list(range(1000))])
    (array,) = packed.values()
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.int64
