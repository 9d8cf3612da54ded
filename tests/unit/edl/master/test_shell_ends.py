"""The elected Master's shell: what the history says of a round, and how soon the end of a job is over."""

from __future__ import annotations

import dataclasses
from collections.abc import Coroutine, Sequence

from edl.denylist.plan import Author
from edl.denylist.shell import DenylistCompanion
from edl.master.shell import MasterShell
from edl.types import Round
from edl.watch.shell import JobWatch
from edl.watch.table import DEFAULT_LIMITS
from edl.watched_master import WatchedMaster
from edl.wire.messages import Finish, StartRound, WorkersDone
from tests.support.master_fixture import Agent, Bench, play, until
from tests.unit.edl.denylist.test_shell import MemoryPlace
from tests.unit.edl.master.test_shell import failure, running


def test_a_failure_is_of_its_round_even_if_the_next_one_forms_in_the_same_step() -> None:
    async def scenario(bench: Bench) -> None:
        _, _, agent = await running(bench)
        agent.say(failure())
        agent.ready(seen=1)  # heard at once
        await until(lambda: any(entry.round == 2 for entry in bench.history()))
        rounds = [entry.round for entry in bench.history() if entry.kind == "worker-failed"]
        assert rounds == [1], bench.history()

    play(scenario)


def test_the_end_does_not_wait_for_the_next_look_of_what_runs_beside_it() -> None:
    async def scenario(bench: Bench) -> None:
        place = MemoryPlace()
        place.look_s = 3600.0

        def beside(master: WatchedMaster) -> Sequence[Coroutine[None, None, None]]:
            author = Author("my-job", "run1", 0.0)
            denylist = DenylistCompanion(master, place, author, lambda: 0.0, bench.said.append, bench.clock)
            return JobWatch(master, DEFAULT_LIMITS, bench.clock, lambda *_: None).run(), denylist.run()

        shell = MasterShell(dataclasses.replace(bench.deps(), companions=beside), bench.crown())
        run = bench.start(shell.run())
        await until(lambda: shell.serving)
        agent = Agent(bench, shell, bench.register("a"))
        agent.attach()
        agent.ready()
        await agent.hears(StartRound)
        agent.say(WorkersDone(Round(1)))
        await agent.hears(Finish)
        agent.say(None)
        bench.store.revoke_now(agent.info.incarnation)
        await until(run.done)  # in turns of the event loop: no time passes
        assert shell.concluded.is_set()
        assert not [line for line in bench.said if "companion" in line]

    play(scenario)
