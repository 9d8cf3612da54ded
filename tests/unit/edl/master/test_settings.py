"""Settings on their way from the policy and from people to every worker: all take them up at one commit, or none."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

import edl.paddle
import edl.torch
from edl.agent.machine import events as ag
from edl.agent.machine.state import AgentPhase
from edl.agent.workers.environment import WorkerGroupDeps, seat
from edl.config import HyperPolicy, LrRule, NodeRange
from edl.errors import SettingError, StateError
from edl.master import events as ev
from edl.master.hyper import NAMES, changed_policy
from edl.master.state import Phase
from edl.master.view import job_status, reply
from edl.types import NodeId, Round
from edl.wire import local, plain
from edl.wire.memory_file import write_memory
from edl.wire.messages import Asked, Attach, Boundary, Hold, KeepWith, Leaving, StartRound, Switch
from edl.wire.purpose import Purpose
from edl.wire.records import NO_SETTINGS, Settings, Version, World
from edl.worker import hyper, session
from edl.worker.context import Context
from edl.worker.link import _read_seat
from edl.worker.loop import make_run
from edl.worker.session import Session
from edl.worker.state import BaseState
from tests.support.fake_agent import FakeFramework, Worker, a_seat
from tests.unit.edl.agent.machine.test_rounds import parked, told, training
from tests.unit.edl.agent.workers.test_environment import WORLD
from tests.unit.edl.master.test_machine import info
from tests.unit.edl.master.test_planning import Aware

KEEP = HyperPolicy(global_batch=64, rule=LrRule.LINEAR, warmup=10)


def trained(policy: HyperPolicy | None = KEEP, names: str = "ab") -> Aware:
    rule = Aware(NodeRange(1, 3), hyper=policy)
    rule.join(*names)
    if rule.phase is Phase.FORMING:
        rule.wait(1.0)
    rule.underway(*names)
    return rule


def request_settings(rule: Aware, text: str) -> None:
    rule.feed(ev.OperatorRequest(Asked(Purpose.SET, "me", text)))


def notes(rule: Aware) -> list[str]:
    return [e.text for e in rule.effects if isinstance(e, ev.HistoryNote) and e.kind is ev.Kind.SETTINGS]


def held(rule: Aware) -> Settings:
    return rule.state.record.settings


def agreeing(rule: Aware) -> Purpose | None:
    return rule.state.agreement.purpose if rule.state.agreement is not None else None


def world(rule: Aware) -> World:
    assert rule.state.record.world is not None
    return rule.state.record.world


def answer_all(rule: Aware, hold: int, commit: int, names: str = "ab") -> None:
    for name in names:
        rule.answer(name, hold, commit)


class TestSettingsRequests:
    def test_change_what_they_name(self) -> None:
        found = changed_policy(
            KEEP, "global-batch=512  lr-scale=0.5 lr-rule=sqrt lr-warmup=0 local-batch=16 lr-reference=128"
        )
        assert found == HyperPolicy(512, 16, LrRule.SQRT, 0, 128, 0, 0.5)
        assert changed_policy(found, "local-batch=none") == dataclasses.replace(found, local_batch=0)

    def test_a_reference_in_another_measure_is_forgotten(self) -> None:
        assert changed_policy(HyperPolicy(reference=4), "global-batch=64").reference == 0
        assert changed_policy(HyperPolicy(reference=4), "global-batch=64 lr-reference=32").reference == 32
        assert changed_policy(HyperPolicy(64, reference=32), "global-batch=none").reference == 0
        assert changed_policy(HyperPolicy(64, reference=32), "global-batch=96").reference == 32

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "settings='': nothing to set"),
            ("batch=5", "batch=5: no such setting. Known: global-batch, local-batch, lr-rule"),
            ("lr-rule=cubic", "lr-rule=cubic: no such rule. Known: none, linear, sqrt, adascale, user"),
            ("local-batch=0", "local-batch=0: must be a number of at least 1. Write none to unset it"),
            ("global-batch=-4", "global-batch=-4: must be a number of at least 1"),
            ("global-batch", "global-batch=: must be a number of at least 1"),
            ("global-batch=99999999999", "^global-batch=99999999999: must be from 0 to 1000000000"),
            ("lr-scale=much", "lr-scale=much: must be a number"),
            ("lr-scale=-1", "^lr-scale=-1: must be more than 0"),
            ("lr-warmup=soon", "lr-warmup=soon: must be a number of commits"),
            ("logical-ranks=4", "logical-ranks=4: cannot be changed in a running job"),
        ],
    )
    def test_are_refused_by_name_and_value(self, text: str, says: str) -> None:
        with pytest.raises(SettingError, match=says):
            changed_policy(KEEP, text)

    def test_must_fit_the_logical_ranks(self) -> None:
        with pytest.raises(SettingError, match=r"^global-batch=66: cannot be split evenly over --logical-ranks=4"):
            changed_policy(HyperPolicy(64, logical_ranks=4), "global-batch=66")

    def test_all_names_are_fields(self) -> None:
        fields = {field.name for field in dataclasses.fields(HyperPolicy)}
        assert {field for field, _ in NAMES.values()} == fields - {"logical_ranks"}


class TestWorlds:
    def test_without_a_policy_nothing_is_prescribed(self) -> None:
        rule = trained(None)
        assert (held(rule), world(rule).settings, notes(rule)) == (NO_SETTINGS, NO_SETTINGS, [])

    def test_each_world_has_its_own(self) -> None:
        rule = trained(HyperPolicy(rule=LrRule.LINEAR, warmup=10))
        assert (world(rule).settings.number, world(rule).settings.reference, held(rule).factor) == (1, 4, 1.0)
        rule.lose("b")
        rule.parked("a", (1, 20))
        settings = world(rule).settings
        assert settings == held(rule)
        assert (settings.number, settings.size, settings.factor, settings.ramp_from) == (2, 2, 0.5, 1.0)
        assert (settings.ramp_begin, settings.ramp_steps) == (20, 10)
        assert notes(rule) == ["settings 2 from commit 20: LR factor 0.5 (linear), from 1 until commit 30"]
        start = rule.told()["a"]
        assert isinstance(start, StartRound) and start.world.settings == settings

    def test_the_reason_of_a_world_stays_what_it_was(self) -> None:
        rule = Aware(NodeRange(1, 1), hyper=KEEP)
        rule.join("a")
        assert rule.reason == "round 1: 1 node, 2 workers (1 node ready)"

    def test_the_next_master_knows_them(self) -> None:
        before = trained()
        record = plain.loads(type(before.state.record), plain.dumps(before.state.record))
        after = Aware(NodeRange(1, 3), hyper=KEEP, record=record, present="ab")
        assert after.state.record.settings == held(before)
        assert after.state.record.first_workers == 4

    def test_a_job_from_its_checkpoints_begins_without_a_ramp(self) -> None:
        rule = Aware(NodeRange(1, 1), hyper=HyperPolicy(rule=LrRule.LINEAR, warmup=10, reference=1))
        rule.feed(ev.NodeRegistered(info("a")))
        rule.attach("a")
        rule.parked("a", (3, 500), seen=0)
        assert world(rule).restore == Version(3, 500)
        assert (held(rule).factor, held(rule).ramp_steps) == (2.0, 0)

    def test_status_shows_them(self) -> None:
        assert job_status(trained().state, NodeId("a"), ()).settings.global_batch == 64


class TestByHand:
    def test_all_change_over_at_one_commit(self) -> None:
        rule = trained()
        request_settings(rule, "global-batch=128")
        assert rule.told() == {name: Hold(Round(1), 1, binding=True) for name in "ab"}
        rule.answer("a", 1, 7)
        assert held(rule).number == 1, "nothing is decided before all have answered"
        rule.answer("b", 1, 9)
        assert (held(rule).number, held(rule).global_batch, held(rule).ramp_begin) == (2, 128, 10)
        order = Switch(Round(1), 1, 10, Purpose.SET, "me: global-batch=128", held(rule))
        assert rule.told() == {"a": order, "b": order}
        assert rule.phase is Phase.RUNNING
        assert world(rule).settings.number == 1, "what it began with"
        assert notes(rule) == [
            "settings 2 from commit 10: global batch 128, LR factor 2 (linear), from 1 until commit 20 "
            "(me: global-batch=128)"
        ]

    def test_later_worlds_keep_it(self) -> None:
        rule = trained()
        request_settings(rule, "global-batch=128")
        answer_all(rule, 1, 9)
        rule.lose("b")
        rule.parked("a", (1, 12))
        assert (world(rule).settings.global_batch, world(rule).settings.number) == (128, 3)
        assert notes(rule)[0].endswith("until commit 20"), "the ramp goes on, and nobody is named again"

    def test_a_world_that_goes_back_takes_it_along(self) -> None:
        rule = trained()
        request_settings(rule, "global-batch=128")
        answer_all(rule, 1, 9)
        rule.lose("b")
        rule.parked("a", (1, 4))
        assert (held(rule).global_batch, held(rule).ramp_begin, held(rule).ramp_from) == (128, 4, 1.0)

    def test_another_request_before_the_boundary_is_part_of_it(self) -> None:
        rule = trained()
        request_settings(rule, "global-batch=128")
        request_settings(rule, "local-batch=8")
        answer_all(rule, 1, 9)
        assert (held(rule).number, held(rule).global_batch, held(rule).local_batch) == (2, 128, 8)
        assert rule.state.agreement is None

    def test_a_world_that_forms_meanwhile_takes_it_along(self) -> None:
        rule = trained()
        request_settings(rule, "global-batch=128")
        rule.lose("b")
        rule.parked("a", (1, 5))
        assert world(rule).settings.global_batch == 128
        assert notes(rule)[0].endswith("(me: global-batch=128)")
        rule.underway("a")
        assert rule.state.agreement is None, "it holds already"

    def test_a_checkpoint_comes_first_and_then_it_is_tried_again(self) -> None:
        rule = trained()
        request_settings(rule, "global-batch=128")
        rule.feed(ev.OperatorRequest(Asked(Purpose.SAVE, "you")))
        assert rule.told()["a"] == Hold(Round(1), 2, binding=False)
        answer_all(rule, 2, 3)
        assert rule.sent("a") == [
            Switch(Round(1), 2, 4, Purpose.SAVE, "checkpoint requested by you"),
            Hold(Round(1), 3, binding=True),
        ]
        answer_all(rule, 3, 4)
        assert held(rule).ramp_begin == 5

    def test_a_node_that_leaves_does_not_wait_for_it(self) -> None:
        rule = trained()
        request_settings(rule, "global-batch=128")
        assert agreeing(rule) is Purpose.SET
        rule.say("b", Leaving("SIGTERM", 5.0))
        assert agreeing(rule) is Purpose.SWITCH

    def test_a_boundary_that_does_not_come_about(self) -> None:
        rule = trained()
        request_settings(rule, "global-batch=128")
        rule.answer("a", 1, 7)
        rule.wait(60.0)
        assert rule.told() == {n: Switch(Round(1), 1, 0, Purpose.SAVE, "me: global-batch=128") for n in "ab"}
        assert notes(rule) == ["me: global-batch=128: takes effect with the next world, no answer from b within 60 s"]
        rule.wait(1.0)
        assert rule.state.agreement is None, "once a world"
        rule.lose("b")
        rule.parked("a", (1, 9))
        assert world(rule).settings.global_batch == 128

    def test_plain_scripts_get_it_with_their_next_world(self) -> None:
        rule = Aware(NodeRange(1, 2))
        rule.join("a", "b")
        request_settings(rule, "global-batch=128")
        assert notes(rule) == ["me: global-batch=128: takes effect with the next world"]
        assert rule.told() == {}

    def test_workers_that_are_on_their_way_get_it_once_they_train(self) -> None:
        rule = trained()
        rule.lose("b")
        rule.parked("a", (1, 9))
        request_settings(rule, "global-batch=128")
        assert notes(rule) == [
            "me: global-batch=128: takes effect with the next world, or once all workers of this one train"
        ]
        rule.underway("a")
        assert isinstance(rule.sent("a")[0], Hold)

    def test_what_holds_already(self) -> None:
        rule = trained()
        request_settings(rule, "global-batch=64 lr-warmup=3")
        assert notes(rule) == ["me: global-batch=64 lr-warmup=3: nothing changes in the running world"]
        assert rule.told() == {}
        request_settings(rule, "lr-scale=2")
        answer_all(rule, 1, 1)
        assert held(rule).ramp_steps == 3, "the warm-up is that of the next change"

    def test_nonsense_changes_nothing(self) -> None:
        rule = trained()
        before = rule.state.record
        request_settings(rule, "local-batch=0")
        assert rule.state.record == before
        assert notes(rule)[0].startswith("me: local-batch=0: refused, local-batch=0: must be")

    def test_in_a_job_without_a_policy(self) -> None:
        rule = trained(None)
        request_settings(rule, "global-batch=128 lr-rule=linear")
        answer_all(rule, 1, 6)
        assert (held(rule).number, held(rule).reference, held(rule).factor) == (1, 128, 1.0)
        request_settings(rule, "global-batch=256")
        answer_all(rule, 2, 9)
        assert (held(rule).reference, held(rule).factor) == (128, 2.0)
        request_settings(rule, "global-batch=none")
        answer_all(rule, 3, 11)
        assert (held(rule).reference, held(rule).size, held(rule).factor) == (4, 4, 1.0)

    def test_the_reference_of_a_known_local_batch(self) -> None:
        rule = trained(HyperPolicy(local_batch=16, rule=LrRule.LINEAR))
        request_settings(rule, "global-batch=128")
        answer_all(rule, 1, 6)
        assert (held(rule).reference, held(rule).factor) == (64, 2.0)

    def test_answers(self) -> None:
        rule = trained()

        def says(text: str) -> tuple[str, bool]:
            answer = reply(rule.state, Purpose.SET, "", text)
            return answer.text, answer.ok

        assert says("global-batch=128") == ("takes effect at the next step boundary", True)
        assert says("lr-rule=up")[1] is False
        rule.lose("b")
        now = "no world with edl.State is in training: takes effect with the next world"
        assert says("global-batch=128") == (now, True)
        rule.feed(ev.OperatorRequest(Asked(Purpose.KILL, "boss")))
        assert says("global-batch=128") == ("the job is being stopped by boss", False)


def detach(rule: Aware, name: str) -> None:
    rule.feed(ev.NodeDetached(NodeId(name), info(name).incarnation))


def attach(rule: Aware, name: str) -> None:
    rule.feed(ev.NodeAttached(Attach(info(name), Round(1), Round(1), False, underway=True)))


def without_copies(rule: Aware, name: str) -> list[object]:
    """What a node is sent beside the order where its copies go, which is repeated on every stream."""
    return [message for message in rule.sent(name) if not isinstance(message, KeepWith)]


class TestLostWords:
    def test_who_was_away_is_told_what_holds(self) -> None:
        rule = trained()
        request_settings(rule, "global-batch=128")
        rule.answer("b", 1, 7)
        rule.answer("a", 1, 7)
        detach(rule, "b")
        attach(rule, "b")
        assert without_copies(rule, "b") == [Switch(Round(1), 0, 8, Purpose.SET, "", held(rule))]

    def test_also_when_nothing_came_of_it(self) -> None:
        rule = trained()
        request_settings(rule, "global-batch=128")
        record = rule.state.record
        later = Aware(NodeRange(1, 3), hyper=KEEP, record=record, present="ab")
        attach(later, "a")
        assert later.sent("a")[0] == Switch(Round(1), 0, 0, Purpose.SET, "", held(rule))
        attach(later, "b")
        reminder, again = without_copies(later, "b")
        assert isinstance(reminder, Switch) and reminder.settings == held(rule)
        assert again == Hold(Round(1), 1, binding=True), "settings requested are requested of the next Master, too"

    def test_and_before_anything_else_is_asked(self) -> None:
        rule = trained()
        request_settings(rule, "global-batch=128")
        answer_all(rule, 1, 7)
        detach(rule, "b")
        rule.feed(ev.OperatorRequest(Asked(Purpose.SAVE, "you")))
        attach(rule, "b")
        reminder, again = without_copies(rule, "b")
        assert isinstance(reminder, Switch) and reminder.commit == 8
        assert again == Hold(Round(1), 3)

    def test_who_never_changes_settings_is_not_bothered(self) -> None:
        rule = trained()
        detach(rule, "b")
        attach(rule, "b")
        assert without_copies(rule, "b") == []


# --- the agent -------------------------------------------------------------------------------------------------------


def here(local_rank: int, hold: int = 4, commit: int = 7) -> ag.WorkerHere:
    return ag.WorkerHere(Round(1), local_rank, hold, commit)


class TestAgent:
    def asked(self, *answers: int) -> Any:
        node = training().hear(Hold(Round(1), 4, binding=True))
        node.feed(*(here(rank) for rank in answers))
        return node

    def test_hands_them_to_all_workers(self) -> None:
        node = self.asked(0, 1)
        assert node.said() == [Boundary(Round(1), 4, 7)]
        node.hear(Switch(Round(1), 4, 8, Purpose.SET, "why", Settings(2)))
        assert told(node) == [local.Target(4, 8, "set", "why", Settings(2))]
        assert (node.state.phase, node.state.hold) == (AgentPhase.RUNNING, 0)

    def test_lets_nobody_go_on_who_may_have_agreed(self) -> None:
        node = self.asked(0, 1).feed(ag.Disconnected())
        assert told(node) == []
        node.feed(ag.Connected()).hear(Switch(Round(1), 0, 8, Purpose.SET, "", Settings(2)))
        assert told(node) == [local.Target(4, 8, "set", "", Settings(2))]
        assert node.wait(1000.0).state.phase is AgentPhase.RUNNING

    def test_lets_them_go_on_if_nothing_can_have_been_agreed(self) -> None:
        assert told(self.asked(0).feed(ag.Disconnected())) == [local.Release(4)]
        node = training().hear(Hold(Round(1), 4)).feed(here(0), here(1), ag.Disconnected())
        assert told(node) == [local.Release(4)]

    def test_breaks_off_when_nobody_says_what_was_agreed(self) -> None:
        node = self.asked(0, 1).feed(ag.Disconnected())
        for _ in range(30):
            node.now_s += 2.0
            node.feed(ag.LeaseRenewed())
        assert node.state.phase is AgentPhase.STOPPING
        assert told(node) == [local.Break(1, node.state.reason)]
        assert "no Master has announced" in node.state.reason
        assert node.feed(parked(0, left=1), parked(1, left=1)).state.doubt_by_s is None

    def test_settings_of_another_round_are_not_passed_on(self) -> None:
        node = self.asked(0, 1).hear(Switch(Round(2), 4, 8, Purpose.SET, "why", Settings(2)))
        assert told(node) == []


# --- the worker ------------------------------------------------------------------------------------------------------


def test_a_seat_comes_with_them_through_the_memory_file() -> None:
    world = dataclasses.replace(WORLD, settings=Settings(3, global_batch=64, factor=0.25))
    placed = seat(world, NodeId("b"), 0, {}, WorkerGroupDeps(), "secret")
    descriptor = write_memory("edl-seat", plain.dumps(placed))
    try:
        assert _read_seat(descriptor) == placed
    finally:
        os.close(descriptor)


def test_a_worker_takes_them_up_at_the_boundary_and_goes_on() -> None:
    worker = Worker()
    framework = FakeFramework()
    run = make_run(framework, lambda: worker.session)
    state = BaseState(framework, {"step": 0})
    seen: list[tuple[int, int, str]] = []

    def train(state: BaseState) -> None:
        while state.commits < 5:
            state.commit()
            environment = worker.session.environment
            seen.append((state.commits, worker.session.settings.global_batch, environment.get("EDL_LOCAL_BATCH", "")))
            if state.commits == 2:
                worker.agent.expect(local.TrainingStarted)
                worker.agent.send(local.HoldAtBoundary(1, 1))
                assert worker.agent.expect(local.Here).commit == 2
                held = Settings(2, global_batch=100)
                worker.agent.send(local.Target(1, 4, "set", "why", held))

    worker.start(lambda: run(train)(state))
    worker.agent.expect(local.Enter)
    worker.agent.expect(local.Parked)
    worker.agent.place(a_seat(1, settings=Settings(1, global_batch=64)))
    worker.join()
    worker.settle()
    assert seen == [(1, 64, ""), (2, 64, ""), (3, 64, ""), (4, 100, "100"), (5, 100, "100")]
    assert worker.agent.versions()[:4] == [(1, number) for number in range(1, 5)], "each of them an ordinary commit"
    worker.close()


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(session, "_current", None)
    for name in [name for name in os.environ if name.startswith("EDL_")]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


class TestView:
    def test_without_a_launcher(self, no_session: pytest.MonkeyPatch) -> None:
        assert hyper.current() is NO_SETTINGS
        assert hyper.settings() == hyper.SettingsView(0, 0, 0, 0, 1, 1.0, 0)
        assert hyper.settings(batch_size=8) == hyper.SettingsView(0, 8, 8, 8, 1, 1.0, 0)
        assert session.opened() is None, "asking makes no session"

    def test_of_a_plain_script(self, no_session: pytest.MonkeyPatch) -> None:
        told = {"EDL_AGENT": "nobody", "EDL_ROUND": "1", "RANK": "2", "WORLD_SIZE": "3", "EDL_SETTINGS": "4"}
        for name, value in {**told, "EDL_GLOBAL_BATCH": "50", "EDL_MICRO_BATCH": "6", "EDL_LR_FACTOR": "0.5"}.items():
            no_session.setenv(name, value)
        assert hyper.settings() == hyper.SettingsView(4, 50, 16, 6, 3, 0.5, 0)
        assert hyper.lr_factor() == 0.5
        assert session.opened() is None, "nor does it take part in worlds"

    def test_of_a_place(self, no_session: pytest.MonkeyPatch) -> None:
        one = Session(None, {})
        one.seat = a_seat(rank=1, world_size=3)
        one.settings = Settings(2, global_batch=50, factor=3.0, ramp_from=1.0, ramp_begin=10, ramp_steps=4)
        one.state = type("Kept", (), {"commits": 12})()
        no_session.setattr(session, "_current", one)
        expected = hyper.SettingsView(2, 50, 17, 5, 4, 2.0, 0)
        assert hyper.settings(batch_size=5) == expected
        place = Context(1, 1, 3, 3, "a", 1, 1, False, "", True)
        assert hyper.view(place, batch_size=5) == expected
        assert hyper.plan(5).local == (17, 17, 16)
        assert (hyper.lr_factor(10), hyper.lr_factor(), hyper.lr_factor(99)) == (1.0, 2.0, 3.0)

    def test_that_cannot_be(self, no_session: pytest.MonkeyPatch) -> None:
        no_session.setenv("RANK", "3")
        no_session.setenv("WORLD_SIZE", "3")
        with pytest.raises(StateError, match="rank 3 in a world of 3 workers"):
            hyper.settings(8)

    def test_is_what_scripts_import(self) -> None:
        assert edl.torch.settings is edl.paddle.settings is hyper.settings
