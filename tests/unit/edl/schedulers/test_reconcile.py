"""The reconciler, one step at a time."""

from __future__ import annotations

import dataclasses

import pytest

from edl.job_records import SizeOwner
from edl.schedulers import reconcile as rc
from edl.schedulers.plan import JobSummary, Node, release_plan, target_of
from edl.schedulers.port import Disruption, Observation, SchedulerSize, Sized
from edl.wire.scale_requests import Drain, Granted, Resize, Verdict


class Bench:
    """The machine, fed by hand."""

    def __init__(self, owner: SizeOwner = SizeOwner.MASTER, *, indexed: bool = False, at_end: bool = False) -> None:
        self.state = rc.ReconcileState(rc.About("it", owner, indexed, at_end))
        self.now_s = 0.0

    def __call__(self, event: rc.Event, after_s: float = 0.0) -> list[rc.Effect]:
        self.now_s += after_s
        decision = rc.step(self.state, event, self.now_s)
        self.state = decision.state
        return [effect for effect in decision.effects if not isinstance(effect, rc.WakeAt)]


def job(*members: str, spares: tuple[str, ...] = (), desired: int = 3, **changes: object) -> JobSummary:
    nodes = [Node(name, member=True) for name in members] + [Node(name, spare=True) for name in spares]
    made = JobSummary(1, 6, 1, desired, asked=True, running=bool(members), nodes=tuple(nodes))
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def saw(observation: Observation) -> rc.Observed:
    return rc.Observed(observation)


OK = Granted(Verdict.ACCEPTED, "yes")


class TestCalls:
    def test_it_looks_before_it_asks(self) -> None:
        bench = Bench()
        assert bench(rc.Looked(job("a"))) == [rc.Current()]
        note = rc.LogMessage("asking it for 3 nodes: the job wants 3 nodes")
        assert bench(rc.CallSucceeded(SchedulerSize(1)))[:2] == [note, rc.Ask(3, "the job wants 3 nodes")]

    def test_errors_that_may_pass_are_said_once_and_retried_more_and_more_slowly(self) -> None:
        bench = Bench()
        bench(rc.Looked(job("a")))
        said = bench(rc.CallFailed("it: 503", retry=True))
        assert [type(effect) for effect in said] == [rc.LogMessage, rc.Explain]
        pauses = []
        for _ in range(10):
            begun_s = bench.now_s
            while not (effects := bench(rc.Tick(), 0.25)):
                pass
            assert effects == [rc.Current()]
            pauses.append(bench.now_s - begun_s)
            assert bench(rc.CallFailed("it: 503", retry=True)) == []
        assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
        assert max(pauses) == rc.LAST_RETRY_S
        bench(rc.Tick(), rc.LAST_RETRY_S)
        assert bench(rc.CallSucceeded(SchedulerSize(3))) == [
            rc.LogMessage("it answers again"),
            rc.Explain("it: 1 of 3 nodes have joined"),
        ]

    def test_errors_that_will_not_pass_are_tried_again_after_a_minute(self) -> None:
        bench = Bench()
        bench(rc.Looked(job("a")))
        bench(rc.CallFailed("it: 403 forbidden", retry=False))
        assert bench(rc.Tick(), 59.0) == []
        assert bench(rc.Tick(), 1.5) == [rc.Current()]
        assert bench(rc.CallFailed("it: 403 forbidden", retry=False)) == []

    def test_an_answer_that_was_lost_costs_one_look(self) -> None:
        bench = Bench()
        bench(rc.Looked(job("a")))
        bench(rc.CallSucceeded(SchedulerSize(1)))
        bench(rc.CallFailed("it: no answer", retry=True))
        bench(saw(Sized(SchedulerSize(3))))
        assert not [effect for effect in bench(rc.Tick(), 1.0) if isinstance(effect, rc.Ask)]
        assert bench.state.trouble == ""

    def test_what_has_no_effect_is_asked_for_more_and_more_seldom(self) -> None:
        bench = Bench()
        bench(rc.Looked(job("a")))
        effects = bench(rc.CallSucceeded(SchedulerSize(1)))
        times = []
        while bench.now_s < 600.0:
            for effect in effects:
                if isinstance(effect, rc.Ask):
                    times.append(bench.now_s)
                    effects = bench(rc.CallSucceeded())
                    break
                if isinstance(effect, rc.Current):
                    effects = bench(rc.CallSucceeded(SchedulerSize(1)))
                    break
            else:
                effects = bench(rc.Tick(), 0.5)
        assert 10 <= len(times) <= 20
        assert times[-1] - times[-2] >= 60.0

    def test_two_owners_that_fight_are_told_of(self) -> None:
        bench = Bench()
        bench(rc.Looked(job("a", "b", "c")))
        bench(rc.CallSucceeded(SchedulerSize(1)))
        bench(rc.CallSucceeded())
        bench(rc.CallSucceeded(SchedulerSize(3)))
        assert rc.LogMessage("it was changed by others to 5 nodes") in bench(saw(Sized(SchedulerSize(5))))

    def test_the_end_waits_for_a_few_tries_only(self) -> None:
        bench = Bench(at_end=True)
        bench(rc.Looked(job("a", "b", "c")))
        bench(rc.CallSucceeded(SchedulerSize(3)))
        assert bench(rc.Looked(job("a", "b", "c", ended=True))) == [
            rc.ReleaseNodes(("a", "b", "c"), 0, "the job has ended")
        ]
        effects: list[rc.Effect] = []
        while rc.Finished() not in effects:
            effects = bench(rc.CallFailed("it: 500", retry=True)) or bench(rc.Tick(), 0.5)
        assert bench.now_s < 5.0

    def test_at_the_end_there_is_no_time_to_wait_after_an_error_of_before(self) -> None:
        bench = Bench(at_end=True)
        bench(rc.Looked(job("a", "b", "c")))
        bench(rc.CallFailed("it: 403", retry=False))
        assert rc.ReleaseNodes(("a",), 0, "the job has ended") in bench(rc.Looked(job("a", ended=True)), 1.0)

    @pytest.mark.parametrize(
        "outcome", [rc.CallFailed("it: 403", retry=False), rc.CallSucceeded(SchedulerSize(1)), rc.CallSucceeded()]
    )
    def test_a_call_that_began_before_the_end_is_not_the_last_one(self, outcome: rc.Event) -> None:
        bench = Bench(at_end=True)
        bench(rc.Looked(job("a", desired=3)))
        if outcome == rc.CallSucceeded():
            assert rc.Ask(3, "the job wants 3 nodes") in bench(rc.CallSucceeded(SchedulerSize(1)))
        bench(rc.Looked(job("a", ended=True)))
        assert rc.ReleaseNodes(("a",), 0, "the job has ended") in bench(outcome)

    def test_a_refused_end_says_what_is_left_to_do(self) -> None:
        bench = Bench(at_end=True)
        bench(rc.Looked(job("a", ended=True)))
        effects = bench(rc.CallFailed("it: 403", retry=False))
        assert effects[-1] == rc.Finished()
        text = "it: 403 (given up: scale it to 0 nodes, or it starts the nodes of the ended job again)"
        assert rc.LogMessage(text) in effects


class TestShrinking:
    def bench(self, *members: str, spares: tuple[str, ...] = (), size: int = 4, desired: int = 2) -> Bench:
        bench = Bench()
        bench(rc.Looked(job("a", "b", "c", "d", desired=4)))
        bench(rc.CallSucceeded(SchedulerSize(size)))
        bench(rc.Looked(job(*members, spares=spares, desired=desired)))
        return bench

    def test_while_too_many_train_nothing_is_given_back(self) -> None:
        bench = self.bench("a", "b", "c", "d")
        assert bench(rc.Tick(), 5.0) == []

    def test_surplus_nodes_are_told_to_leave_and_then_given_back(self) -> None:
        bench = self.bench("a", "b", "c", "d")
        (told,) = bench(rc.Looked(job("a", "b", spares=("c", "d"), desired=2)))
        assert isinstance(told, rc.TellMaster)
        assert isinstance(told.request, Drain)
        assert told.request.nodes == ("c", "d")
        assert bench(rc.Tick(), 1.0) == []
        note = rc.LogMessage("releasing nodes of it (d, c); 2 will be left: 2 nodes are wanted")
        assert bench(rc.Replied(OK)) == [note, rc.ReleaseNodes(("d", "c"), 2, "2 nodes are wanted")]

    def test_those_that_leave_quickly_are_named_all_the_same(self) -> None:
        bench = self.bench("a", "b", "c", "d")
        bench(rc.Looked(job("a", "b", spares=("c", "d"), desired=2)))
        assert rc.ReleaseNodes(("c", "d"), 2, "2 nodes are wanted") in bench(rc.Looked(job("a", "b", desired=2)))
        bench(rc.Replied(OK))
        bench(rc.CallFailed("it: no answer", retry=True))
        assert rc.ReleaseNodes(("c", "d"), 2, "2 nodes are wanted") in bench(rc.Tick(), 1.5), "until it has heard"

    def test_one_that_has_become_a_member_meanwhile_is_not_given_back(self) -> None:
        bench = self.bench("a", "b", "c", "d")
        bench(rc.Looked(job("a", "b", spares=("c", "d"), desired=2)))
        bench(rc.Looked(job("a", "c", spares=("d",), desired=2)))  # b has died
        assert not [
            effect for effect in bench(rc.Replied(OK)) if isinstance(effect, rc.ReleaseNodes) and "c" in effect.names
        ]

    def test_a_refused_drain_is_said_once_and_gives_nothing_back(self) -> None:
        bench = self.bench("a", "b", "c", "d")
        bench(rc.Looked(job("a", "b", spares=("c", "d"), desired=2)))
        no = Granted(Verdict.REFUSED, "not now")
        assert bench(rc.Replied(no)) == [rc.LogMessage("it: not now")]
        assert bench(rc.Tick(), 5.0) == []
        assert [type(effect) for effect in bench(rc.Tick(), 60.0)] == [rc.TellMaster, rc.Current]
        assert bench(rc.Replied(no)) == []

    def test_those_that_have_not_come_go_first(self) -> None:
        bench = Bench()
        bench(rc.Looked(job("a", "b", desired=2)))
        assert rc.ReleaseNodes((), 2, "2 nodes are wanted") in bench(rc.CallSucceeded(SchedulerSize(5)))


class TestDisruption:
    def test_all_of_them_leave_together_with_the_shortest_time(self) -> None:
        bench = Bench(SizeOwner.EXTERNAL)
        bench(rc.Looked(job("a", "b", "c")))
        (told,) = bench(saw(Disruption("a", "spot", 120.0)))
        bench(saw(Disruption("b", "spot", 90.0)))
        bench(saw(Disruption("c", "taint", 30.0)))
        assert told == rc.TellMaster(Drain(("a",), "it", "spot", 120.0))
        (told,) = bench(rc.Replied(OK))
        assert told == rc.TellMaster(Drain(("b", "c"), "it", "spot; taint", 30.0))

    def test_it_does_not_wait_for_a_silent_scheduler(self) -> None:
        bench = Bench()
        assert bench(rc.Looked(job("a", "b"))) == [rc.Current()]  # and no answer
        assert [type(effect) for effect in bench(saw(Disruption("a", "spot")))] == [rc.TellMaster]

    def test_the_same_news_again_and_unknown_nodes_say_nothing(self) -> None:
        bench = Bench(SizeOwner.EXTERNAL)
        bench(rc.Looked(job("a", "b", "c")))
        bench(saw(Disruption("a", "spot")))
        bench(rc.Replied(OK))
        assert bench(saw(Disruption("a", "spot"))) == []
        assert bench(saw(Disruption("nobody", "spot"))) == []

    def test_a_host_is_known_by_its_name_or_address(self) -> None:
        bench = Bench(SizeOwner.EXTERNAL)
        nodes = (Node("h1-0a1b", host="10.0.0.1"), Node("h1", host="10.0.0.9"), Node("h12-0a1b", host="10.0.0.2"))
        bench(rc.Looked(job(nodes=nodes)))
        (told,) = bench(saw(Disruption("h1", "gone")))
        assert isinstance(told, rc.TellMaster)
        assert isinstance(told.request, Drain)
        assert told.request.nodes == ("h1", "h1-0a1b")
        bench(rc.Replied(OK))
        (told,) = bench(saw(Disruption("10.0.0.2", "gone")))
        assert isinstance(told, rc.TellMaster)
        assert isinstance(told.request, Drain)
        assert told.request.nodes == ("h12-0a1b",)

    def test_one_that_cannot_be_spared_yet_leaves_when_others_have_come(self) -> None:
        bench = Bench(SizeOwner.EXTERNAL)
        bench(rc.Looked(job("a", "b", desired=2)))
        bench(rc.CallSucceeded(SchedulerSize(2)))
        told = bench(saw(Disruption("a", "spot")))
        no = Granted(Verdict.REFUSED, "leaves 1 node able to take part, at least 2 needed")
        assert bench(rc.Replied(no)) == [rc.LogMessage(f"it: {no.text}")]
        resize = rc.TellMaster(Resize(3, "it", "it has 3 nodes", external=True))
        assert bench(saw(Sized(SchedulerSize(3))), 1.0) == [resize], "other requests do not wait for it"
        bench(rc.Replied(OK))
        assert bench(rc.Looked(job("a", "b", spares=("c",))), 1.0) == []
        assert bench(rc.Tick(), rc.DRAIN_RETRY_S) == [*told, rc.Current()]
        bench(rc.Replied(OK))
        bench(rc.Looked(job("b", "c")))
        assert not bench.state.disruptions, "who comes under its name later is another one"

    def test_the_others_are_notified_although_one_has_left(self) -> None:
        bench = Bench(SizeOwner.EXTERNAL)
        bench(rc.Looked(job("a", "b", "c")))
        bench(saw(Disruption("c", "spot")))
        bench(saw(Disruption("a", "spot")))
        bench(saw(Disruption("b", "spot")))
        assert bench(rc.Replied(OK)) == [rc.TellMaster(Drain(("a", "b"), "it", "spot"))]
        bench(rc.Looked(job("b", "c")))
        assert bench(rc.Replied(Granted(Verdict.UNKNOWN, "no such node: a"))) == []
        assert bench(rc.Tick(), rc.FIRST_RETRY_S) == [rc.TellMaster(Drain(("b",), "it", "spot"))]

    def test_while_the_store_is_away_nothing_is_forgotten(self) -> None:
        bench = Bench(SizeOwner.EXTERNAL)
        bench(rc.Looked(job("a", "b", "c")))
        told = bench(saw(Disruption("a", "spot")))
        assert bench(rc.Unheard("no answer")) == [rc.LogMessage("it: no answer")]
        assert bench(rc.Tick(), rc.UNHEARD_S) == told
        assert bench(rc.Unheard("no answer")) == [], "said once"


class TestExternal:
    def test_a_size_outside_the_bounds_is_told_once(self) -> None:
        bench = Bench(SizeOwner.EXTERNAL)
        bench(rc.Looked(job("a", desired=6)))
        told, _ = bench(rc.CallSucceeded(SchedulerSize(9)))
        assert told == rc.TellMaster(Resize(9, "it", "it has 9 nodes", external=True))
        bench(rc.Replied(Granted(Verdict.KNOWN, "")))
        assert bench(saw(Sized(SchedulerSize(9)))) == []
        assert bench(rc.Looked(job("a", desired=6, maximum=10))) != [], "other bounds, another matter"

    def test_a_new_master_tells_nothing_new(self) -> None:
        bench = Bench(SizeOwner.EXTERNAL)
        bench(rc.Looked(job("a", "b", "c")))
        assert bench(rc.CallSucceeded(SchedulerSize(3))) == []


class TestPlan:
    @pytest.mark.parametrize(
        ("asked", "desired", "unit", "size", "target"),
        [(False, 6, 1, 2, 2), (False, 6, 1, 9, 6), (False, 6, 1, 0, 1), (True, 4, 1, 2, 4), (True, 5, 2, 2, 4)],
    )
    def test_target(self, asked: bool, desired: int, unit: int, size: int, target: int) -> None:
        assert target_of(JobSummary(1, 6, unit, desired, asked, True), size) == target

    def test_a_node_without_an_index_blocks_and_is_named(self) -> None:
        plan = release_plan(job("a", spares=("b", "c"), desired=1), 3, indexed=True)
        assert plan is not None
        assert plan.left == 3
        assert plan.blocked == "the index of a, b, c is unknown (--node-index): no node can be removed"

    @pytest.mark.parametrize("indexed", [False, True])
    def test_spares_stay_while_the_world_is_still_too_large(self, indexed: bool) -> None:
        nodes = tuple(Node(f"n-{n}", n, member=n < 3, spare=n == 3) for n in range(4))
        assert release_plan(job("n-0", nodes=nodes, desired=2), 4, indexed) is None

    def test_a_member_with_a_high_index_trains_until_a_lower_one_can_take_its_place(self) -> None:
        nodes = (Node("n-0", 0, member=True), Node("n-3", 3, member=True))
        plan = release_plan(job("n-0", nodes=nodes, desired=2), 4, indexed=True)
        assert plan is not None
        assert (plan.left, plan.drain) == (4, ())
        assert plan.blocked == "n-3 trains until nodes with lower indexes join"
        low = (*nodes, Node("n-1", 1, spare=True))
        plan = release_plan(job("n-0", nodes=low, desired=2), 4, indexed=True)
        assert plan is not None
        assert (plan.left, plan.names, plan.drain) == (4, (), ("n-3",))

    def test_a_member_above_cordoned_nodes_gives_way_to_the_lowest_that_may_train(self) -> None:
        cordoned = tuple(Node(f"n-{n}", n, cordoned=True) for n in range(2))
        spares = tuple(Node(f"n-{n}", n, spare=True) for n in (2, 3))
        plan = release_plan(
            job("n-4", nodes=(*cordoned, *spares, Node("n-4", 4, member=True)), desired=1), 5, indexed=True
        )
        assert plan is not None
        assert (plan.left, plan.names, plan.drain, plan.blocked) == (5, (), ("n-4",), "")
        moved = (*cordoned, Node("n-2", 2, member=True), Node("n-3", 3, spare=True), Node("n-4", 4, spare=True))
        plan = release_plan(job("n-2", nodes=moved, desired=1), 5, indexed=True)
        assert plan is not None
        assert (plan.left, plan.names) == (3, ("n-3", "n-4"))
        plan = release_plan(job("n-2", nodes=moved[:3], desired=1), 3, indexed=True)
        assert plan is not None
        assert (plan.left, plan.names) == (3, ())

    def test_cordoned_nodes_go_first_and_the_masters_last(self) -> None:
        nodes = (
            Node("a", member=True),
            Node("b", cordoned=True),
            Node("c", spare=True),
            Node("d", spare=True, is_master=True),
        )
        plan = release_plan(job("a", nodes=nodes, desired=2), 4, indexed=False)
        assert plan is not None
        assert plan.names == ("b", "c")
