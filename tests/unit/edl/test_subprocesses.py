"""Programs that asyncio has started and cannot wait for."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import asyncio.unix_events
import errno
import os
import sys
from typing import Any, NoReturn

import psutil
import pytest

from edl.subprocesses import start_program
from tests.support.waiting import play, until

PIPE = asyncio.subprocess.PIPE
WAITS = (sys.executable, "-S", "-c", "input()")


def children() -> list[psutil.Process]:
    found = psutil.Process().children()
    return [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_it_is_like_that_of_asyncio() -> None:
    async def scenario() -> None:
        process = await start_program(sys.executable, "-S", "-c", "print(input())", stdin=PIPE, stdout=PIPE)
        assert process.stderr is None, "it is inherited"
        printed, _ = await process.communicate(b"a line\n")
        assert printed == b"a line\n"
        assert process.returncode == 0

    play(scenario())


@pytest.mark.parametrize(
    ("error", "number"),
    [
        pytest.param(RuntimeError("can't start new thread"), errno.EAGAIN, id="a thread"),
        pytest.param(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), errno.EMFILE, id="a descriptor"),
    ],
)
@pytest.mark.parametrize("pipes", [{"stdin": PIPE, "stdout": PIPE}, {}], ids=["piped", "not piped"])
def test_a_program_that_nobody_can_wait_for_is_ended(
    error: Exception, number: int, pipes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_left(*_: Any) -> NoReturn:
        raise error

    for name in ("ThreadedChildWatcher", "PidfdChildWatcher", "_ThreadedChildWatcher", "_PidfdChildWatcher"):
        watcher = getattr(asyncio.unix_events, name, None)
        if watcher is not None:
            monkeypatch.setattr(watcher, "add_child_handler", nothing_left)

    async def scenario() -> None:
        before = {child.pid for child in children()}
        with pytest.raises(OSError) as raised:
            await start_program(*(WAITS if pipes else ("sleep", "600")), **pipes)
        assert raised.value.errno == number
        assert {child.pid for child in children()} - before, "it runs already"
        await until(lambda: not {child.pid for child in children()} - before)

    play(scenario())
