"""The elected Master's shell: a request is accepted when it is in the store, so that the next Master knows it too."""

from __future__ import annotations

import asyncio

import pytest

from edl.errors import FencedOut
from edl.types import Round
from edl.wire.messages import Asked, Underway
from edl.wire.purpose import Purpose
from tests.support.master_fixture import Bench, play, turns, until
from tests.unit.edl.master.test_shell import running


@pytest.mark.parametrize("purpose", [Purpose.KILL, Purpose.SAVE])
def test_a_request_is_answered_once_it_is_in_the_store(purpose: Purpose) -> None:
    async def scenario(bench: Bench) -> None:
        shell, _, agent = await running(bench)
        agent.say(Underway(Round(1), "in process"))
        await until(lambda: shell.status().nodes[0].underway)
        bench.store.available = False
        asking = asyncio.ensure_future(shell.ask(Asked(purpose, "kim")))
        await turns(200)
        assert not asking.done()
        bench.store.available = True
        assert (await asking).ok
        record = bench.record()
        assert record is not None
        assert "kim" in (record.kill if purpose is Purpose.KILL else record.owed)

    play(scenario)


def test_a_request_that_a_deposed_master_could_not_store_is_not_accepted() -> None:
    async def scenario(bench: Bench) -> None:
        shell, run, _ = await running(bench)
        bench.store.available = False
        asking = asyncio.ensure_future(shell.ask(Asked(Purpose.KILL, "kim")))
        await turns(200)
        bench.store.available = True
        bench.crown()
        with pytest.raises(FencedOut):
            await run
        with pytest.raises(FencedOut):
            await asking
        with pytest.raises(FencedOut):
            await shell.ask(Asked(Purpose.KILL, "kim"))
        record = bench.record()
        assert record is not None
        assert record.kill == ""

    play(scenario)
