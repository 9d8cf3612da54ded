"""Which workers a template is good for, and what they get from it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from edl.worker.replay import ALL_NAMES
from edl.worker.template import fits, with_writes

OURS = {"RANK": "0", "PORT": "1"}


@pytest.mark.parametrize(
    ("reads", "theirs", "expected"),
    [
        ((), {}, True),
        (("RANK",), {"RANK": "0", "PORT": "2"}, True),
        (("RANK",), {"RANK": "1", "PORT": "1"}, False),
        (("RANK", "ABSENT"), {"RANK": "0", "ABSENT": "1"}, False),
        ((ALL_NAMES,), {"RANK": "1", "PORT": "2"}, True),
        ((ALL_NAMES,), {"RANK": "0", "PORT": "1", "MORE": ""}, False),
        ((ALL_NAMES, "RANK"), {"RANK": "1", "PORT": "1"}, False),
    ],
)
def test_a_template_fits_where_its_modules_would_have_read_the_same(
    reads: tuple[str, ...], theirs: Mapping[str, str], expected: bool
) -> None:
    assert fits(reads, OURS, theirs) is expected


def test_a_worker_gets_what_modules_have_set_unless_it_has_its_own_value() -> None:
    writes = {"MODE": "quick", "PORT": "9", "GONE": None}
    assert with_writes({"RANK": "1", "PORT": "2", "GONE": "x"}, {**OURS, "GONE": "x"}, writes) == {
        "RANK": "1",
        "PORT": "2",
        "MODE": "quick",
    }
