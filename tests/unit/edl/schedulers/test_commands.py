"""Programs of schedulers on a host that lacks something for the moment."""

from __future__ import annotations

import asyncio
import errno
import os
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
    monkeypatch.setattr(asyncio, "create_subprocess_exec", refusing(number))
    found = failure("squeue", "--me")
    assert found.retry
    assert str(found) == f"squeue cannot be started: {os.strerror(number)}"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC])
def test_no_file_for_the_output(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", refusing(number))
    found = failure("squeue", "--me")
    assert found.retry
    assert "squeue cannot be started" in str(found)


def test_a_program_that_is_not_there_will_not_come() -> None:
    assert not failure("/no/such/program").retry
    assert isinstance(failure("false"), CommandFailed)
