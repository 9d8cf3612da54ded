"""``--scheduler=process`` recognises launchers by their start times."""

from __future__ import annotations

from edl.schedulers.process import started_at
from tests.support.named_process import CUT_NAME, process_named


def test_another_process_has_the_pid_and_any_name() -> None:
    with process_named(CUT_NAME) as pid:
        assert started_at(pid).isdecimal()
    assert started_at(pid) == ""
