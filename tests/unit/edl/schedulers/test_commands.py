"""Programs of schedulers on a host that lacks something for the moment."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import tempfile
from typing import Any, NoReturn

import pytest

from edl.errors import SchedulerError
from edl.schedulers.commands import CommandFailed, call


def failure(*command: str) -> SchedulerError:
    with pytest.raises(SchedulerError) as raised:
        asyncio.run(call(command, 60))
    return raised.value


def refusing(number: int) -> Any:
    def refused(*_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_what_the_host_lacks_now_it_may_have_later(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", refusing(number))
    found = failure("squeue", "--me")
    assert found.retry
    assert str(found) == f"squeue cannot be started: {os.strerror(number)}"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_no_file_for_the_output(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refusing(number))
    found = failure("squeue", "--me")
    assert found.retry
    assert "squeue cannot be started" in str(found)


def test_no_disk_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose output a full disk has cut off would seem to list fewer nodes."""
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    assert asyncio.run(call(["cat"], 60, written="3 nodes\n")) == "3 nodes\n"


def test_output_without_an_end_is_cut_off() -> None:
    found = failure("yes")
    assert found.retry
    assert str(found) == "yes printed more than 4 MiB"


def test_a_program_that_is_not_there_will_not_come() -> None:
    assert not failure("/no/such/program").retry
    assert isinstance(failure("false"), CommandFailed)
