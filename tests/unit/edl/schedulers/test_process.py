"""``--scheduler=process`` recognises launchers by their start times."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from edl.errors import SchedulerError
from edl.schedulers.deps import SchedulerDeps
from edl.schedulers.process import ProcessScheduler, started_at
from tests.support.named_process import CUT_NAME, process_named


def test_another_process_has_the_pid_and_any_name() -> None:
    with process_named(CUT_NAME) as pid:
        assert started_at(pid).isdecimal()
    assert started_at(pid) == ""


@pytest.mark.parametrize("name", ["read_bytes", "read_text"])
def test_without_a_descriptor_no_launcher_counts_as_dead(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file would be deleted, another one started in its place, and the node id would be taken."""

    class Deps:
        runtime_folder = tmp_path

        def beside(self) -> dict[int, str]:
            return {}

    def refused(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    fields = {"node": "a-p1", "index": 1, "pid": os.getpid(), "since": started_at(os.getpid()), "starting": False}
    note = tmp_path / "1.json"
    note.write_text(json.dumps(fields))
    scheduler = ProcessScheduler(cast(SchedulerDeps, Deps()))
    with monkeypatch.context() as lacking:
        lacking.setattr(Path, name, refused)
        with pytest.raises(SchedulerError, match="cannot look at the launchers on this host: Too many open") as raised:
            asyncio.run(scheduler.current())
    assert raised.value.retry
    assert asyncio.run(scheduler.current()).nodes == 1 and note.exists()
