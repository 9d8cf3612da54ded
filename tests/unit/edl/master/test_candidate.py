"""The election's shell: at most one Master at a time, known to all candidates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from edl.errors import StoreError, StoreFull, StoreRefused
from edl.master import candidate as candidate_module
from edl.master import guarded as guarded_module
from edl.master.candidate import Candidate, CandidateCallbacks
from edl.master.election import ElectionState, MasterInfo, Role
from edl.master.shell import MasterShell
from edl.ports import Condition, Delete, Operation, PrefixSnapshot, Put
from edl.tasks import end
from edl.types import FencingToken, Incarnation, NodeId
from edl.wire import plain
from edl.wire.messages import Finish
from tests.support.master_fixture import KEYS, TTL_S, Bench, play, turns, until


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_module, "RETRY_S", 0)
    monkeypatch.setattr(candidate_module, "CAMPAIGN_PAUSE_S", 0)


class Launcher:
    """A candidate that records its notifications."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.follows: list[tuple[str, FencingToken]] = []
        self.rules: list[MasterShell | None] = []
        self.outcomes: list[Finish] = []
        self.own = MasterInfo(NodeId(name), f"{name}.host", 5000)
        self.ended: list[Incarnation] = []
        callbacks = CandidateCallbacks(self._follow, self.rules.append, self.outcomes.append, self.ended.append)
        self.candidate = Candidate(bench.deps(name), self.own, callbacks)
        self.run = bench.start(self.candidate.run())
        self.lease = Incarnation(0)

    def _follow(self, master: MasterInfo, token: FencingToken) -> None:
        self.follows.append((master.node, token))

    def register(self, bench: Bench) -> None:
        self.lease = Incarnation(bench.store.grant_now(TTL_S))
        self.candidate.registered(self.lease)

    @property
    def rules_now(self) -> bool:
        return bool(self.rules) and self.rules[-1] is not None


async def two(bench: Bench) -> tuple[Launcher, Launcher]:
    """One that rules and one that follows."""
    first, second = Launcher(bench, "a"), Launcher(bench, "b")
    first.register(bench)
    await until(lambda: first.rules_now and bool(second.follows))
    second.register(bench)
    await turns()
    return first, second


class TestElection:
    def test_one_rules_and_all_follow(self) -> None:
        async def scenario(bench: Bench) -> None:
            launchers = [Launcher(bench, name) for name in "abc"]
            for launcher in launchers:
                launcher.register(bench)
            await until(lambda: all(launcher.follows for launcher in launchers))
            await turns()
            assert [launcher.rules_now for launcher in launchers].count(True) == 1
            (master,) = [launcher for launcher in launchers if launcher.rules_now]
            (entry,) = bench.store.read_now(KEYS.master).entries
            assert (entry.lease, plain.loads(MasterInfo, entry.value)) == (master.lease, master.own)
            assert {launcher.follows[-1] for launcher in launchers} == {
                (master.own.node, FencingToken(entry.create_revision))
            }

        play(scenario)

    def test_a_mistake_of_the_master_is_no_secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def mistaken(self: MasterShell) -> Finish:
            raise NameError("typo")

        async def scenario(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            assert isinstance(await bench.failure(launcher.run), NameError)

        monkeypatch.setattr(MasterShell, "run", mistaken)
        play(scenario)

    def test_who_has_no_lease_does_not_stand(self) -> None:
        async def scenario(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            await turns(200)
            assert launcher.rules == []
            assert bench.stored() == []

        play(scenario)

    def test_the_next_one_rules_when_the_lease_of_the_first_ends(self) -> None:
        async def scenario(bench: Bench) -> None:
            first, second = await two(bench)
            bench.store.revoke_now(first.lease)
            first.candidate.unregistered()
            await until(lambda: second.rules_now and first.follows[-1][0] == "b")
            assert not first.rules_now
            assert second.follows[-1][1] > first.follows[0][1]

        play(scenario)

    def test_a_campaign_on_an_ended_lease_tells_whom_it_belongs_to(self) -> None:
        """Its launcher may not have noticed: a slow store answers a campaign, and no renewal in time."""

        async def scenario(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            bench.store.revoke_now(launcher.lease)
            await until(lambda: bool(launcher.ended))
            assert set(launcher.ended) == {launcher.lease}
            assert launcher.rules == []
            launcher.register(bench)
            await until(lambda: launcher.rules_now)

        play(scenario)

    def test_a_new_lease_ends_the_pause_after_a_refused_campaign(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(candidate_module, "CAMPAIGN_PAUSE_S", 3600)
        monkeypatch.setattr(candidate_module, "LONGEST_CAMPAIGN_PAUSE_S", 3600)

        async def scenario(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            bench.store.revoke_now(launcher.lease)
            await until(lambda: bool(launcher.ended))
            await turns()
            launcher.register(bench)
            await until(lambda: launcher.rules_now)

        play(scenario)

    def test_a_master_whose_host_refuses_connections_is_replaced(self) -> None:
        async def scenario(bench: Bench) -> None:
            first, second = await two(bench)
            second.candidate.master_refused(second.follows[-1][1])
            await until(lambda: second.rules_now and not first.rules_now)
            await turns()  # what the watch tells late about the old key unseats nobody
            assert second.rules_now
            assert first.follows[-1] == second.follows[-1] == ("b", second.follows[-1][1])
            assert first.candidate.shell is None

        play(scenario)

    def test_an_old_hint_replaces_nobody(self) -> None:
        async def scenario(bench: Bench) -> None:
            first, second = await two(bench)
            second.candidate.master_refused(FencingToken(second.follows[-1][1] - 1))
            await turns()
            assert first.rules_now
            assert not second.rules_now

        play(scenario)

    def test_whoever_leaves_ends_its_term(self) -> None:
        async def scenario(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await until(lambda: launcher.rules_now)
            shell = launcher.candidate.shell
            assert shell is not None
            await until(lambda: shell.serving)
            launcher.run.cancel()
            await until(launcher.run.done)
            assert launcher.rules[-1] is None
            assert not shell.serving

        play(scenario)


class TestElectionWithoutStore:
    def test_a_campaign_without_an_answer_that_was_won_is_found_out(self) -> None:
        async def scenario(bench: Bench) -> None:
            bench.store.fail_after_writing = 1
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await until(lambda: launcher.rules_now and launcher.follows != [])
            (entry,) = bench.store.read_now(KEYS.master).entries
            assert launcher.follows == [("a", FencingToken(entry.create_revision))]
            assert entry.create_revision == entry.mod_revision  # it was not created a second time

        play(scenario)

    def test_one_of_whose_writes_only_the_repetitions_are_answered_is_won(self) -> None:
        """Their conditions fail, because the first attempts have come through. So it is with the Master's writes."""

        async def scenario(bench: Bench) -> None:
            async def twice(
                operations: Sequence[Operation], conditions: Sequence[Condition] = (), *, repeatable: bool = False
            ) -> int | None:
                done = bench.store.write_now(operations, conditions)
                return bench.store.write_now(operations, conditions) if repeatable else done

            bench.store.write = twice  # type: ignore[method-assign]
            old = bench.crown()
            launcher = Launcher(bench, "b")
            launcher.register(bench)
            await until(lambda: launcher.follows == [("a", old)])
            await turns()  # until its first campaign has ended
            launcher.candidate.master_refused(old)
            await until(lambda: launcher.candidate.shell is not None and launcher.candidate.shell.serving)
            (entry,) = bench.store.read_now(KEYS.master).entries
            assert launcher.follows[1:] == [("b", FencingToken(entry.create_revision))]
            assert bench.record() is not None
            assert len(launcher.rules) == 1, "it was elected once, and stays"

        play(scenario)

    def test_one_that_was_lost_is_tried_again(self) -> None:
        async def scenario(bench: Bench) -> None:
            bench.store.fail_writes = 3
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await until(lambda: launcher.rules_now)

        play(scenario)

    def test_it_begins_when_the_store_comes(self) -> None:
        async def scenario(bench: Bench) -> None:
            bench.store.available = False
            launcher = Launcher(bench, "a")
            launcher.candidate.registered(Incarnation(1))
            await turns(200)
            assert launcher.rules == []
            bench.store.available = True
            assert bench.store.grant_now(TTL_S) == 1
            await until(lambda: launcher.rules_now)

        play(scenario)

    def test_a_watch_that_lost_the_thread_begins_again(self) -> None:
        async def scenario(bench: Bench) -> None:
            follower = Launcher(bench, "b")
            await turns()
            bench.store.break_watches = [StoreError("compacted")]
            token = bench.crown()
            await until(lambda: bench.store.watches >= 2)
            await until(lambda: follower.follows == [("a", token)])
            assert not follower.run.done()

        play(scenario)

    def test_one_that_the_store_carries_out_after_all_is_not_left_without_a_master(self) -> None:
        """The key stands on the lease of a launcher that has given its campaign up: nobody else may take it."""

        async def scenario(bench: Bench) -> None:
            bench.crown()
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await until(lambda: launcher.follows != [])
            bench.store.break_watches = [StoreError("compacted")]  # so it does not see that nobody ruled in between
            bench.store.write_now([Delete(KEYS.master)])
            bench.store.write_now([Put(KEYS.master, plain.dumps(launcher.own), launcher.lease)])
            await until(lambda: launcher.rules_now)
            (entry,) = bench.store.read_now(KEYS.master).entries
            assert launcher.follows[-1] == ("a", FencingToken(entry.create_revision))

        play(scenario)

    def test_a_store_that_refuses_from_the_beginning_ends_the_launcher(self) -> None:
        async def scenario(bench: Bench) -> None:
            async def refuse(prefix: str) -> PrefixSnapshot:
                raise StoreRefused("wrong password")

            bench.store.read = refuse  # type: ignore[method-assign]
            follower = Launcher(bench, "b")
            assert isinstance(await bench.failure(follower.run), StoreRefused)

        play(scenario)

    def test_one_that_refuses_later_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A password has changed: workers train on, and so does the launcher."""
        monkeypatch.setattr(candidate_module, "LONGEST_CAMPAIGN_PAUSE_S", 0)

        async def scenario(bench: Bench) -> None:
            follower = Launcher(bench, "b")
            await turns()
            bench.store.break_watches = [StoreRefused("wrong password")] * 3
            token = bench.crown()
            await until(lambda: ("a", token) in follower.follows)
            assert not follower.run.done()

        play(scenario)

    def test_campaigns_that_are_refused_come_more_and_more_seldom(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And each reason is said once."""
        monkeypatch.setattr(candidate_module, "CAMPAIGN_PAUSE_S", 0.001)
        monkeypatch.setattr(candidate_module, "LONGEST_CAMPAIGN_PAUSE_S", 1.0)
        tried = 0

        async def scenario(bench: Bench) -> None:
            async def refuse(*given: Any, **named: Any) -> int | None:
                nonlocal tried
                tried += 1
                raise StoreFull("no room left")

            write = bench.store.write
            bench.store.write = refuse  # type: ignore[method-assign]
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await asyncio.sleep(0.1)
            bench.store.write = write  # type: ignore[method-assign]
            assert [text for text in bench.said if "cannot become" in text] == [
                "cannot become the Master, the store refuses the election key: no room left"
            ]
            while not launcher.rules_now:  # noqa: ASYNC110 - the pauses are real ones
                await asyncio.sleep(0.001)

        play(scenario)
        assert 2 <= tried <= 8, "0.1 s hold 100 pauses of 1 ms, and 7 that double"

    def test_a_key_that_is_nobodys_is_named_and_passed_over(self) -> None:
        async def scenario(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            bench.store.write_now([Put(KEYS.master, b"no Master")])
            await until(lambda: any(KEYS.master in text for text in bench.said))
            bench.store.write_now([Delete(KEYS.master)])
            launcher.register(bench)
            await until(lambda: launcher.rules_now)

        play(scenario)

    def test_a_master_that_lost_the_thread_makes_room_for_one_with_a_fresh_view(self) -> None:
        async def scenario(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await until(lambda: launcher.candidate.shell is not None and launcher.candidate.shell.serving)
            await until(lambda: launcher.follows != [])
            first = launcher.candidate.shell
            token = launcher.follows[-1][1]
            await turns()
            bench.store.break_watches = [StoreError("compacted")]
            bench.register("b", port=6000)
            await until(lambda: launcher.candidate.shell not in (None, first))
            assert [text for text in bench.said if "stepping down as Master: compacted" in text]
            await until(lambda: launcher.follows[-1][1] > token)
            await until(lambda: launcher.rules_now)

        play(scenario)

    def test_a_master_that_finds_itself_replaced_follows(self) -> None:
        async def scenario(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await until(lambda: launcher.rules_now and launcher.follows != [])
            other = MasterInfo(NodeId("z"), "z.host", 1)
            bench.store.write_now([Delete(KEYS.master)])
            revision = bench.store.write_now([Put(KEYS.master, plain.dumps(other))])
            await until(lambda: launcher.follows[-1] == ("z", revision))
            assert not launcher.rules_now
            assert launcher.candidate.shell is None
            assert [text for text in bench.said if "no longer the Master" in text]

        play(scenario)

    def test_one_that_resigns_makes_room_long_before_its_lease_ends(self) -> None:
        async def scenario(bench: Bench) -> None:
            first, second = await two(bench)
            await end(first.run)
            bench.store.fail_writes = 1  # it tries again
            await first.candidate.resign()
            await until(lambda: second.rules_now)
            await first.candidate.resign()
            (entry,) = bench.store.read_now(KEYS.master).entries
            assert entry.lease == second.lease

        play(scenario)

    def test_one_that_does_not_know_of_its_election_resigns_as_well(self) -> None:
        """It has left while its campaign was not answered."""

        async def scenario(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await until(lambda: launcher.rules_now)
            await end(launcher.run)
            launcher.candidate._state = ElectionState(Role.CANDIDATE, registered=True)
            await launcher.candidate.resign()
            assert bench.store.read_now(KEYS.master).entries == ()

        play(scenario)
