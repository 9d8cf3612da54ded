"""The table of watchdogs, its options and its page."""

from __future__ import annotations

import math

import pytest

from edl.errors import SettingError
from edl.launch.options.watching import limits_from
from edl.watch import disks, job
from edl.watch.raising import BLIND
from edl.watch.table import STRAGGLER, WATCHDOGS, WatchLimits, markdown
from tests.unit.test_house_rules import ROOT


def test_every_watchdog_has_a_row_and_every_row_a_watchdog() -> None:
    assert {one.name for one in WATCHDOGS} == {*disks.NAMES, *job.NAMES, STRAGGLER, BLIND}


def test_the_page_has_the_table() -> None:
    assert markdown() in (ROOT / "docs" / "notifications.md").read_text()


def test_limits_from_the_command_line() -> None:
    limits = limits_from("--watch", "disk-space=50G, waiting=off,no-progress=5")
    assert (limits.of("disk-space"), limits.of("no-progress")) == (50 * 2**30, 5)
    assert not limits.on("waiting")
    assert limits.of("store") == WatchLimits().of("store")
    assert limits_from("--watch", "") == WatchLimits()
    assert not any(limits_from("--watch", "off").on(one.name) for one in WATCHDOGS)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("disk=1G", "--watch=disk=1G: there is no such watchdog. Possible: disk-space, "),
        ("waiting", "--watch=waiting: must be a number of s, 0 or more"),
        ("waiting=-1", "--watch=waiting=-1: must be a number of s, 0 or more"),
        ("waiting=nan", "--watch=waiting=nan: must be a number of s, 0 or more"),
        ("disk-space=many", "--watch=many: not an amount of memory"),
    ],
)
def test_bad_limits(text: str, error: str) -> None:
    with pytest.raises(SettingError) as raised:
        limits_from("--watch", text)
    assert str(raised.value).startswith(error)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        WatchLimits().of("nothing")
    assert math.isnan(WatchLimits().of("checkpoint-age"))
